"""The e²IP model of NequIP: any energy model with a readout, its files and backbones."""
