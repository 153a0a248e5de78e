"""``E2IPMetrics``: NequIP's energy, force and stress errors with the quality of the uncertainty."""

from typing import Any, Dict, List, Optional, Union

import torch
from nequip.data import AtomicDataDict
from nequip.train import MaximumAbsoluteError, MeanAbsoluteError, MetricsManager, RootMeanSquaredError

from e2ip_plugins import families
from e2ip_plugins.errors import InputError
from e2ip_plugins.keys import ENERGY_UNCERTAINTY, PLATEAU_KEY
from e2ip_plugins.readout.settings import Settings
from e2ip_plugins.scores.training import ENERGY_FIGURES, FIGURES, EnergyUncertainty, ForceUncertainty
from nequip_ext.training.labels import reference_energies, reference_forces
from nequip_ext.training.reference import check_coeffs, check_outputs, error_entry

_ERRORS = {"rmse": RootMeanSquaredError, "mae": MeanAbsoluteError, "maxabserr": MaximumAbsoluteError}
_FIELDS = ("total_energy", "per_atom_energy", "forces", "stress")


def E2IPMetrics(
    coeffs: Dict[str, Optional[float]] = {"total_energy_rmse": 1.0, "forces_rmse": 1.0},  # noqa: B006 (NequIP's way)
    readout: Optional[str] = None,
    type_names: Optional[List[str]] = None,
    ignore_nan: Optional[Dict[str, bool]] = None,
    extra_metrics: Optional[List[Dict[str, Any]]] = None,
) -> MetricsManager:
    """Metrics in the manner of ``EnergyForceMetrics``, with those on the uncertainty of forces added.

    Error metrics are ``{total_energy,per_atom_energy,forces}_{rmse,mae,maxabserr}``, and those of ``stress``
    if ``coeffs`` names one of them. Uncertainty metrics begin with the name of the readout: ``e2ip_nll`` (nats,
    density in (eV/Å)⁻³), ``e2ip_coverage95``, ``e2ip_spearman``, ``e2ip_condition`` and ``e2ip_condition_max``, median
    and largest condition number of ``forces_cov``, and ``e2ip_plateau``, the share of atoms with a damper past its
    knee. Atoms with NaN or infinite reference forces are left out. ``e2ip_energy_nll`` and ``e2ip_energy_coverage95``
    are logged of models whose error bars of energies are fitted, as those of a test after the training.

    Parameters
    ----------
    coeffs : dict
        Weights of any of these metrics in ``weighted_sum``; null or left out: logged only, as those of energies' error
        bars must be.
    readout : str, optional
        Predictive family of the model; default ``e2ip``.
    type_names, ignore_nan, extra_metrics
        As in NequIP's own metrics.

    Raises
    ------
    InputError
        For a metric or readout that does not exist; before training where the readout is not the model's.
    """
    readout = readout or families.DEFAULT
    shared = ForceUncertainty(families.get(readout))
    figures: Dict[str, Figure] = {
        figure.key(readout): ForceFigure(figure.name, shared, figure is FIGURES[0]) for figure in FIGURES
    }
    known = [f"{field}_{error}" for field in _FIELDS for error in _ERRORS] + list(figures)
    of_energies = EnergyUncertainty()
    for figure in ENERGY_FIGURES:
        figures[figure.key(readout)] = EnergyFigure(figure.name, of_energies, figure is ENERGY_FIGURES[0])
    check_coeffs(coeffs, "E2IPMetrics")
    unknown = sorted(set(coeffs) - set(known) - set(figures))
    if unknown:
        raise InputError(f"unknown metrics in coeffs of E2IPMetrics: {', '.join(unknown)}; known: {', '.join(known)}")
    late = sorted(name for name in set(coeffs) - set(known) if coeffs[name] is not None)
    if late:
        raise InputError(
            f"coeffs of E2IPMetrics: {', '.join(late)} cannot have a weight: error bars of energies are fitted after "
            "the training; leave out what is to be logged only"
        )
    metrics = [
        error_entry(field, error, metric(), coeffs.get(f"{field}_{error}"), ignore_nan)
        for field in _FIELDS
        if field != "stress" or any(name.startswith("stress") for name in coeffs)
        for error, metric in _ERRORS.items()
    ]
    metrics += [{"name": name, "metric": figure, "coeff": coeffs.get(name)} for name, figure in figures.items()]
    return UncertaintyMetrics([*metrics, *(extra_metrics or [])], type_names=type_names)


class UncertaintyMetrics(MetricsManager):
    """NequIP's manager, without figures of energies where no model has error bars of them yet."""

    def forward(self, *args: Any, **kwargs: Any) -> Dict[str, Any]:
        """Add a batch; return its figures."""
        return self._known(super().forward(*args, **kwargs))

    def compute(self, *args: Any, **kwargs: Any) -> Dict[str, Any]:
        """Return the figures of an epoch."""
        return self._known(super().compute(*args, **kwargs))

    def _known(self, values: Dict[str, Any]) -> Dict[str, Any]:
        names = tuple(name for name, metric in self.items() if isinstance(metric, EnergyFigure))
        return {key: value for key, value in values.items() if not (key.endswith(names) and value.isnan())}


class Figure(torch.nn.Module):
    """One figure of an uncertainty, as NequIP's `MetricsManager` wants it: a metric of its own.

    The figures of one manager share their rows. The first one has them added to the shared metric, whose values the
    others read off; the manager calls its metrics in their order.

    Parameters
    ----------
    name : str
        Of `e2ip_plugins.scores.training.FIGURES` or ``ENERGY_FIGURES``.
    shared : ForceUncertainty or EnergyUncertainty
    first : bool
        Whether this is the first figure.
    """

    def __init__(self, name: str, shared: Union[ForceUncertainty, EnergyUncertainty], first: bool) -> None:
        super().__init__()
        self.name = name
        self.first = first
        if first:
            self.owned = shared  # moves between devices with this figure
        self._shared = (shared,)  # a tuple: not a submodule

    @property
    def shared(self) -> Any:
        """Metric that has the rows of all figures."""
        return self._shared[0]

    def add(self, preds: AtomicDataDict.Type, target: AtomicDataDict.Type) -> None:
        """Add the rows of a batch to the shared metric."""
        raise NotImplementedError

    def forward(self, preds: AtomicDataDict.Type, target: AtomicDataDict.Type) -> torch.Tensor:
        """Return the value for one batch, whose rows are added."""
        if self.first:
            self.add(preds, target)
        return self._value(self.shared.latest)

    def compute(self) -> torch.Tensor:
        """Return the value over all rows added."""
        return self._value(self.shared.compute())

    def reset(self) -> None:
        """Forget all rows, for all figures."""
        self.shared.reset()

    def _value(self, values: Dict[str, float]) -> torch.Tensor:
        return torch.tensor(values[self.name], device=self.shared.device)


class ForceFigure(Figure):
    """Figure of the uncertainty of forces."""

    #: What users call it, for messages.
    owner = "E2IPMetrics"

    def bind(self, settings: Settings) -> Settings:
        """Return the settings of a model, `InputError` unless its readout is the one that is measured here."""
        return settings.with_aliases(self.shared.family.name, {}, self.owner)

    def add(self, preds: AtomicDataDict.Type, target: AtomicDataDict.Type) -> None:
        """Add the atoms of a batch."""
        names = [key.name for key in self.shared.family.parameter_keys]
        check_outputs(preds, [*names, PLATEAU_KEY], self.owner)
        self.shared(reference_forces(target), preds[AtomicDataDict.FORCE_KEY], preds)


class EnergyFigure(Figure):
    """Figure of the uncertainty of energies, NaN in models without: their constants are fitted after the training."""

    def add(self, preds: AtomicDataDict.Type, target: AtomicDataDict.Type) -> None:
        """Add the frames of a batch."""
        predicted = preds[AtomicDataDict.TOTAL_ENERGY_KEY].reshape(-1)
        std = preds.get(ENERGY_UNCERTAINTY.name, torch.zeros_like(predicted))
        self.shared(reference_energies(target), predicted, std)
