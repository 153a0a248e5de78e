"""Figures on the uncertainty that MACE and NequIP log during training and validation.

Until an epoch ends, atoms are kept as rows of one table, whose columns `columns` names. `figures` then scores them by
the family's law.
"""

from typing import Dict, List, NamedTuple, Type, Union

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from e2ip_plugins.families.interface import Family
from e2ip_plugins.families.laws import law_of
from e2ip_plugins.keys import PLATEAU_KEY
from e2ip_plugins.scores.metrics import spearman


class TrainingFigure(NamedTuple):
    """One logged figure: name, which follows that of the family, format, heading in tables, meaning."""

    name: str
    form: str
    heading: str
    meaning: str

    def key(self, family: str) -> str:
        """Return the name under which NequIP and MACE log the figure of a family."""
        return f"{family}_{self.name}"


FIGURES = (
    TrainingFigure("nll", "8.4f", "NLL / nats", "mean negative log density in nats, for a density in (eV/Å)⁻³"),
    TrainingFigure(
        "coverage95", "6.4f", "coverage @ 95 %", "share of atoms whose reference lies inside the 95 % region"
    ),
    TrainingFigure("spearman", "6.4f", "Spearman", "rank correlation of forces_epistemic_std with the error norm"),
    TrainingFigure("condition", "8.4g", "condition", "median condition number of forces_cov"),
    TrainingFigure("condition_max", "8.4g", "largest condition", "largest condition number of forces_cov"),
    TrainingFigure("plateau", "6.4f", "plateau", "share of atoms with a damper past its knee"),
)


def columns(family: Type[Family]) -> Dict[str, slice]:
    """Return the columns of the table of atoms: ``counts``, ``error``, the family's parameters, ``plateau``."""
    parameters = {key.name: int(np.prod(key.shape)) for key in family.parameter_keys}
    widths = {"counts": 1, "error": 3, **parameters, "plateau": 1}
    ends = np.cumsum(list(widths.values())).tolist()
    return {name: slice(end - width, end) for (name, width), end in zip(widths.items(), ends, strict=True)}


def rows(family: Type[Family], reference: Tensor, forces: Tensor, outputs: Dict[str, Tensor]) -> Tensor:
    """Return rows (N, columns) of N atoms; those without a finite reference (N, 3) will not count."""
    with torch.no_grad():
        parts = {"counts": torch.isfinite(reference).all(-1), "error": reference - forces}
        parts.update({key.name: outputs[key.name] for key in family.parameter_keys})
        parts["plateau"] = outputs[PLATEAU_KEY]
        # Atoms that do not count are dropped later: indexing by a mask here would make a GPU wait.
        widths = {name: where.stop - where.start for name, where in columns(family).items()}
        return torch.cat([parts[name].to(forces.dtype).reshape(-1, width) for name, width in widths.items()], dim=-1)


def figures(family: Type[Family], atoms: Union[Tensor, List[Tensor]]) -> Dict[str, float]:
    """Return the value of every figure of `FIGURES`.

    NaN while no atom counts and where predictions are not finite.

    Parameters
    ----------
    family
    atoms : tensor or list of tensors
        `rows` of atoms, flattened: a metric's state, which is one tensor after DDP synchronisation.
    """
    where = columns(family)
    table = np.empty(0) if len(atoms) == 0 else dim_zero_cat(atoms).to("cpu", torch.float64).numpy()
    table = table.reshape(-1, where["plateau"].stop)
    counts = table[:, where["counts"]][:, 0] == 1.0
    result = {figure.name: float("nan") for figure in FIGURES}
    table = table[counts]
    if len(table) == 0 or not np.isfinite(table).all():
        return result
    parameters = {key.name: table[:, where[key.name]].reshape(-1, *key.shape) for key in family.parameter_keys}
    law, error = law_of(family, parameters), table[:, where["error"]]
    result["nll"] = float(law.negative_log_likelihood(error).mean())
    result["coverage95"] = float(np.mean(law.pit(error) <= 0.95))
    std = law.epistemic_std()
    # Families without an epistemic part rank by the total standard deviation.
    result["spearman"] = spearman(std if std.any() else law.total_std(), np.linalg.norm(error, axis=-1))
    condition = law.condition_number()
    result["condition"], result["condition_max"] = float(np.median(condition)), float(condition.max())
    result["plateau"] = float(table[:, where["plateau"]].mean())
    return result


class ForceUncertainty(Metric):
    """Compute `figures` over the atoms of all batches."""

    full_state_update = False
    is_differentiable = False

    atoms: List[Tensor]

    def __init__(self, family: Type[Family], **kwargs) -> None:
        super().__init__(**kwargs)
        self.family = family
        # One state, because every state costs a collective operation under DDP. It is flat and of the metric's dtype,
        # as the empty tensor is that torchmetrics puts in for a rank without atoms.
        self.add_state("atoms", default=[], dist_reduce_fx="cat")

    def forward(self, *args, **kwargs) -> Dict[str, float]:
        """Add a batch's atoms; return its figures, which are also kept as ``latest``."""
        self.latest = super().forward(*args, **kwargs)
        return self.latest

    def update(self, reference: Tensor, forces: Tensor, outputs: Dict[str, Tensor]) -> None:
        """Add atoms with forces in eV/Å (N, 3) and the model's outputs (N, …)."""
        self.atoms.append(rows(self.family, reference, forces, outputs).to(self.dtype).reshape(-1))

    def compute(self) -> Dict[str, float]:
        """Return the figures of all atoms."""
        return figures(self.family, self.atoms)
