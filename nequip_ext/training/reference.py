"""What losses and metrics compare: outputs of a model with references, each present or a clear error."""

import math
from typing import Any, Dict, Iterable, List, Mapping, Optional, Tuple

import torch
from nequip.data import AtomicDataDict, BaseModifier, PerAtomModifier
from torch import Tensor
from torchmetrics import Metric

from e2ip_plugins.errors import InputError

#: NequIP's names -> what a user would call them, and an example of a name in a file.
_REFERENCES = {
    AtomicDataDict.FORCE_KEY: ("forces", "REF_forces"),
    AtomicDataDict.TOTAL_ENERGY_KEY: ("energy", "REF_energy"),
    AtomicDataDict.STRESS_KEY: ("stress", "REF_stress"),
}

#: What to say where the model has no readout.
WRAP = "wrap the model in the config as 'model: {_target_: nequip_ext.E2IPModel, model: {...}}'"


def check_reference(data: AtomicDataDict.Type, field: str, where: str = "data") -> None:
    """Raise `InputError` where the data has no reference values for ``field``; ``where`` names split and file."""
    if field not in data:
        name, example = _REFERENCES[field]
        raise InputError(
            f"the {where} has no reference {name} ('{field}'): if the file has another name for it, say so in the "
            f"data section, for example 'key_mapping: {{{example}: {field}}}'; its fields: {', '.join(sorted(data))}"
        )


def check_outputs(preds: AtomicDataDict.Type, names: Iterable[str], user: str) -> None:
    """Raise `InputError` where a model's output lacks one of ``names``."""
    missing = [name for name in names if name not in preds]
    if missing:
        raise InputError(f"{user} needs the outputs {', '.join(missing)}, which this model does not have: {WRAP}")


def is_number(value: Any) -> bool:
    """Return whether a value of a config is a finite number."""
    return isinstance(value, (int, float)) and math.isfinite(value)


def check_coeffs(coeffs: Any, owner: str) -> None:
    """Raise `InputError` for coefficients of a loss or of metrics that are neither numbers nor null."""
    values = coeffs if isinstance(coeffs, Mapping) else {"coeffs": coeffs or "null"}
    wrong = [f"{name}: {value}" for name, value in values.items() if not (value is None or is_number(value))]
    if wrong:
        raise InputError(
            f"coeffs of {owner} must be finite numbers, or null for what is only logged; got {', '.join(wrong)}"
        )


def reference_forces(data: AtomicDataDict.Type) -> Tensor:
    """Return reference forces (N, 3) in eV/Å; `InputError` where the data has none."""
    check_reference(data, AtomicDataDict.FORCE_KEY)
    return data[AtomicDataDict.FORCE_KEY]


def nan_where_not_finite(forces: Tensor) -> Tuple[Tensor, Tensor]:
    """Return forces (N, 3), all NaN for atoms that have a NaN or infinite component, and the mask (N,) of those."""
    bad = ~torch.isfinite(forces).all(dim=-1)
    return torch.where(bad.unsqueeze(-1), torch.full_like(forces, float("nan")), forces), bad


class FiniteForces(BaseModifier):
    """Forces for NequIP's metrics with ``ignore_nan``, which would take infinite references at face value."""

    def __init__(self) -> None:
        super().__init__(AtomicDataDict.FORCE_KEY)

    def __call__(self, data1: AtomicDataDict.Type, data2: Optional[AtomicDataDict.Type] = None) -> List[Tensor]:
        return [data1[self.field], nan_where_not_finite(reference_forces(data2))[0]]


def error_entry(
    field: str, error: str, metric: Metric, coeff: Optional[float], ignore_nan: Optional[Mapping[str, bool]]
) -> Dict[str, Any]:
    """Return an entry of NequIP's `MetricsManager`: an error of a field, or of ``per_atom_energy``.

    ``ignore_nan`` says by field whether NaN references are left out; those of forces always are.
    """
    source: Any = field
    ignored = field == "forces" or (ignore_nan or {}).get(field.replace("per_atom", "total"), False)
    if field == "forces":
        source = FiniteForces()
    elif field == "per_atom_energy":
        source = PerAtomModifier("total_energy")
    return {"name": f"{field}_{error}", "field": source, "metric": metric, "coeff": coeff, "ignore_nan": ignored}
