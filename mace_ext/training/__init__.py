"""Training with ``mace_run_train``: options, checks, loss and metrics."""
