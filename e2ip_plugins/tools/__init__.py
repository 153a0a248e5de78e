"""What is done with trained models and their frames: fits, predictions, calibrations, selection, labels."""
