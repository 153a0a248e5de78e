"""Formulas without a user: SPD map and dampers, Student-t with evidence, and the same for machines in `kernels`."""
