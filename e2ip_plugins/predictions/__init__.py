"""Frames in files: with reference labels, with predictions, and the fingerprints that tell them apart."""
