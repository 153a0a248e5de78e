"""``E2IPMetrics``: NequIP's energy, force and stress errors with the quality of the uncertainty."""

from typing import Any, Dict, List, Optional

import torch
from nequip.data import AtomicDataDict, PerAtomModifier
from nequip.train import MaximumAbsoluteError, MeanAbsoluteError, MetricsManager, RootMeanSquaredError

from e2ip_plugins.errors import InputError
from e2ip_plugins.keys import PLATEAU_KEY
from e2ip_plugins.scores.training import ForceUncertainty
from nequip_ext.loss import evidential_outputs
from nequip_ext.reference import FiniteForces, reference_forces

_ERRORS = {"rmse": RootMeanSquaredError, "mae": MeanAbsoluteError, "maxabserr": MaximumAbsoluteError}
_FIELDS = ("total_energy", "per_atom_energy", "forces", "stress")
_QUANTITIES = ("nll", "coverage95", "spearman", "plateau")


def E2IPMetrics(
    coeffs: Dict[str, Optional[float]] = {"total_energy_rmse": 1.0, "forces_rmse": 1.0},  # noqa: B006 (NequIP's way)
    type_names: Optional[List[str]] = None,
    ignore_nan: Optional[Dict[str, bool]] = None,
    extra_metrics: Optional[List[Dict[str, Any]]] = None,
) -> MetricsManager:
    """Metrics in the manner of ``EnergyForceMetrics``, with four on the uncertainty of forces added.

    Error metrics are ``{total_energy,per_atom_energy,forces}_{rmse,mae,maxabserr}``, and those of ``stress``
    if ``coeffs`` names one of them. Uncertainty metrics: ``e2ip_nll`` (nats, density in (eV/Å)⁻³),
    ``e2ip_coverage95``, ``e2ip_spearman`` and ``e2ip_plateau``, the share of atoms with a damper past its knee.
    Atoms with NaN or infinite reference forces are left out.

    Parameters
    ----------
    coeffs : dict
        Weights of any of these metrics in ``weighted_sum``; null or left out: logged only.
    type_names, ignore_nan, extra_metrics
        As in NequIP's own metrics.

    Raises
    ------
    InputError
        For a metric that does not exist.
    """
    fields = [field for field in _FIELDS if field != "stress" or any(name.startswith("stress") for name in coeffs)]
    known = [f"{field}_{error}" for field in _FIELDS for error in _ERRORS] + [f"e2ip_{name}" for name in _QUANTITIES]
    unknown = sorted(set(coeffs) - set(known))
    if unknown:
        raise InputError(f"unknown metrics in coeffs of E2IPMetrics: {', '.join(unknown)}; known: {', '.join(known)}")
    ignore_nan = ignore_nan or {}
    metrics: List[Dict[str, Any]] = []
    for field in fields:
        for error, metric in _ERRORS.items():
            name = f"{field}_{error}"
            entry = {"name": name, "metric": metric(), "coeff": coeffs.get(name)}
            if field == "forces":
                entry.update(field=FiniteForces(), ignore_nan=True)
            elif field == "per_atom_energy":
                entry.update(field=PerAtomModifier("total_energy"), ignore_nan=ignore_nan.get("total_energy", False))
            else:
                entry.update(field=field, ignore_nan=ignore_nan.get(field, False))
            metrics.append(entry)
    for quantity in _QUANTITIES:
        name = f"e2ip_{quantity}"
        metrics.append({"name": name, "metric": _ForceUncertainty(quantity), "coeff": coeffs.get(name)})
    return MetricsManager([*metrics, *(extra_metrics or [])], type_names=type_names)


class _ForceUncertainty(ForceUncertainty):
    """One number of `ForceUncertainty`, from NequIP's output and target dictionaries."""

    def __init__(self, quantity: str, **kwargs) -> None:
        super().__init__(**kwargs)
        self.quantity = quantity

    def update(self, preds: AtomicDataDict.Type, target: AtomicDataDict.Type) -> None:
        """Add the atoms of a batch."""
        log_sigma0, nu, kappa = evidential_outputs(preds, "E2IPMetrics")
        forces = preds[AtomicDataDict.FORCE_KEY]
        super().update(reference_forces(target), forces, log_sigma0, nu, kappa, preds[PLATEAU_KEY])

    def compute(self) -> torch.Tensor:
        """The quantity over all atoms added."""
        return torch.tensor(super().compute()[self.quantity], device=self.device)

    def __str__(self) -> str:
        return f"e2ip_{self.quantity}"
