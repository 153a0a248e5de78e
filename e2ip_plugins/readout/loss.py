"""The force term of the training loss: a family's loss per atom over the atoms that count."""

from typing import Dict, Tuple

import torch
from torch import Tensor

from e2ip_plugins.families.interface import Family


def force_loss(family: Family, reference: Tensor, forces: Tensor, outputs: Dict[str, Tensor]) -> Tuple[Tensor, Tensor]:
    """Return the loss per atom and the mask of atoms that count.

    Parameters
    ----------
    family : Family
    reference, forces : (N, 3)
        y and γ in eV/Å. Atoms with a NaN or infinite reference are masked.
    outputs : dict
        Outputs of a readout of this family: ``e2ip_coefficients`` (N, C), ``e2ip_force_unit`` (N,) and more.

    Returns
    -------
    loss : (N,)
        Zero where masked.
    mask : (N,) bool
    """
    mask = torch.isfinite(reference).all(dim=-1)
    residual = torch.where(mask.unsqueeze(-1), reference - forces, torch.zeros_like(forces))
    loss = family.force_loss(residual, outputs)
    return torch.where(mask, loss, torch.zeros_like(loss)), mask
