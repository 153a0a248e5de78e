"""Active learning: which frames are worth a label, their labels, and which frames are physically possible."""
