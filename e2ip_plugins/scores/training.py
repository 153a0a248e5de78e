"""Figures on the uncertainty that MACE and NequIP log during training and validation.

Until an epoch ends, atoms are kept as rows of one table, whose columns `columns` names. `figures` then scores them by
the family's law. `energy_figures` scores energies by a Gaussian. Error bars of energies have constants, which are
fitted after the last epoch: until then energies have no figures, rather than provisional ones of another leverage.
"""

import math
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

#: Figures of total energies.
ENERGY_FIGURES = (
    TrainingFigure("energy_nll", "8.4f", "energy NLL / nats", "mean negative log density in nats, density in eV⁻¹"),
    TrainingFigure("energy_coverage95", "6.4f", "energy coverage @ 95 %", "share of energies inside the 95 % interval"),
)

#: Half the width of a Gaussian's 95 % interval in standard deviations.
_WIDTH_95 = 1.959964


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


def energy_rows(reference: Tensor, predicted: Tensor, std: Tensor) -> Tensor:
    """Return rows (F, 2), error and standard deviation, of frames with energies in eV (F,)."""
    with torch.no_grad():
        return torch.stack([(reference - predicted).reshape(-1), std.reshape(-1).to(predicted.dtype)], dim=-1)


def energy_figures(frames: Union[Tensor, List[Tensor]]) -> Dict[str, float]:
    """Return the value of every figure of `ENERGY_FIGURES`.

    NaN while no frame has both a finite reference and an error bar, which is 0 where its constants are not fitted.

    Parameters
    ----------
    frames : tensor or list of tensors
        `energy_rows`, flattened.
    """
    table = np.empty(0) if len(frames) == 0 else dim_zero_cat(frames).to("cpu", torch.float64).numpy()
    error, std = table.reshape(-1, 2).T
    counts = np.isfinite(error) & (std > 0.0)
    if not counts.any():
        return {figure.name: math.nan for figure in ENERGY_FIGURES}
    scaled, std = error[counts] / std[counts], std[counts]
    likelihood = 0.5 * (math.log(2.0 * math.pi) + scaled**2) + np.log(std)
    inside = np.abs(scaled) <= _WIDTH_95
    return {"energy_nll": float(likelihood.mean()), "energy_coverage95": float(inside.mean())}


class Uncertainty(Metric):
    """Figures over the rows of a table, which batches add."""

    full_state_update = False
    is_differentiable = False

    rows: List[Tensor]

    def __init__(self, **kwargs) -> None:
        super().__init__(**kwargs)
        # One state, because every state costs a collective operation under DDP. It is flat and of the metric's dtype,
        # as the empty tensor is that torchmetrics puts in for a rank without rows.
        self.add_state("rows", default=[], dist_reduce_fx="cat")

    def forward(self, *args, **kwargs) -> Dict[str, float]:
        """Add a batch; return its figures, which are also kept as ``latest``."""
        self.latest = super().forward(*args, **kwargs)
        return self.latest

    def add(self, rows: Tensor) -> None:
        """Add rows (N, columns)."""
        self.rows.append(rows.to(self.dtype).reshape(-1))


class ForceUncertainty(Uncertainty):
    """Compute `figures` over the atoms of all batches."""

    def __init__(self, family: Type[Family], **kwargs) -> None:
        super().__init__(**kwargs)
        self.family = family

    def update(self, reference: Tensor, forces: Tensor, outputs: Dict[str, Tensor]) -> None:
        """Add atoms with forces in eV/Å (N, 3) and the model's outputs (N, …)."""
        self.add(rows(self.family, reference, forces, outputs))

    def compute(self) -> Dict[str, float]:
        """Return the figures of all atoms."""
        return figures(self.family, self.rows)


class EnergyUncertainty(Uncertainty):
    """Compute `energy_figures` over the frames of all batches."""

    def update(self, reference: Tensor, predicted: Tensor, std: Tensor) -> None:
        """Add frames with energies in eV (F,)."""
        self.add(energy_rows(reference, predicted, std))

    def compute(self) -> Dict[str, float]:
        """Return the figures of all frames."""
        return energy_figures(self.rows)
