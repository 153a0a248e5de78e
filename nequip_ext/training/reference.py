"""What data files bring along: reference forces, present, or a clear error, and finite, or masked; species."""

from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple

import torch
from ase.data import chemical_symbols
from nequip.data import AtomicDataDict, BaseModifier
from torch import Tensor

from e2ip_plugins.errors import InputError

#: NequIP's names -> what a user would call them, and an example of a name in a file.
_REFERENCES = {
    AtomicDataDict.FORCE_KEY: ("forces", "REF_forces"),
    AtomicDataDict.TOTAL_ENERGY_KEY: ("energy", "REF_energy"),
    AtomicDataDict.STRESS_KEY: ("stress", "REF_stress"),
}


def check_reference(data: AtomicDataDict.Type, field: str, where: str = "data") -> None:
    """`InputError` where the data has no reference values for ``field``; ``where`` names split and file."""
    if field not in data:
        name, example = _REFERENCES[field]
        raise InputError(
            f"the {where} has no reference {name} ('{field}'): if the file has another name for it, say so in the "
            f"data section, for example 'key_mapping: {{{example}: {field}}}'; fields found: {', '.join(sorted(data))}"
        )


def reference_forces(data: AtomicDataDict.Type) -> Tensor:
    """Reference forces (N, 3) in eV/Å; `InputError` where the data has none."""
    check_reference(data, AtomicDataDict.FORCE_KEY)
    return data[AtomicDataDict.FORCE_KEY]


def in_memory(dataset: Any) -> Tuple[Optional[List[Tuple[int, AtomicDataDict.Type]]], Sequence[Any]]:
    """Frames of a data set or of a part of one (``split_dataset``) with their numbers in the whole, None for data that
    are not in memory; and the transforms, which have not been applied to them."""
    numbers: Optional[Sequence[int]] = None
    while isinstance(dataset, torch.utils.data.Subset):
        numbers = dataset.indices if numbers is None else [dataset.indices[i] for i in numbers]
        dataset = dataset.dataset
    frames, transforms = getattr(dataset, "data_list", None), getattr(dataset, "transforms", ())
    if frames is None:
        return None, transforms
    return [(int(i), frames[i]) for i in (range(len(frames)) if numbers is None else numbers)], transforms


def file_of(config: Dict[str, Any]) -> Any:
    """The file of a data set by its config, also of a part of one."""
    inner = config.get("dataset")
    return config.get("file_path", file_of(inner) if isinstance(inner, dict) else config.get("_target_"))


def known_species(transforms: Iterable[Any]) -> Optional[List[str]]:
    """Chemical symbols that a data set's or calculator's mapper to atom types takes; None without such a mapper."""
    for transform in transforms:
        table = getattr(transform, "lookup_table", None)
        if table is not None:
            return [chemical_symbols[number] for number in (table >= 0).nonzero().flatten().tolist()]
    return None


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
