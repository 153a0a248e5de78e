"""The readout, from node features of NequIP or MACE to the distribution of every atom's force; `kernels` for GPUs."""
