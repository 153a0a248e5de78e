"""Frames, in files and in ASE: reference labels, predictions, the fingerprints that tell them apart."""
