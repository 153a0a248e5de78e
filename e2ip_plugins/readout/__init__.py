"""The model side, pure torch: from a host's node features to the distribution of every atom's force."""
