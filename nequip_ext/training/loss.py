"""``E2IPLoss``: NequIP's energy (and stress) terms with the loss of a predictive family in place of the forces'."""

import math
import warnings
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

import torch
from nequip.data import AtomicDataDict, PerAtomModifier
from nequip.train import MeanSquaredError, MetricsManager
from torchmetrics import Metric

from e2ip_plugins import families
from e2ip_plugins.errors import InputError
from e2ip_plugins.families.interface import Family
from e2ip_plugins.keys import COEFFICIENTS_KEY, FORCE_UNIT_KEY
from e2ip_plugins.readout.loss import force_loss
from e2ip_plugins.readout.settings import Settings
from nequip_ext.training.reference import reference_forces

_LOSS_KEYS = (AtomicDataDict.TOTAL_ENERGY_KEY, AtomicDataDict.FORCE_KEY, AtomicDataDict.STRESS_KEY)


#: What to say where the model has no readout.
WRAP = "wrap the model in the config as 'model: {_target_: nequip_ext.E2IPModel, model: {...}}'"


def E2IPLoss(
    coeffs: Dict[str, float] = {"total_energy": 1.0, "forces": 1.0},  # noqa: B006 (NequIP's way; never changed)
    evidence_weight: Optional[float] = None,
    evidence: Optional[str] = None,
    preset: Optional[str] = None,
    readout: Optional[str] = None,
    per_atom_energy: bool = True,
    per_type_forces_coeffs: Optional[Mapping[str, float]] = None,
    type_names: Optional[List[str]] = None,
    ignore_nan: Optional[Dict[str, bool]] = None,
    extra_metrics: Optional[List[Dict[str, Any]]] = None,
    **options: Any,
) -> MetricsManager:
    """Loss with a readout's force term, in the manner of ``EnergyForceLoss`` and ``EnergyForceStressLoss``.

    Components are ``per_atom_energy_mse`` or ``total_energy_mse``, ``forces_e2ip`` (``forces_`` and the name of the
    readout) and, if ``coeffs`` has a stress, ``stress_mse``. Atoms with NaN or infinite reference forces are masked,
    with a warning. Where the model has ``forces: host``, values are those of NequIP's own losses.

    Under ``nequip-train`` the settings are the model's (`E2IPModel`): options need not be given again, and must be the
    same where they are. Without a Trainer, options that are not given have their defaults.

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
        λ ≥ 0 of the regulariser; default: the preset's. Only with ``evidence: independent``. May be given here alone.
    evidence, preset : str, optional
        As given to `E2IPModel`.
    readout : str, optional
        Predictive family of the model; default ``e2ip``.
    per_atom_energy, per_type_forces_coeffs, type_names, ignore_nan, extra_metrics
        As in NequIP's own losses. With a coefficient > 0 for every type, the force term is the mean over types with
        these weights; that works with releases, too, whose own losses do not have it.
    **options
        Further options of the readout.

    Raises
    ------
    InputError
        For unknown or contradictory options; before training where they are not the model's.
    """
    families.get(readout or families.DEFAULT).check_names(options, E2IPLoss)
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
    options.update(evidence_weight=evidence_weight, evidence=evidence, preset=preset)
    weights = _type_weights(per_type_forces_coeffs, type_names)
    force_metric = ForceLoss(readout or families.DEFAULT, options, weights)
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
            "name": f"forces_{force_metric.readout}",
            "coeff": coeffs["forces"],
            "metric": force_metric,
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


def _type_weights(coeffs: Optional[Mapping[str, float]], type_names: Optional[List[str]]) -> Tuple[float, ...]:
    """Coefficients in the order of the types; a single 1 where all atoms count alike. `InputError` for others."""
    if coeffs is None:
        return (1.0,)
    numbers = all(isinstance(c, (int, float)) and 0 < c < math.inf for c in coeffs.values())
    if not type_names or set(coeffs) != set(type_names) or not numbers:
        raise InputError(
            f"per_type_forces_coeffs of E2IPLoss is {dict(coeffs)}: give a number > 0 for every type, "
            f"which are {', '.join(type_names or ()) or 'not known (type_names)'}"
        )
    return tuple(float(coeffs[name]) for name in type_names)


def check_outputs(preds: AtomicDataDict.Type, names: Iterable[str], user: str) -> None:
    """`InputError` where a model's output lacks some of ``names``."""
    missing = [name for name in names if name not in preds]
    if missing:
        raise InputError(f"{user} needs the outputs {', '.join(missing)}, which this model does not have: {WRAP}")


class ForceLoss(Metric):
    """Mean of a family's force loss over atoms with finite reference forces.

    With ``forces: host`` the value is NequIP's mean square error, to the last bit, and so is the gradient of everything
    but the readout, which gets that of its own loss for the forces as they are.

    Parameters
    ----------
    readout : str
        Name of the family.
    options : dict
        Its options; None: not given.
    weights : sequence of float
        Of the atom types' means, in their order; one weight: the mean over all atoms.
    """

    #: What users call it, for messages.
    owner = "E2IPLoss"

    sum: torch.Tensor
    count: torch.Tensor

    def __init__(
        self, readout: str, options: Mapping[str, Any], weights: Sequence[float] = (1.0,), **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.readout = readout
        self.weights = tuple(weights)
        self.options = {name: value for name, value in options.items() if value is not None}
        family = families.get(readout)
        # What is wrong for every model; weights may fit one whose other options are not known yet.
        loss_only = [option.name for option in family.options if option.loss_only]
        family.resolve({name: value for name, value in self.options.items() if name not in loss_only})
        self.family: Optional[Family] = None
        #: NequIP's own metric, one for each weight.
        self.host: Any = None
        self.fixed = False
        self.add_state("sum", default=torch.zeros(len(self.weights), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", default=torch.zeros(len(self.weights), dtype=torch.long), dist_reduce_fx="sum")
        self._warned = False
        self._current: Optional[Tuple[torch.Tensor, torch.Tensor]] = None

    def bind(self, settings: Settings) -> Settings:
        """Take over a model's settings; gives them with what was set here alone, `InputError` where the two differ."""
        settings = settings.with_aliases(self.readout, self.options, self.owner)
        self.family = settings.build()
        self.host = None
        if settings.forces == "host":
            self.host = torch.nn.ModuleList([MeanSquaredError() for _ in self.weights])
        self.fixed = settings.forces == "fixed"
        return settings

    def forward(self, preds: AtomicDataDict.Type, target: AtomicDataDict.Type) -> torch.Tensor:
        """Value for one batch, which is added to the accumulated one; torchmetrics calls ``update`` twice for it."""
        if self.host is not None:
            return self._beside_host(self.host, preds, target)
        self._current = self._per_atom(preds, target)
        try:
            return super().forward(preds, target)
        finally:
            self._current = None

    def update(self, preds: AtomicDataDict.Type, target: AtomicDataDict.Type) -> None:
        """Add the atoms of a batch, from NequIP's output and target dictionaries."""
        loss, mask = self._current if self._current is not None else self._per_atom(preds, target)
        self.sum = self.sum + self._by_type(loss, preds)
        self.count = self.count + self._by_type(mask.long(), preds)

    def compute(self) -> torch.Tensor:
        """Mean over the atoms that count, 0 if none does; of square errors with ``forces: host``."""
        if self.host is not None:
            return _weighted([metric.compute() for metric in self.host], self.weights)
        return self._mean(self.sum, self.count)

    def reset(self) -> None:
        """Forget all atoms."""
        super().reset()
        for metric in self.host or ():
            metric.reset()

    def _by_type(self, values: torch.Tensor, preds: AtomicDataDict.Type) -> torch.Tensor:
        """Sums (T,) of one value per atom (N,)."""
        if len(self.weights) == 1:
            return values.sum().unsqueeze(0)
        types = preds[AtomicDataDict.ATOM_TYPE_KEY].reshape(-1)
        return values.new_zeros(len(self.weights)).index_add(0, types, values)

    def _mean(self, sums: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Weighted mean over the types that have atoms, 0 if none has."""
        means = sums / counts.clamp(min=1)
        if len(self.weights) == 1:
            return means[0]
        weights = means.new_tensor(self.weights) * (counts > 0)
        return (weights * means).sum() / weights.sum().clamp(min=min(self.weights))

    def _beside_host(self, host: Any, preds: AtomicDataDict.Type, target: AtomicDataDict.Type) -> torch.Tensor:
        forces, reference = preds[AtomicDataDict.FORCE_KEY], reference_forces(target)
        loss, mask = self._current = self._per_atom({**preds, AtomicDataDict.FORCE_KEY: forces.detach()}, target)
        try:
            self.update(preds, target)
        finally:
            self._current = None
        values = []
        for number, metric in enumerate(host):
            # As NequIP's manager does it, and only where it must: a selection sums in another order.
            chosen = mask
            if len(host) > 1:
                chosen = mask & (preds[AtomicDataDict.ATOM_TYPE_KEY].reshape(-1) == number)
            metric.dist_sync_on_step = self.dist_sync_on_step
            everything = bool(chosen.all())
            values.append(metric(*((x if everything else x[chosen]) for x in (forces, reference))))
        value = _weighted(values, self.weights)
        count = self._by_type(mask.long(), preds)
        if self.dist_sync_on_step and torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(count)
        own = self._mean(self._by_type(loss, preds), count)
        # Zero, with the readout's gradient.
        return value + torch.nan_to_num(own - own.detach())

    def _per_atom(self, preds: AtomicDataDict.Type, target: AtomicDataDict.Type) -> Tuple[torch.Tensor, torch.Tensor]:
        """Loss and mask (N,)."""
        if self.family is None:
            self.family = families.get(self.readout)(families.get(self.readout).resolve(self.options))
        self._check(self.family, preds)
        outputs = {
            key.name: preds[key.name].reshape(-1, *key.shape) for key in self.family.output_keys() if key.name in preds
        }
        outputs |= {COEFFICIENTS_KEY: preds[COEFFICIENTS_KEY], FORCE_UNIT_KEY: preds[FORCE_UNIT_KEY].squeeze(-1)}
        forces = preds[AtomicDataDict.FORCE_KEY]
        # Of weights that do not learn: there is no graph to go through.
        forces = forces.detach() if self.fixed else forces
        loss, mask = force_loss(self.family, reference_forces(target), forces, outputs)
        # A look at the mask makes a GPU wait: there only once an epoch, and the data statistics have counted already.
        if (self._update_count == 0 or mask.device.type == "cpu") and not self._warned and not bool(mask.all()):
            self._warned = True
            warnings.warn(
                f"{int((~mask).sum())} of {mask.numel()} atoms of a batch have NaN or infinite reference forces; "
                "such atoms are masked in the force loss, in this and in all further batches",
                stacklevel=2,
            )
        return loss, mask

    def _check(self, family: Family, preds: AtomicDataDict.Type) -> None:
        """`InputError` for outputs of a model without readout, or with one of another family."""
        check_outputs(preds, [COEFFICIENTS_KEY, FORCE_UNIT_KEY], self.owner)
        expected, width = family.num_columns(), preds[COEFFICIENTS_KEY].shape[-1]
        same = all(key.name in preds for key in family.parameter_keys)
        if width != expected or not same:
            raise InputError(
                f"the outputs are not those of a readout '{self.readout}' ({width} coefficients, {expected} expected): "
                "give E2IPModel and E2IPLoss the same readout"
            )

    def __str__(self) -> str:
        return self.readout


def _weighted(values: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Mean of the types' values as NequIP's manager forms it: of those that are there, in their order."""
    if len(values) == 1:
        return values[0]
    there = [(weight, value) for weight, value in zip(weights, values, strict=True) if not bool(torch.isnan(value))]
    total: Any = sum(weight * value for weight, value in there)
    return total / sum(weight for weight, _ in there) if there else values[0]
