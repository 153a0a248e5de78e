"""``E2IPLoss``: NequIP's energy (and stress) terms with the evidential force term."""

import warnings
from typing import Any, Dict, List, Optional, Tuple

import torch
from nequip.data import AtomicDataDict, PerAtomModifier
from nequip.train import MeanSquaredError, MetricsManager
from torchmetrics import Metric

from e2ip_plugins.errors import InputError
from e2ip_plugins.families.presets_tmp import TENSOR_DAMPER
from e2ip_plugins.keys import COEFFICIENTS_KEY, FORCE_UNIT_KEY, PARAMETER_KEYS
from e2ip_plugins.maths.kernels import distribution
from e2ip_plugins.maths.student import MIN_KAPPA, MIN_NU
from e2ip_plugins.readout.loss import (
    ForceLossSettings,
    force_loss_of_outputs,
    force_loss_settings,
    split_coefficients,
)
from nequip_ext.reference import reference_forces

_LOSS_KEYS = (AtomicDataDict.TOTAL_ENERGY_KEY, AtomicDataDict.FORCE_KEY, AtomicDataDict.STRESS_KEY)


def E2IPLoss(
    coeffs: Dict[str, float] = {"total_energy": 1.0, "forces": 1.0},  # noqa: B006 (NequIP's way; never changed)
    evidence_weight: Optional[float] = None,
    evidence: Optional[str] = None,
    preset: str = "default",
    per_atom_energy: bool = True,
    type_names: Optional[List[str]] = None,
    ignore_nan: Optional[Dict[str, bool]] = None,
    extra_metrics: Optional[List[Dict[str, Any]]] = None,
) -> MetricsManager:
    """Loss with the evidential force term, in the manner of ``EnergyForceLoss`` and ``EnergyForceStressLoss``.

    Components are ``per_atom_energy_mse`` or ``total_energy_mse``, ``forces_e2ip`` and, if ``coeffs`` has a
    stress, ``stress_mse``. Atoms with NaN or infinite reference forces are masked, with a warning.

    Example usage in config:

    .. code-block:: yaml

        loss:
          _target_: nequip_ext.E2IPLoss
          per_atom_energy: true
          coeffs:
            total_energy: 1.0
            forces: 1.0

    Parameters
    ----------
    coeffs : dict
        Weights of ``total_energy``, ``forces`` and, optionally, ``stress``; NequIP normalises them to sum 1.
    evidence_weight : float, optional
        λ ≥ 0 of the regulariser; default: the preset's. Not with ``evidence: coupled``.
    evidence, preset : str, optional
        As given to `E2IPModel`; the first batch of a model of the other mode raises `InputError`.
    per_atom_energy, type_names, ignore_nan, extra_metrics
        As in NequIP's own losses.

    Raises
    ------
    InputError
        For unknown or contradictory options.
    """
    unknown = set(coeffs) - set(_LOSS_KEYS)
    if unknown or AtomicDataDict.FORCE_KEY not in coeffs or AtomicDataDict.TOTAL_ENERGY_KEY not in coeffs:
        raise InputError(
            "coeffs of E2IPLoss must have total_energy and forces, may have stress, and nothing else; "
            f"got {sorted(coeffs)}"
        )
    if not coeffs[AtomicDataDict.FORCE_KEY] > 0:
        raise InputError(
            f"the forces coefficient of E2IPLoss is {coeffs[AtomicDataDict.FORCE_KEY]}, but must be > 0, because the "
            "uncertainty is learned from forces; for energies alone use nequip.train.EnergyOnlyLoss without E2IPModel"
        )
    ignore_nan = ignore_nan or {}
    metrics: List[Dict[str, Any]] = [
        {
            "name": "per_atom_energy_mse" if per_atom_energy else "total_energy_mse",
            "field": PerAtomModifier("total_energy") if per_atom_energy else "total_energy",
            "coeff": coeffs["total_energy"],
            "metric": MeanSquaredError(),
            "ignore_nan": ignore_nan.get("total_energy", False),
        },
        {
            "name": "forces_e2ip",
            "coeff": coeffs["forces"],
            "metric": EvidentialForceLoss(force_loss_settings(preset, evidence, evidence_weight)),
        },
    ]
    if "stress" in coeffs:
        metrics.append(
            {
                "name": "stress_mse",
                "field": "stress",
                "coeff": coeffs["stress"],
                "metric": MeanSquaredError(),
                "ignore_nan": ignore_nan.get("stress", False),
            }
        )
    return MetricsManager([*metrics, *(extra_metrics or [])], type_names=type_names)


def evidential_outputs(preds: AtomicDataDict.Type, user: str) -> List[torch.Tensor]:
    """log Σ0 (N, 6), ν and κ (N,) of a model's output; `InputError` where the model has no such outputs."""
    missing = [key.name for key in PARAMETER_KEYS if key.name not in preds]
    if missing:
        raise InputError(
            f"{user} needs the outputs {', '.join(missing)}, which this model does not have: "
            "wrap the model in the config as 'model: {_target_: nequip_ext.E2IPModel, model: {...}}'"
        )
    return [preds[key.name] if key.shape else preds[key.name].squeeze(-1) for key in PARAMETER_KEYS]


class EvidentialForceLoss(Metric):
    """Mean of `e2ip_plugins.readout.loss.force_loss` over atoms with finite reference forces."""

    def __init__(self, settings: ForceLossSettings, **kwargs) -> None:
        super().__init__(**kwargs)
        self.settings = settings
        self.add_state("sum", default=torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", default=torch.tensor(0), dist_reduce_fx="sum")
        self._checked = False
        self._warned = False
        self._current: Optional[Tuple[torch.Tensor, torch.Tensor]] = None

    def forward(self, preds: AtomicDataDict.Type, target: AtomicDataDict.Type) -> torch.Tensor:
        """Value for one batch, which is added to the accumulated one; torchmetrics calls ``update`` twice for it."""
        self._current = self._per_atom(preds, target)
        try:
            return super().forward(preds, target)
        finally:
            self._current = None

    def update(self, preds: AtomicDataDict.Type, target: AtomicDataDict.Type) -> None:
        """Add the atoms of a batch, from NequIP's output and target dictionaries."""
        loss, mask = self._current if self._current is not None else self._per_atom(preds, target)
        self.sum = self.sum + loss.sum()
        self.count = self.count + mask.sum()

    def compute(self) -> torch.Tensor:
        """Mean over the atoms that count, 0 if none does."""
        return self.sum / self.count.clamp(min=1)

    def _per_atom(self, preds: AtomicDataDict.Type, target: AtomicDataDict.Type) -> Tuple[torch.Tensor, torch.Tensor]:
        """Loss and mask (N,); the first batch is checked for the evidence mode, all on the CPU for masked atoms."""
        first = not self._checked
        if first:
            self._check_options(preds)
        loss, mask = force_loss_of_outputs(
            reference_forces(target), preds[AtomicDataDict.FORCE_KEY], preds, self.settings
        )
        # A look at the mask makes a GPU wait: there only once, and the data statistics have counted already.
        if (first or mask.device.type == "cpu") and not self._warned and not bool(mask.all()):
            self._warned = True
            warnings.warn(
                f"{int((~mask).sum())} of {mask.numel()} atoms of a batch have NaN or infinite reference forces; "
                "such atoms are masked in the force loss, in this and in all further batches",
                stacklevel=2,
            )
        return loss, mask

    @torch.no_grad()
    def _check_options(self, preds: AtomicDataDict.Type) -> None:
        """`InputError` unless the model's distribution is what this loss makes of the same coefficients."""
        log_sigma0, nu, kappa = evidential_outputs(preds, "E2IPLoss")
        # In coupled mode κ - 1e-6 and ν - 5 are the same number by construction; tolerance for float32.
        same = (kappa - MIN_KAPPA - (nu - MIN_NU)).abs() <= 1e-6 * (nu + kappa)
        # Atoms without finite evidence say nothing about it.
        finite = torch.isfinite(nu + kappa)
        mode = "coupled" if bool((same | ~finite).all()) else "independent"
        if mode != self.settings.evidence and bool(finite.any()):
            raise InputError(
                f"the model's evidence mode is '{mode}', that of E2IPLoss '{self.settings.evidence}': "
                "give E2IPModel and E2IPLoss the same preset and evidence"
            )
        if COEFFICIENTS_KEY in preds:
            coefficients = split_coefficients(preds[COEFFICIENTS_KEY], mode)
            force_unit = preds[FORCE_UNIT_KEY].squeeze(-1)
            expected = distribution(*coefficients, force_unit, self.settings.scalar_damper, TENSOR_DAMPER)[0]
            if not torch.allclose(log_sigma0, expected, rtol=1e-4, atol=1e-4, equal_nan=True):
                raise InputError("E2IPModel and E2IPLoss have different presets: give them the same")
        self._checked = True

    def __str__(self) -> str:
        return "e2ip"
