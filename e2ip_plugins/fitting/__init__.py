"""Fit of the leverage: features to moments, residuals to constants; files of readouts that travel without a model."""
