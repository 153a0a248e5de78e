"""Predictions of MACE models: ASE calculator, batches, ``mace_eval_configs``, torch-sim, i-PI."""
