"""What losses and metrics compare: outputs of a model with references, each present or a clear error."""

import math
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Optional

from nequip.data import AtomicDataDict, BaseModifier, PerAtomModifier
from nequip.train import MeanSquaredError
from torch import Tensor
from torchmetrics import Metric

from e2ip_plugins.errors import InputError
from nequip_ext.training.labels import reference_forces

#: Labels that ``ignore_nan`` may name.
IGNORABLE = (AtomicDataDict.TOTAL_ENERGY_KEY, AtomicDataDict.FORCE_KEY, AtomicDataDict.STRESS_KEY)

#: What to say where the model has no readout.
WRAP = "wrap the model in the config as 'model: {_target_: nequip_ext.E2IPModel, model: {...}}'"


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


def check_ignored(hparams: Mapping[str, Any]) -> None:
    """Raise `InputError` for names in ``ignore_nan`` of losses and metrics that NequIP does not look up.

    Parameters
    ----------
    hparams : mapping
        Hyperparameters of NequIP's training module: its sections of the config.
    """
    for section in ("loss", "train_metrics", "val_metrics", "test_metrics"):
        for names in _ignored(hparams.get(section)):
            unknown = [str(name) for name in names if name not in IGNORABLE]
            if unknown:
                raise InputError(
                    f"ignore_nan of {section} names {', '.join(unknown)}, which leaves nothing out; it may name "
                    f"{', '.join(IGNORABLE)}"
                )


def _ignored(node: Any) -> Iterator[Mapping[str, Any]]:
    """Yield every ``ignore_nan`` of a section that goes by name; entries of ``extra_metrics`` have true or false."""
    if isinstance(node, Mapping):
        if isinstance(node.get("ignore_nan"), Mapping):
            yield node["ignore_nan"]
        node = list(node.values())
    for part in node if isinstance(node, (list, tuple)) else ():
        yield from _ignored(part)


class FiniteForces(BaseModifier):
    """Forces for NequIP's metrics with ``ignore_nan``, which would take infinite references at face value."""

    def __init__(self) -> None:
        super().__init__(AtomicDataDict.FORCE_KEY)

    def __call__(self, data1: AtomicDataDict.Type, data2: Optional[AtomicDataDict.Type] = None) -> List[Tensor]:
        return [data1[self.field], reference_forces(data2)]


class MeanSquare(MeanSquaredError):
    """NequIP's mean square error; 0 instead of NaN of a batch without a reference, which would make all weights NaN."""

    def compute(self) -> Tensor:
        """Return the mean over what was added."""
        return self.sum.div(self.count.clamp(min=1))


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
