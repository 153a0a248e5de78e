"""Training with ``nequip-train``: loss, metrics, statistics and checks."""
