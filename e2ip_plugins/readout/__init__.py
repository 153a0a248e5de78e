"""The readout, pure torch: from node features of NequIP or MACE to the distribution of every atom's force."""
