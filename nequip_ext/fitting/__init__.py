"""Fit of the leverage of NequIP models: after a training, of checkpoints and of packages."""
