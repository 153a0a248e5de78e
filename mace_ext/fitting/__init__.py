"""Fit of the leverage of MACE models: after a training, and of model files."""
