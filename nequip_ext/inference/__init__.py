"""Predictions of NequIP models: ASE calculator, batches and xyz files."""
