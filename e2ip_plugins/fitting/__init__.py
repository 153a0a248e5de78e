"""Fit of the leverage: features to moments, residuals to constants."""
