"""``E2IPLoss``: NequIP's energy (and stress) terms with the loss of a predictive family in place of the forces'."""

import warnings
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from nequip.data import AtomicDataDict
from nequip.train import MeanSquaredError, MetricsManager
from torchmetrics import Metric

from e2ip_plugins import families
from e2ip_plugins.errors import InputError
from e2ip_plugins.families.interface import Family
from e2ip_plugins.keys import COEFFICIENTS_KEY, FORCE_UNIT_KEY
from e2ip_plugins.predictions.data_sets import masked_forces
from e2ip_plugins.readout.loss import add_gradient, force_loss
from e2ip_plugins.readout.settings import Settings
from nequip_ext.training.labels import reference_forces
from nequip_ext.training.reference import MeanSquare, check_coeffs, check_outputs, error_entry, is_number


def E2IPLoss(
    coeffs: Mapping[str, Optional[float]] = {"total_energy": 1.0, "forces": 1.0},
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
    readout = readout or families.DEFAULT
    families.get(readout).check_names(options, E2IPLoss)
    check_coeffs(coeffs, "E2IPLoss")
    if set(coeffs) - {"stress"} != {"total_energy", "forces"}:
        raise InputError(
            f"coeffs of E2IPLoss must have total_energy and forces, may have stress, nothing else; got {sorted(coeffs)}"
        )
    forces = coeffs["forces"]
    if forces is None or forces <= 0:
        raise InputError(
            f"the forces coefficient of E2IPLoss is {'null' if forces is None else forces}, but must be > 0, because "
            "the uncertainty is learned from forces; for energies alone use nequip.train.EnergyOnlyLoss without "
            "E2IPModel"
        )
    options.update(evidence_weight=evidence_weight, evidence=evidence, preset=preset)
    force_term = ForceLoss(readout, options, _type_weights(per_type_forces_coeffs, type_names))
    energy = "per_atom_energy" if per_atom_energy else "total_energy"
    metrics = [
        error_entry(energy, "mse", MeanSquare(), coeffs["total_energy"], ignore_nan),
        {"name": f"forces_{readout}", "coeff": coeffs["forces"], "metric": force_term},
    ]
    if "stress" in coeffs:
        metrics.append(error_entry("stress", "mse", MeanSquare(), coeffs["stress"], ignore_nan))
    return MetricsManager([*metrics, *(extra_metrics or [])], type_names=type_names)


def _type_weights(coeffs: Optional[Mapping[str, float]], type_names: Optional[List[str]]) -> Tuple[float, ...]:
    """Return coefficients in the order of the types, or a single 1 where all atoms count alike."""
    if coeffs is None:
        return (1.0,)
    numbers = all(is_number(c) and c > 0 for c in coeffs.values())
    if not type_names or set(coeffs) != set(type_names) or not numbers:
        raise InputError(
            f"per_type_forces_coeffs of E2IPLoss is {dict(coeffs)}: give a number > 0 for every type, "
            f"which are {', '.join(type_names or ()) or 'not known (type_names)'}"
        )
    return tuple(float(coeffs[name]) for name in type_names)


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
        self.detached = False
        #: With ``forces: host``, NequIP's own metric for each weight.
        self.square_errors = torch.nn.ModuleList()
        self.add_state("sum", default=torch.zeros(len(self.weights), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", default=torch.zeros(len(self.weights), dtype=torch.long), dist_reduce_fx="sum")
        self._warned = False

    def bind(self, settings: Settings) -> Settings:
        """Take over a model's settings; return them with what was set here alone, `InputError` where the two differ."""
        settings = settings.with_aliases(self.readout, self.options, self.owner)
        self.family, self.detached = settings.build(), settings.detached
        weights = self.weights if settings.forces == "host" else ()
        kind = MeanSquare if len(weights) == 1 else MeanSquaredError  # NaN says that there is no atom of a type
        self.square_errors = torch.nn.ModuleList(kind() for _ in weights)
        return settings

    def forward(self, preds: AtomicDataDict.Type, target: AtomicDataDict.Type) -> torch.Tensor:
        """Return the value for one batch, NequIP's outputs and references, whose atoms are added."""
        loss, mask = self._per_atom(preds, target)
        sums, counts = self._by_type(loss, preds), self._by_type(mask.long(), preds)
        self.update(sums, counts)
        synced = self.dist_sync_on_step and torch.distributed.is_available() and torch.distributed.is_initialized()
        total = sums.detach().double().clone()
        if synced:
            torch.distributed.all_reduce(total)
            torch.distributed.all_reduce(counts)
        if self.square_errors:
            return add_gradient(self._square_error(preds, target, mask), self._mean(sums, counts))
        mean = self._mean(sums.double(), counts)
        # The gradient is that of this process' share; a NaN stays one, in value and gradient.
        return self._mean(total, counts) + (mean - mean.detach()) if synced else mean

    def update(self, sums: torch.Tensor, counts: torch.Tensor) -> None:
        """Add sums of losses and numbers of atoms by type (T,)."""
        self.sum = self.sum + sums
        self.count = self.count + counts

    def compute(self) -> torch.Tensor:
        """Return the mean over the atoms that count, 0 if none does; of square errors with ``forces: host``."""
        if self.square_errors:
            return _weighted([metric.compute() for metric in self.square_errors], self.weights)  # type: ignore[operator]
        return self._mean(self.sum, self.count)

    def reset(self) -> None:
        """Forget all atoms."""
        super().reset()
        for metric in self.square_errors:
            metric.reset()  # type: ignore[operator]

    def _by_type(self, values: torch.Tensor, preds: AtomicDataDict.Type) -> torch.Tensor:
        """Return sums (T,) of one value per atom (N,)."""
        if len(self.weights) == 1:
            return values.sum().unsqueeze(0)
        types = preds[AtomicDataDict.ATOM_TYPE_KEY].reshape(-1)
        return values.new_zeros(len(self.weights)).index_add(0, types, values)

    def _mean(self, sums: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return the weighted mean over the types that have atoms, 0 if none has."""
        means = sums / counts.clamp(min=1)
        if len(self.weights) == 1:
            return means[0]
        weights = means.new_tensor(self.weights) * (counts > 0)
        return (weights * means).sum() / weights.sum().clamp(min=min(self.weights))

    def _square_error(
        self, preds: AtomicDataDict.Type, target: AtomicDataDict.Type, mask: torch.Tensor
    ) -> torch.Tensor:
        """Return NequIP's mean square error of atoms in a mask (N,), and add them to its metrics."""
        values = []
        for number, metric in enumerate(self.square_errors):
            chosen = mask
            if len(self.weights) > 1:
                chosen = mask & (preds[AtomicDataDict.ATOM_TYPE_KEY].reshape(-1) == number)
            # As NequIP's manager does it, and only where it must: a selection sums in another order.
            atoms = slice(None) if bool(chosen.all()) else chosen
            metric.dist_sync_on_step = self.dist_sync_on_step
            values.append(metric(preds[AtomicDataDict.FORCE_KEY][atoms], reference_forces(target)[atoms]))
        return _weighted(values, self.weights)

    def _per_atom(self, preds: AtomicDataDict.Type, target: AtomicDataDict.Type) -> Tuple[torch.Tensor, torch.Tensor]:
        """Return loss and mask (N,); `InputError` for a model without readout, or with one of another family."""
        if self.family is None:
            self.family = families.get(self.readout)(families.get(self.readout).resolve(self.options))
        check_outputs(preds, [COEFFICIENTS_KEY, FORCE_UNIT_KEY], self.owner)
        expected, width = self.family.num_columns(), preds[COEFFICIENTS_KEY].shape[-1]
        if width != expected or any(key.name not in preds for key in self.family.parameter_keys):
            raise InputError(
                f"the outputs are not those of a readout '{self.readout}' ({width} coefficients, {expected} expected): "
                "give E2IPModel and E2IPLoss the same readout"
            )
        keys = [key for key in self.family.output_keys() if key.name in preds]
        outputs = {key.name: preds[key.name].reshape(-1, *key.shape) for key in keys}
        outputs |= {COEFFICIENTS_KEY: preds[COEFFICIENTS_KEY], FORCE_UNIT_KEY: preds[FORCE_UNIT_KEY].squeeze(-1)}
        forces = preds[AtomicDataDict.FORCE_KEY]
        forces = forces.detach() if self.detached else forces
        loss, mask = force_loss(self.family, reference_forces(target), forces, outputs)
        # A look at the mask makes a GPU wait: there only once an epoch, and the data statistics have counted already.
        if (self._update_count == 0 or mask.device.type == "cpu") and not self._warned and not bool(mask.all()):
            self._warned = True
            warnings.warn(masked_forces(int((~mask).sum()), mask.numel(), "of a batch"), stacklevel=2)
        return loss, mask

    def __str__(self) -> str:
        return self.readout


def _weighted(values: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Return the mean of the types' values as NequIP's manager forms it: of the types that have one, in their order."""
    if len(values) == 1:
        return values[0]
    pairs = [(weight, value) for weight, value in zip(weights, values, strict=True) if not bool(torch.isnan(value))]
    total: Any = sum(weight * value for weight, value in pairs)
    return total / sum(weight for weight, _ in pairs) if pairs else torch.zeros_like(values[0])
