"""Scores of predicted distributions: figures of merit, calibration, and the metric that is logged in training."""
