"""Fit of a post-hoc calibration to predictions for validation configurations (`e2ip_plugins.scores.calibration`).

Atoms count alike, because coverage and calibration error are figures over atoms. The atoms of a configuration are no
independent witnesses: whatever says how sure a constant is resamples or counts whole configurations.
"""

import math
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple, Type

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from scipy.stats import bootstrap

from e2ip_plugins.errors import InputError
from e2ip_plugins.families.interface import Family
from e2ip_plugins.families.laws import Law
from e2ip_plugins.scores.calibration import Calibration, Constant
from e2ip_plugins.scores.metrics import CALIBRATION_LEVELS, COVERAGE_LEVELS, calibration_error

#: One of the first three, or none, with or without the last.
METHODS = ("floor", "scale", "species-scale", "conformal")

#: Coverage that the floor is fitted to (paper, appendix on the ensemble's calibration).
FLOOR_LEVEL = 0.9

#: How far factors of species are expected to lie around the common one, in logarithms.
SPECIES_SPREAD = 0.3

#: Species with fewer atoms or configurations get the common factor.
MIN_ATOMS, MIN_CONFIGURATIONS = 30, 5

#: Of the bootstrap.
RESAMPLES, SEED = 400, 0

#: Logarithms of factors, around the best one, at which coverages are known to the bootstrap.
_GRID = np.linspace(-0.8, 0.8, 33)
_FINE = np.linspace(-0.8, 0.8, 1601)


class Sample(NamedTuple):
    """Validation atoms with finite reference forces.

    Attributes
    ----------
    family : subclass of Family
    parameters : dict
        Of the family, (N, …).
    error : (N, 3)
        Reference minus predicted force in eV/Å.
    species : (N,) str
        Chemical symbols.
    frame : (N,) int
        Configuration of every atom.
    file : str
        Where they come from.
    fingerprints : tuple of str
        Of all frames of the file.
    """

    family: Type[Family]
    parameters: Dict[str, np.ndarray]
    error: np.ndarray
    species: np.ndarray
    frame: np.ndarray
    file: str = "the validation set"
    fingerprints: Tuple[str, ...] = ()

    @classmethod
    def of(cls, predictions: Any) -> "Sample":
        """Of `e2ip_plugins.report.predictions.Predictions`; `InputError` for those that cannot be calibrated."""
        p = predictions
        if p.family is None:
            raise InputError(f"{p.path}: has no predicted distribution to calibrate, forces only")
        if p.calibration is not None:
            raise InputError(f"{p.path}: was calibrated already, with {p.calibration}; give predictions without that")
        whole = cls(
            p.family, p.parameters, p.reference_forces - p.forces, p.species, p.frame_of_atom, str(p.path), p.frames
        )
        kept = np.isfinite(whole.error).all(-1)
        if not kept.any():
            raise InputError(f"{p.path}: no atom has a finite reference force")
        return whole.only(kept)

    def only(self, chosen: np.ndarray) -> "Sample":
        """The atoms of a mask (N,)."""
        return self._replace(
            parameters={name: values[chosen] for name, values in self.parameters.items()},
            error=self.error[chosen],
            species=self.species[chosen],
            frame=self.frame[chosen],
        )

    def law(self) -> Law:
        """Their predicted distributions."""
        return self.family.law(self.parameters)

    def widened(self, factor: np.ndarray, floor: np.ndarray) -> "Sample":
        """With another covariance, see `Family.widen`; factor and floor (N,)."""
        tensors = {name: torch.as_tensor(values, dtype=torch.float64) for name, values in self.parameters.items()}
        wide = self.family.widen(tensors, torch.as_tensor(factor), torch.as_tensor(floor))
        return self._replace(parameters={name: values.numpy() for name, values in wide.items()})

    def numbered(self) -> Tuple[np.ndarray, int]:
        """Configurations counted from 0 (N,), and how many there are."""
        frames, index = np.unique(self.frame, return_inverse=True)
        return index, len(frames)


def calibrate(sample: Sample, methods: Sequence[str], levels: Sequence[float] = COVERAGE_LEVELS) -> Calibration:
    """Fit what is asked for.

    Beside ``floor`` and ``species-scale``, conformal radii come from every second configuration and the constants from
    the others: the guarantee is for distances that know nothing of the configurations which the radii come from. A
    common factor changes no region, whatever it was fitted to.

    Parameters
    ----------
    sample : Sample
    methods : sequence of str
        Some of `METHODS`.
    levels
        Of the conformal radii.

    Raises
    ------
    InputError
        Methods that do not go together, fewer than two configurations, predictions without errors.
    """
    method = check(methods, levels)
    index, count = sample.numbered()
    halved = "conformal" in methods and method in ("floor", "species-scale")
    if count < (4 if halved else 2):
        raise InputError(
            f"{sample.file}: has {count} configurations with finite reference forces; constants and "
            f"their uncertainty need at least {4 if halved else 2}"
        )
    if not np.abs(sample.error).max() > 0.0:
        raise InputError(f"{sample.file}: all errors are zero; there is nothing to fit to")
    fitting, held = (sample.only(index % 2 == 0), sample.only(index % 2 == 1)) if halved else (sample, sample)
    notes: List[str] = []
    if halved:
        notes.append(
            f"{method} fitted to every second configuration, the conformal radii to the others: the guarantee of the "
            "radii needs that"
        )
    factor, floor = _FITS[method](fitting, notes)
    # Species that only the other half has.
    common = Constant(*_exp(np.mean(_logs(factor), axis=0)))
    factor = {str(symbol): factor.get(str(symbol), common) for symbol in np.unique(sample.species)}

    def calibrated(part: Sample) -> Sample:
        return part.widened(
            np.array([factor[str(symbol)].value for symbol in part.species]), np.full(len(part.error), floor.value)
        )

    radii: Dict[float, float] = {}
    if "conformal" in methods:
        wide = calibrated(held)
        distance = np.linalg.norm(wide.law().z_scores(wide.error), axis=-1)
        radii = {float(level): conformal_radius(distance, wide.frame, level) for level in sorted(levels)}
        notes += _unreachable(radii, held.numbered()[1])
    before, after = _figures(sample), _figures(calibrated(sample))
    if after["nll"] > before["nll"] + 0.01:
        notes.append(
            f"the mean NLL rises from {before['nll']:.3f} to {after['nll']:.3f}: errors have other tails than the "
            "predicted distributions, and no size of the covariance is right in the middle and in the tails"
        )
    return Calibration(
        methods=tuple(name for name in METHODS if name in methods),
        uq_family=sample.family.uq_family,
        factor=factor,
        floor=floor,
        radii=radii,
        configurations=count,
        atoms=len(sample.error),
        frames=sample.fingerprints,
        file=sample.file,
        scores={"before": before, "after": after},
        notes=notes,
    )


def check(methods: Sequence[str], levels: Sequence[float] = COVERAGE_LEVELS) -> str:
    """The one method among them that changes the covariance, or ``none``; `InputError` for what does not go."""
    for level in levels:
        if not 0.0 < level < 1.0:
            raise InputError(f"--level {level:g}: a level lies between 0 and 1")
    unknown = [name for name in methods if name not in METHODS]
    if unknown or not methods:
        raise InputError(f"--method {' '.join(unknown)}: choose from {', '.join(METHODS)}")
    chosen = list(dict.fromkeys(name for name in methods if name != "conformal"))
    if len(chosen) > 1:
        raise InputError(
            f"--method: {' and '.join(chosen)} both set the size of the covariance; choose one of them (conformal may "
            "stand beside it)"
        )
    return chosen[0] if chosen else "none"


def _figures(sample: Sample) -> Dict[str, float]:
    law = sample.law()
    pit = law.pit(sample.error)
    return {
        "nll": float(law.negative_log_likelihood(sample.error).mean()),
        "calibration_error": calibration_error(pit),
        **{f"coverage{round(100 * level)}": float(np.mean(pit <= level)) for level in COVERAGE_LEVELS},
    }


# Constants


def _unchanged(sample: Sample, notes: List[str]) -> Tuple[Dict[str, Constant], Constant]:
    one = Constant(1.0, (1.0, 1.0))
    return {str(symbol): one for symbol in np.unique(sample.species)}, Constant(0.0, (0.0, 0.0))


def _fit_floor(sample: Sample, notes: List[str]) -> Tuple[Dict[str, Constant], Constant]:
    """The smallest σ² with which the ellipsoids of level `FLOOR_LEVEL` hold that share of the atoms."""
    needed = _needed_floor(sample, FLOOR_LEVEL)
    order = np.argsort(needed)
    index, count = sample.numbered()

    def floor(drawn: np.ndarray) -> float:
        held = np.cumsum(np.bincount(drawn, minlength=count)[index[order]])
        return float(needed[order][np.searchsorted(held, FLOOR_LEVEL * held[-1])])

    found = floor(np.arange(count))
    if found == 0.0:
        share = float(np.mean(needed == 0.0))
        notes.append(
            f"coverage at {FLOOR_LEVEL:.0%} is {share:.3f} without a floor, which could only widen: the covariance "
            "stays as it is; method scale can narrow it"
        )
    ones, _ = _unchanged(sample, notes)
    return ones, Constant(found, _interval(floor, count))


def _needed_floor(sample: Sample, level: float) -> np.ndarray:
    """σ² from which on the ellipsoid of a level holds the error (N,), 0 where it does without."""
    one, zero = np.ones(len(sample.error)), np.zeros(len(sample.error))
    # With variances of e⁵ times the squared error every ellipsoid holds it, e⁻³⁵ times that is no floor.
    high = 2.0 * np.log(np.linalg.norm(sample.error, axis=-1).clip(min=1e-12)) + 5.0
    low = high - 40.0
    for _ in range(36):
        middle = 0.5 * (low + high)
        inside = sample.widened(one, np.exp(middle)).law().pit(sample.error) <= level
        low, high = np.where(inside, low, middle), np.where(inside, middle, high)
    with np.errstate(invalid="ignore", divide="ignore"):
        without = sample.widened(one, zero).law().pit(sample.error) <= level
    return np.where(without, 0.0, np.exp(high))


def _fit_scale(sample: Sample, notes: List[str]) -> Tuple[Dict[str, Constant], Constant]:
    """One factor, of the least calibration error.

    Not of the largest likelihood: that is what models with a readout are trained for, and what it misses where the
    distribution's shape is not right is the coverage.
    """
    log_factor, interval = _log_factor(sample)
    factor = Constant(*_exp(np.array([log_factor, *interval])))
    if interval[0] <= 0.0 <= interval[1]:
        notes.append(
            f"the interval of the factor, {factor.interval[0]:.3f} to {factor.interval[1]:.3f}, holds 1: these "
            "configurations do not tell whether the covariance wants changing at all"
        )
    _, none = _unchanged(sample, notes)
    return {str(symbol): factor for symbol in np.unique(sample.species)}, none


def _fit_species_scale(sample: Sample, notes: List[str]) -> Tuple[Dict[str, Constant], Constant]:
    """A factor for every species, drawn to the common one by as much as it is uncertain itself."""
    value, interval = _log_factor(sample)
    common = np.array([value, *interval])
    factor = {}
    for symbol in np.unique(sample.species):
        part = sample.only(sample.species == symbol)
        atoms, configurations = len(part.error), part.numbered()[1]
        if atoms < MIN_ATOMS or configurations < MIN_CONFIGURATIONS:
            notes.append(f"{symbol}: {atoms} atoms in {configurations} configurations: the factor is the common one")
            factor[str(symbol)] = Constant(*_exp(common))
            continue
        own, (low, high) = _log_factor(part)
        error = (high - low) / (2.0 * 1.96)
        weight = SPECIES_SPREAD**2 / (SPECIES_SPREAD**2 + error**2)
        if weight < 0.9:
            notes.append(f"{symbol}: {atoms} atoms: the factor is {weight:.0%} its own, the rest the common one")
        factor[str(symbol)] = Constant(*_exp(weight * np.array([own, low, high]) + (1.0 - weight) * common))
    return factor, _unchanged(sample, notes)[1]


_FITS: Dict[str, Callable[[Sample, List[str]], Tuple[Dict[str, Constant], Constant]]] = {
    "none": _unchanged,
    "floor": _fit_floor,
    "scale": _fit_scale,
    "species-scale": _fit_species_scale,
}


def _log_factor(sample: Sample) -> Tuple[float, Tuple[float, float]]:
    """Logarithm of the factor of least calibration error, and its 95 % interval."""
    law = sample.law()

    def pit(log_factor: float) -> np.ndarray:
        # A factor on the covariance is a factor on the unit of the error.
        return law.pit(sample.error * math.exp(-0.5 * log_factor))

    # Where half of the atoms are inside a Gaussian's ellipsoid of 50 %: further away the search would find plains.
    square = np.square(law.z_scores(sample.error)).sum(-1)
    start = math.log(max(float(np.median(square)), 1e-6 * float(square.max())) / 2.366)
    bounds = (start - 3.0, start + 3.0)
    # Smooth enough to find the neighbourhood; the table below finds the place.
    rough = minimize_scalar(lambda x: _area(pit(x)), bounds=bounds, method="bounded", options={"xatol": 1e-3}).x
    index, count = sample.numbered()
    inside = np.stack([_held(pit(rough + x), index, count) for x in _GRID], axis=1).reshape(count, -1)
    sizes = np.bincount(index)

    def best(drawn: np.ndarray) -> float:
        # Of the table's type, or the whole table would be converted.
        weights = np.bincount(drawn, minlength=count).astype(inside.dtype)
        observed = (weights @ inside).reshape(len(_GRID), -1) / (weights @ sizes)
        return rough + float(_FINE[np.argmin(np.abs(_between @ observed - CALIBRATION_LEVELS).mean(-1))])

    return best(np.arange(count)), _interval(best, count)


#: Linear interpolation from `_GRID` to `_FINE`.
_between = np.stack([np.interp(_FINE, _GRID, row) for row in np.eye(len(_GRID))], axis=1)


def _area(pit: np.ndarray) -> float:
    """Between the curve of observed coverage and the diagonal: the calibration error with levels everywhere."""
    return float(np.abs(np.sort(pit) - (np.arange(len(pit)) + 0.5) / len(pit)).mean())


def _held(pit: np.ndarray, index: np.ndarray, count: int) -> np.ndarray:
    """Atoms of every configuration inside the ellipsoids of all levels (configurations, levels)."""
    levels = len(CALIBRATION_LEVELS)
    first = np.searchsorted(CALIBRATION_LEVELS, pit, side="left")
    table = np.bincount(index * (levels + 1) + first, minlength=count * (levels + 1)).reshape(count, levels + 1)
    return table.cumsum(axis=1)[:, :levels].astype(np.float32)


def _interval(of_configurations: Callable[[np.ndarray], float], count: int) -> Tuple[float, float]:
    """95 % of what a constant becomes when ``count`` configurations are drawn with replacement."""
    found = bootstrap(
        (np.arange(count),),
        of_configurations,
        vectorized=False,
        n_resamples=RESAMPLES,
        method="percentile",
        random_state=SEED,
    ).confidence_interval
    return float(found.low), float(found.high)


def _exp(logarithms: np.ndarray) -> Tuple[float, Tuple[float, float]]:
    value, low, high = np.exp(logarithms).tolist()
    return value, (low, high)


def _logs(factor: Dict[str, Constant]) -> np.ndarray:
    return np.log([[constant.value, *constant.interval] for constant in factor.values()])


# Conformal radii


def conformal_radius(distance: np.ndarray, frame: np.ndarray, level: float) -> float:
    """Radius that holds the distance of a random atom of a new configuration with a probability of at least ``level``.

    Hierarchical conformal prediction (Lee, Barber & Willett 2023, https://arxiv.org/abs/2306.06342): configurations are
    exchangeable, atoms within one are not. Of K configurations each has the weight 1/(K + 1), shared by its atoms, and
    infinity has the last; the radius is the weighted quantile.

    Parameters
    ----------
    distance : (N,)
    frame : (N,) int
        Configuration of every atom.
    level : float

    Returns
    -------
    float
        Infinite for levels above K/(K + 1).

    Examples
    --------
    >>> conformal_radius(np.array([1.0, 2.0, 3.0]), np.array([0, 1, 2]), 0.75), 4 * 0.75
    (3.0, 3.0)
    """
    _, index, sizes = np.unique(frame, return_inverse=True, return_counts=True)
    order = np.argsort(distance)
    held = np.cumsum(1.0 / ((len(sizes) + 1) * sizes[index[order]]))
    # Sums of weights that equal the level but for rounding.
    place = np.searchsorted(held, level * (1.0 - 1e-12))
    return float(distance[order][place]) if place < len(held) else math.inf


def _unreachable(radii: Dict[float, float], count: int) -> List[str]:
    levels = [f"{level:g}" for level, radius in radii.items() if math.isinf(radius)]
    if not levels:
        return []
    return [
        f"no finite conformal radius for level {', '.join(levels)}: {count} configurations allow levels up to "
        f"{count / (count + 1):.3f}; give more configurations"
    ]
