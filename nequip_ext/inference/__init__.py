"""Predictions of NequIP models: ASE calculator, batches, xyz files, torch-sim."""
