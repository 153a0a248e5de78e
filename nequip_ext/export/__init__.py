"""Stock NequIP models out of those with a readout."""
