"""SPD map, its dampers, and the Student-t with its evidence; `kernels` computes the same faster."""
