"""Predictive families."""
