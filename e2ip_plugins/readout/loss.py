"""The force term of the training loss, and what keeps the readout's gradients apart from those of NequIP or MACE."""

from typing import Callable, Dict, Iterable, Tuple

import torch
from torch import Tensor

from e2ip_plugins.families.interface import Family
from e2ip_plugins.readout.vanishing import vanishing


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
        Zero where masked, and of atoms whose force is zero by symmetry, which count: a mean square error of them is
        zero, too.
    mask : (N,) bool
    """
    mask = torch.isfinite(reference).all(dim=-1)
    residual = torch.where(mask.unsqueeze(-1), reference - forces, torch.zeros_like(forces))
    loss = family.force_loss(residual, outputs)
    return torch.where(mask & ~vanishing(forces, residual), loss, torch.zeros_like(loss)), mask


def add_gradient(value: Tensor, term: Tensor) -> Tensor:
    """Return ``value``, to the last bit, with the gradient of ``term`` added to its own.

    With ``forces: host`` the loss of NequIP or MACE is the value, which schedulers and the choice of checkpoints see,
    and the readout learns from its own term beside it.
    """
    # NaN - NaN and infinity - infinity are no zeros.
    return value + torch.nan_to_num(term - term.detach())


def clip_apart(clip: Callable[[], None], readout: Iterable[Tensor], everything: Iterable[Tensor]) -> None:
    """Clip the gradients of the readout, and those of everything else, as if the other were not there.

    Parameters
    ----------
    clip : callable
        Clips the gradients of all parameters by their norm; those without a gradient do not count.
    readout, everything : iterable of parameters
        Those of the readout, and all of the training.
    """
    of_readout = list(readout)
    identities = set(map(id, of_readout))
    others = [parameter for parameter in everything if id(parameter) not in identities]
    for hidden in (of_readout, others):
        gradients = [parameter.grad for parameter in hidden]
        for parameter in hidden:
            parameter.grad = None
        clip()
        for parameter, gradient in zip(hidden, gradients, strict=True):
            parameter.grad = gradient
