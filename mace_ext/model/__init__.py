"""The e²IP model of MACE: the stock model with a readout, and its files."""
