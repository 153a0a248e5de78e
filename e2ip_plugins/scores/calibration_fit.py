"""Fit of a post-hoc calibration to predictions for validation configurations (`e2ip_plugins.scores.calibration`).

Atoms count alike, because coverage and calibration error are figures over atoms. The atoms of a configuration are no
independent witnesses: whatever says how sure a constant is resamples or counts whole configurations.
"""

import math
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Type

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from scipy.stats import bootstrap

from e2ip_plugins.errors import InputError
from e2ip_plugins.families.interface import Family
from e2ip_plugins.families.laws import Law, law_of
from e2ip_plugins.scores import references
from e2ip_plugins.scores.bootstrap import RESAMPLES, SEED, inside_regions, of_all
from e2ip_plugins.scores.calibration import Calibration, Constant
from e2ip_plugins.scores.metrics import CALIBRATION_LEVELS, COVERAGE_LEVELS, calibration_error

#: One of the first three, or none, with or without the last.
METHODS = ("floor", "scale", "species-scale", "conformal")

#: Coverage that the floor is fitted to (paper, appendix on the ensemble's calibration).
FLOOR_LEVEL = 0.9

#: Species with fewer atoms or configurations get the common factor.
MIN_ATOMS, MIN_CONFIGURATIONS = 30, 5

#: Fewer configurations are worth a word.
FEW = 10

#: Larger factors, and smaller ones than its inverse, are worth a word.
MAX_FACTOR = 1e6

_USELESS = (
    "{} that covariances are of no use as they are; where they have no full rank, as those of two or three models, "
    "method floor mends that"
)

#: Logarithms of factors around the best one, at which coverages are known to the bootstrap: how far, tried in turn,
#: and how densely; around one of them, those that it tells apart; and the linear interpolation of coverages from three
#: neighbours to these.
_REACH, _STEP = (0.8, 2.4, 7.2), 0.05
_FINE = np.linspace(-_STEP, _STEP, 101)
_BETWEEN = np.stack([np.interp(_FINE, [_FINE[0], 0.0, _FINE[-1]], row) for row in np.eye(3)], axis=1)


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
        Of all frames of the file but those of isolated atoms, which are all alike.
    vanishing, unlabelled : int
        Atoms that were left out: for a force that vanishes by symmetry, for a reference force that is not finite.
    uq_model : str or None
        That predicted, where it is known.
    doubt : str or None
        See `e2ip_plugins.scores.references`.
    """

    family: Type[Family]
    parameters: Dict[str, np.ndarray]
    error: np.ndarray
    species: np.ndarray
    frame: np.ndarray
    file: str = "the validation set"
    fingerprints: Tuple[str, ...] = ()
    vanishing: int = 0
    unlabelled: int = 0
    uq_model: Optional[str] = None
    doubt: Optional[str] = None

    @classmethod
    def of(cls, predictions: Any) -> "Sample":
        """Make a sample of `prediction_files.Predictions`; `InputError` for those that cannot be calibrated."""
        p = predictions
        if p.family is None:
            raise InputError(f"{p.path}: has no predicted distribution to calibrate, forces only")
        if p.calibration is not None:
            raise InputError(f"{p.path}: was calibrated already, with {p.calibration}; give predictions without that")
        # Numbered in an order that is not the file's: what is drawn or halved below is then the same for any of them.
        place = np.empty(len(p.frames), dtype=int)
        place[np.argsort(p.frames, kind="stable")] = np.arange(len(p.frames))
        errors, frame = p.reference_forces - p.forces, place[p.frame_of_atom]
        whole = cls(p.family, p.parameters, errors, p.species, frame, str(p.path))
        kept = np.isfinite(whole.error).all(-1)
        if not kept.any():
            raise InputError(f"{p.path}: no atom has a finite reference force")
        zero = kept & references.vanishing(p.forces, whole.error)
        if not (kept & ~zero).any():
            raise InputError(f"{p.path}: all forces vanish by symmetry (isolated atoms, perfect crystals)")
        return whole.only(kept & ~zero)._replace(
            fingerprints=tuple(p.frames[i] for i in np.unique(p.frame_of_atom[~zero])),
            vanishing=int(zero.sum()),
            unlabelled=int((~kept).sum()),
            uq_model=p.uq_model,
            doubt=references.doubt(p.reference_forces[kept], p.forces[kept]),
        )

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
        return law_of(self.family, self.parameters)

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
        Methods that do not go together, fewer than two configurations, predictions without errors, conformal radii
        alone of which none is finite.
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
    notes = [sample.doubt] if sample.doubt else []
    if sample.vanishing:
        notes.append(
            f"{sample.vanishing} atoms left out whose force vanishes by symmetry (isolated atoms, perfect crystals): "
            "they tell nothing of errors"
        )
    if sample.unlabelled:
        notes.append(f"{sample.unlabelled} atoms without finite reference forces left out")
    if count < FEW:
        notes.append(f"{count} configurations say little of other frames: look at the intervals of the constants")
    if halved:
        notes.append(
            f"{method} fitted to every second configuration, the conformal radii to the others: the guarantee of the "
            "radii needs that"
        )
    factor, floor = _FITS[method](fitting, notes)
    # Species that only the other half has.
    missing = _between_them(list(factor.values()))
    factor = {str(symbol): factor.get(str(symbol), missing) for symbol in np.unique(sample.species)}

    def calibrated(part: Sample) -> Sample:
        return part.widened(
            np.array([factor[str(symbol)].value for symbol in part.species]), np.full(len(part.error), floor.value)
        )

    radii: Dict[float, float] = {}
    if "conformal" in methods:
        wide = calibrated(held)
        distance = np.linalg.norm(wide.law().z_scores(wide.error), axis=-1)
        radii = {float(level): conformal_radius(distance, wide.frame, level) for level in sorted(levels)}
        if method == "none" and all(math.isinf(radius) for radius in radii.values()):
            least = min(radii)
            raise InputError(
                f"{sample.file}: {count} configurations allow conformal radii for levels up to "
                f"{count / (count + 1):.3f}; for --level {least:g} give at least {configurations_for(least)} of them"
            )
        notes += _unreachable(radii, held.numbered()[1])
        largest = max((radius for radius in radii.values() if math.isfinite(radius)), default=0.0)
        if largest**2 > MAX_FACTOR:
            notes.append(_USELESS.format(f"a radius of {largest:.1e} says"))
    before, after = _figures(sample), _figures(calibrated(sample))
    if after["nll"] > before["nll"] + 0.01:
        notes.append(
            f"the mean NLL rises from {before['nll']:.3f} to {after['nll']:.3f}: errors have other tails than the "
            "predicted distributions, and no size of the covariance is right in the middle and in the tails"
        )
    if method == "species-scale" and after["calibration_error"] > before["calibration_error"] + 0.005:
        notes.append(
            f"the CE over all atoms rises from {before['calibration_error']:.4f} to {after['calibration_error']:.4f}, "
            "every species being fitted by itself; method scale does not do that"
        )
    return Calibration(
        methods=tuple(name for name in METHODS if name in methods),
        uq_family=sample.family.uq_family,
        uq_model=sample.uq_model,
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


def _between_them(constants: List[Constant]) -> Constant:
    """Geometric mean, with an interval that holds theirs."""
    lows, highs = zip(*(constant.interval for constant in constants), strict=True)
    logarithms = [math.log(constant.value) for constant in constants]
    return Constant(math.exp(sum(logarithms) / len(logarithms)), (min(lows), max(highs)))


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
    """The smallest σ² with which the regions of level `FLOOR_LEVEL` hold that share of the atoms (or components)."""
    needed = _needed_floor(sample, FLOOR_LEVEL)
    index, count = sample.numbered()
    index, needed = of_all(index, needed), needed.ravel()
    order = np.argsort(needed)

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
    """σ² from which on the region of a level holds the error, 0 where it does without (N,), or of components (N, 3)."""
    one, zero = np.ones(len(sample.error)), np.zeros(len(sample.error))
    with np.errstate(invalid="ignore", divide="ignore"):
        without = sample.widened(one, zero).law().pit(sample.error) <= level

    def inside(log_floor: np.ndarray) -> np.ndarray:
        pits = [sample.widened(one, np.exp(column)).law().pit(sample.error) for column in log_floor.T]
        return np.stack([pit.reshape(len(one), -1)[:, i] for i, pit in enumerate(pits)], axis=1) <= level

    # With variances of e⁵ times the squared error every region holds it, e⁻³⁵ times that is no floor.
    square = np.square(sample.error - sample.law().mean()).sum(-1, keepdims=True).clip(min=1e-24)
    high = np.broadcast_to(np.log(square) + 5.0, (len(one), without.size // len(one)))
    low = high - 40.0
    for _ in range(36):
        middle = 0.5 * (low + high)
        held = inside(middle)
        low, high = np.where(held, low, middle), np.where(held, middle, high)
    return np.where(without, 0.0, np.exp(high).reshape(without.shape))


def _fit_scale(sample: Sample, notes: List[str]) -> Tuple[Dict[str, Constant], Constant]:
    """One factor, of the least calibration error.

    Not of the largest likelihood: that is what models with a readout are trained for, and what it misses where the
    distribution's shape is not right is the coverage.
    """
    _, none = _unchanged(sample, notes)
    factor = _common_factor(sample, notes)
    return {str(symbol): factor for symbol in np.unique(sample.species)}, none


def _common_factor(sample: Sample, notes: List[str]) -> Constant:
    found, interval = _log_factor(sample)
    factor = Constant(math.exp(_shrunk(found, 0.0, interval)), (math.exp(interval[0]), math.exp(interval[1])))
    if abs(found) > math.log(MAX_FACTOR):
        notes.append(_USELESS.format(f"a factor of {factor.value:.1e} says"))
    if interval[0] <= 0.0 <= interval[1]:
        notes.append(
            f"these configurations want a factor of {math.exp(found):.3f}, which they hardly tell from 1: "
            f"{factor.value:.3f} is applied"
        )
    return factor


def _fit_species_scale(sample: Sample, notes: List[str]) -> Tuple[Dict[str, Constant], Constant]:
    """A factor for every species; one that is hardly to be told from the common one is drawn to that."""
    common = _common_factor(sample, notes)
    factor = {}
    for symbol in np.unique(sample.species):
        part = sample.only(sample.species == symbol)
        atoms, configurations = len(part.error), part.numbered()[1]
        factor[str(symbol)] = common
        if atoms < MIN_ATOMS or configurations < MIN_CONFIGURATIONS:
            notes.append(f"{symbol}: {atoms} atoms in {configurations} configurations: the factor is the common one")
            continue
        found, interval = _log_factor(part)
        value = math.exp(_shrunk(found, math.log(common.value), interval))
        factor[str(symbol)] = Constant(value, (math.exp(interval[0]), math.exp(interval[1])))
        if interval[0] <= math.log(common.value) <= interval[1]:
            notes.append(
                f"{symbol}: {atoms} atoms want a factor of {math.exp(found):.3f}, which they hardly tell from the "
                f"common one: {value:.3f} is applied"
            )
    return factor, _unchanged(sample, notes)[1]


def _shrunk(found: float, towards: float, interval: Tuple[float, float]) -> float:
    """What is left of a logarithm x away from where it may well be: the share 1 - (s/x)² of x, or nothing.

    s is its standard error. Otherwise the noise of few configurations would go into covariances that may be right. (The
    estimator of James and Stein, the spread of true values being estimated from the one that there is.)
    """
    error = (interval[1] - interval[0]) / (2.0 * 1.96)
    away = found - towards
    return towards + away * max(0.0, 1.0 - (error / away) ** 2) if away else towards


_FITS: Dict[str, Callable[[Sample, List[str]], Tuple[Dict[str, Constant], Constant]]] = {
    "none": _unchanged,
    "floor": _fit_floor,
    "scale": _fit_scale,
    "species-scale": _fit_species_scale,
}


def _log_factor(sample: Sample) -> Tuple[float, Tuple[float, float]]:
    """Logarithm of the factor of least calibration error, and its 95 % interval."""
    law = sample.law()
    mean = law.mean()

    def pit(log_factor: float) -> np.ndarray:
        # A factor on the covariance is one on the unit of deviations from the mean.
        return law.pit(mean + (sample.error - mean) * math.exp(-0.5 * log_factor))

    # Where half of the atoms are inside a Gaussian's ellipsoid of 50 %: further away the search would find plains.
    square = np.square(law.z_scores(sample.error)).sum(-1)
    start = math.log(max(float(np.median(square)), 1e-6 * float(square.max())) / 2.366)
    bounds = (start - 3.0, start + 3.0)
    # Smooth enough to find the neighbourhood; the table below finds the place.
    rough = minimize_scalar(lambda x: _area(pit(x)), bounds=bounds, method="bounded", options={"xatol": 1e-3}).x
    index, count = sample.numbered()
    sizes = np.bincount(of_all(index, law.pit(sample.error)))

    def within(reach: float) -> Tuple[float, Tuple[float, float], bool]:
        """What is found not further than that, and whether anything was at the end."""
        grid = np.linspace(-reach, reach, 2 * round(reach / _STEP) + 1)
        inside = np.stack([inside_regions(pit(rough + x), index, count) for x in grid], axis=1).reshape(count, -1)
        places: List[int] = []

        def best(drawn: np.ndarray) -> float:
            # Of the table's type, or the whole table would be converted.
            weights = np.bincount(drawn, minlength=count).astype(inside.dtype)
            observed = (weights @ inside).reshape(len(grid), -1) / (weights @ sizes)
            places.append(_least(observed))
            at = int(np.clip(places[-1], 1, len(grid) - 2))
            return rough + float(grid[at] + _FINE[_least(_BETWEEN @ observed[at - 1 : at + 2])])

        found = best(np.arange(count)), _interval(best, count)
        return *found, not 0 < min(places) <= max(places) < len(grid) - 1

    for reach in _REACH:
        found, interval, beyond = within(reach)
        if not beyond:
            break
    return found, interval


def _least(observed: np.ndarray) -> int:
    """Which of some coverages (…, levels) has the least calibration error."""
    return int(np.argmin(np.abs(observed - CALIBRATION_LEVELS).mean(-1)))


def _area(pit: np.ndarray) -> float:
    """Between the curve of observed coverage and the diagonal: the calibration error with levels everywhere."""
    return float(np.abs(np.sort(pit, axis=None) - (np.arange(pit.size) + 0.5) / pit.size).mean())


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


def configurations_for(level: float) -> int:
    """The least number of configurations with which the radius of a level is finite.

    >>> configurations_for(0.9), configurations_for(0.95)
    (9, 19)
    """
    # Quotients that are whole but for rounding.
    return math.ceil(level / (1.0 - level) - 1e-9)


def _unreachable(radii: Dict[float, float], count: int) -> List[str]:
    levels = [f"{level:g}" for level, radius in radii.items() if math.isinf(radius)]
    if not levels:
        return []
    return [
        f"no finite conformal radius for level {', '.join(levels)}: {count} configurations allow levels up to "
        f"{count / (count + 1):.3f}; give more configurations"
    ]
