"""Atoms whose force is zero by symmetry: isolated atoms, sites of perfect crystals."""

from typing import Union

import numpy as np
import torch
from torch import Tensor

#: Rounding of predicted forces that vanish by symmetry, and noise of their references, in eV/Å.
ROUNDING, NOISE = 1e-5, 1e-3


def vanishing(forces: Union[Tensor, np.ndarray], residual: Union[Tensor, np.ndarray]) -> Tensor:
    """Return a mask (N,) of atoms whose force is zero by symmetry.

    Their error is zero, too, whatever the error bar. They say nothing about errors, and a likelihood would make their
    variance ever smaller.

    Parameters
    ----------
    forces, residual : (N, 3)
        Predicted, and reference minus predicted, in eV/Å.
    """
    largest_force, largest_error = (torch.as_tensor(x).detach().abs().amax(-1) for x in (forces, residual))
    return (largest_force < ROUNDING) & (largest_error < NOISE)
