"""What is done with trained models: fits."""
