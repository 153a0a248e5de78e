"""Fits of a calibration's constants, factor and floor, with intervals from a bootstrap.

The atoms of a configuration are not independent: the bootstrap draws whole configurations.
"""

import math
from typing import Callable, Dict, List, Tuple

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.stats import bootstrap

from e2ip_plugins.scores.bootstrap import RESAMPLES, RESAMPLING_SEED, inside_regions, per_entry
from e2ip_plugins.scores.calibration import CalibrationConstant
from e2ip_plugins.scores.metrics import CALIBRATION_LEVELS
from e2ip_plugins.scores.sample import Sample

#: Coverage that the floor is fitted to (paper, appendix on the ensemble's calibration).
FLOOR_LEVEL = 0.9

#: Species with fewer atoms or configurations get the common factor.
MIN_ATOMS, MIN_CONFIGURATIONS = 30, 5

#: For larger factors, and for smaller ones than its inverse, a note says that the covariances are useless.
MAX_FACTOR = 1e6

#: Grids of log-factors around the best one on which the bootstrap knows coverages: half widths, tried in turn, and
#: spacing. Between three neighbours coverages are interpolated linearly, with the weights `_BETWEEN` for the
#: log-factors `_FINE`.
_REACH, _STEP = (0.8, 2.4, 7.2), 0.05
_FINE = np.linspace(-_STEP, _STEP, 101)
_BETWEEN = np.stack([np.interp(_FINE, [_FINE[0], 0.0, _FINE[-1]], row) for row in np.eye(3)], axis=1)

#: A factor for every species, and the floor.
Fitted = Tuple[Dict[str, CalibrationConstant], CalibrationConstant]


def unchanged(sample: Sample, notes: List[str]) -> Fitted:
    """Return constants that change nothing."""
    one = CalibrationConstant(1.0, (1.0, 1.0))
    return {str(symbol): one for symbol in np.unique(sample.species)}, CalibrationConstant(0.0, (0.0, 0.0))


def useless(evidence: str) -> str:
    """Return the note that covariances are of no use."""
    return (
        f"{evidence} says that covariances are of no use as they are; where they have no full rank, as those of two or "
        "three models, method floor mends that"
    )


def geometric_mean(constants: List[CalibrationConstant]) -> CalibrationConstant:
    """Return the geometric mean of constants, with an interval that holds theirs."""
    lows, highs = zip(*(constant.interval for constant in constants), strict=True)
    logarithms = [math.log(constant.value) for constant in constants]
    return CalibrationConstant(math.exp(sum(logarithms) / len(logarithms)), (min(lows), max(highs)))


def fit_floor(sample: Sample, notes: List[str]) -> Fitted:
    """Return the smallest σ² with which the regions of level `FLOOR_LEVEL` hold that share of atoms or components."""
    index, count = sample.numbered()
    needed = _needed_floor(sample, FLOOR_LEVEL)
    index, needed = per_entry(index, needed), needed.ravel()
    order = np.argsort(needed)

    def floor(drawn: np.ndarray) -> float:
        held = np.cumsum(np.bincount(drawn, minlength=count)[index[order]])
        return float(needed[order][np.searchsorted(held, FLOOR_LEVEL * held[-1])])

    value = floor(np.arange(count))
    if value == 0.0:
        share = float(np.mean(needed == 0.0))
        notes.append(
            f"coverage at {FLOOR_LEVEL:.0%} is {share:.3f} without a floor, which could only widen: the covariance "
            "stays as it is; method scale can narrow it"
        )
    ones, _ = unchanged(sample, notes)
    return ones, CalibrationConstant(value, bootstrap_interval(floor, count))


def _needed_floor(sample: Sample, level: float) -> np.ndarray:
    """Return the least σ² with which the region of a level holds the error, by atom (N,) or by component (N, 3)."""
    atoms, ones = len(sample.error), np.ones(len(sample.error))
    with np.errstate(invalid="ignore", divide="ignore"):
        without = sample.widened(ones, 0.0 * ones).law().pit(sample.error) <= level

    def inside(log_floor: np.ndarray) -> np.ndarray:
        pits = [sample.widened(ones, np.exp(column)).law().pit(sample.error) for column in log_floor.T]
        return np.stack([pit.reshape(atoms, -1)[:, i] for i, pit in enumerate(pits)], axis=1) <= level

    # With variances of e⁵ times the squared error every region holds it; e⁻³⁵ times that is negligible.
    square = np.square(sample.error - sample.law().mean()).sum(-1, keepdims=True).clip(min=1e-24)
    high = np.broadcast_to(np.log(square) + 5.0, (atoms, without.size // atoms))
    low = high - 40.0
    for _ in range(36):
        middle = 0.5 * (low + high)
        held = inside(middle)
        low, high = np.where(held, low, middle), np.where(held, middle, high)
    return np.where(without, 0.0, np.exp(high).reshape(without.shape))


def fit_scale(sample: Sample, notes: List[str]) -> Fitted:
    """Return the factor of least calibration error, for every species.

    The likelihood is not maximised: models with a readout are trained for it, and what it misses where the shape of
    the distribution is wrong is the coverage.
    """
    ones, no_floor = unchanged(sample, notes)
    return dict.fromkeys(ones, _common_factor(sample, notes)), no_floor


def _common_factor(sample: Sample, notes: List[str]) -> CalibrationConstant:
    wanted, factor = _factor(sample, 1.0)
    if not 1.0 / MAX_FACTOR <= wanted <= MAX_FACTOR:
        notes.append(useless(f"a factor of {factor.value:.1e}"))
    if _holds(factor, 1.0):
        notes.append(
            f"the factor that suits these configurations best, {wanted:.3f}, is not different from 1 within its error: "
            f"{factor.value:.3f} is applied"
        )
    return factor


def fit_species_scale(sample: Sample, notes: List[str]) -> Fitted:
    """Return a factor for every species; one that is hardly different from the common factor is drawn towards it."""
    common = _common_factor(sample, notes)
    ones, no_floor = unchanged(sample, notes)
    factors = dict.fromkeys(ones, common)
    for symbol in factors:
        part = sample.only(sample.species == symbol)
        atoms, configurations = len(part.error), part.numbered()[1]
        if atoms < MIN_ATOMS or configurations < MIN_CONFIGURATIONS:
            notes.append(f"{symbol}: {atoms} atoms in {configurations} configurations: the factor is the common one")
            continue
        wanted, factors[symbol] = _factor(part, common.value)
        if _holds(factors[symbol], common.value):
            notes.append(
                f"{symbol}: {atoms} atoms want a factor of {wanted:.3f}, which they hardly tell from the "
                f"common one: {factors[symbol].value:.3f} is applied"
            )
    return factors, no_floor


def _holds(constant: CalibrationConstant, value: float) -> bool:
    return constant.interval[0] <= value <= constant.interval[1]


def _factor(sample: Sample, towards: float) -> Tuple[float, CalibrationConstant]:
    """Return the factor of least calibration error, and the constant that is left of it after shrinkage."""
    log_factor, (low, high) = _log_factor(sample)
    value = math.exp(shrunk(log_factor, math.log(towards), high - low))
    return math.exp(log_factor), CalibrationConstant(value, (math.exp(low), math.exp(high)))


def shrunk(log_factor: float, towards: float, width: float) -> float:
    """Return a log-factor drawn ``towards`` another, from which it differs by x: of x the share 1 - (s/x)² is left.

    s is the standard error, and the share is not negative. Without this, the noise of few configurations would go into
    covariances that may be right. It is the estimator of James and Stein; the spread of the true values is estimated
    from the only value.

    Parameters
    ----------
    log_factor, towards : float
    width : float
        Of the 95 % interval.
    """
    error = width / (2.0 * 1.96)
    away = log_factor - towards
    return towards + away * max(0.0, 1.0 - (error / away) ** 2) if away else towards


def _log_factor(sample: Sample) -> Tuple[float, Tuple[float, float]]:
    """Return the logarithm of the factor of least calibration error, and its 95 % interval."""
    law = sample.law()
    mean = law.mean()

    def pit(log_factor: float) -> np.ndarray:
        # A factor on the covariance is a factor on the unit of deviations from the mean.
        return law.pit(mean + (sample.error - mean) * math.exp(-0.5 * log_factor))

    # Half of the atoms are inside a Gaussian's ellipsoid of 50 %: far from there the search would see no slope.
    square = np.square(law.z_scores(sample.error)).sum(-1)
    start = math.log(max(float(np.median(square)), 1e-6 * float(square.max())) / 2.366)
    bounds = (start - 3.0, start + 3.0)
    # The area is smooth enough to find the neighbourhood; the grid below finds the place.
    rough = minimize_scalar(lambda x: _area(pit(x)), bounds=bounds, method="bounded", options={"xatol": 1e-3}).x
    index, count = sample.numbered()
    sizes = np.bincount(per_entry(index, law.pit(sample.error)))

    def within(reach: float) -> Tuple[float, Tuple[float, float], bool]:
        """Return the result on a grid of some half width, and whether a minimum was at its end."""
        grid = np.linspace(-reach, reach, 2 * round(reach / _STEP) + 1)
        inside = np.stack([inside_regions(pit(rough + x), index, count) for x in grid], axis=1).reshape(count, -1)
        places: List[int] = []

        def best(drawn: np.ndarray) -> float:
            # Weights of another type would make NumPy convert the whole table.
            weights = np.bincount(drawn, minlength=count).astype(inside.dtype)
            observed = (weights @ inside).reshape(len(grid), -1) / (weights @ sizes)
            places.append(_least(observed))
            at = int(np.clip(places[-1], 1, len(grid) - 2))
            return rough + float(grid[at] + _FINE[_least(_BETWEEN @ observed[at - 1 : at + 2])])

        value, interval = best(np.arange(count)), bootstrap_interval(best, count)
        return value, interval, not 0 < min(places) <= max(places) < len(grid) - 1

    for reach in _REACH:
        value, interval, beyond = within(reach)
        if not beyond:
            break
    return value, interval


def _least(observed: np.ndarray) -> int:
    """Return the place of the least calibration error among observed coverages (…, levels)."""
    return int(np.argmin(np.abs(observed - CALIBRATION_LEVELS).mean(-1)))


def _area(pit: np.ndarray) -> float:
    """Return the area between observed coverage and diagonal: the calibration error with levels everywhere."""
    return float(np.abs(np.sort(pit, axis=None) - (np.arange(pit.size) + 0.5) / pit.size).mean())


def bootstrap_interval(of_configurations: Callable[[np.ndarray], float], count: int) -> Tuple[float, float]:
    """Return the 95 % interval of a constant when ``count`` configurations are drawn with replacement."""
    interval = bootstrap(
        (np.arange(count),),
        of_configurations,
        vectorized=False,
        n_resamples=RESAMPLES,
        method="percentile",
        random_state=RESAMPLING_SEED,
    ).confidence_interval
    return float(interval.low), float(interval.high)
