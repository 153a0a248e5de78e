"""The readout's predictions on a GPU: everything behind a model's features in four kernels."""
