"""How good predicted distributions are: figures of merit (NumPy), and the metric that both hosts log in training."""
