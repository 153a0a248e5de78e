"""Reference forces as they come from data files: present, or a clear error; finite, or masked."""

from typing import List, Optional, Tuple

import torch
from nequip.data import AtomicDataDict, BaseModifier
from torch import Tensor

from e2ip_plugins.errors import InputError


def reference_forces(data: AtomicDataDict.Type) -> Tensor:
    """Reference forces (N, 3) in eV/Å; `InputError` where the data has none."""
    if AtomicDataDict.FORCE_KEY not in data:
        raise InputError(
            "the data has no reference forces ('forces'): if the file names them differently, say so in the data "
            "section, for example 'key_mapping: {REF_forces: forces, REF_energy: total_energy}'; "
            f"fields found: {', '.join(sorted(data))}"
        )
    return data[AtomicDataDict.FORCE_KEY]


def nan_where_not_finite(forces: Tensor) -> Tuple[Tensor, Tensor]:
    """Forces (N, 3) with every atom that has a NaN or infinite component all NaN, and the mask (N,) of those."""
    bad = ~torch.isfinite(forces).all(dim=-1)
    return torch.where(bad.unsqueeze(-1), torch.full_like(forces, float("nan")), forces), bad


class FiniteForces(BaseModifier):
    """Forces for NequIP's metrics with ``ignore_nan``, which would take infinite references at face value."""

    def __init__(self) -> None:
        super().__init__(AtomicDataDict.FORCE_KEY)

    def __call__(self, data1: AtomicDataDict.Type, data2: Optional[AtomicDataDict.Type] = None) -> List[Tensor]:
        return [data1[self.field], nan_where_not_finite(reference_forces(data2))[0]]
