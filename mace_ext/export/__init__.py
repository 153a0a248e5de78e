"""Stock MACE models out of those with a readout."""
