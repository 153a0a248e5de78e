"""Scores of energies with standard deviations: frame by frame, and for differences between two frames.

An error e (reference minus prediction, in eV) is judged by a Gaussian of standard deviation σ; z = e/σ. The error of a
difference of two frames of one composition is e - e', and its σ is the length |u - u'| of the difference of their error
vectors (`e2ip_plugins.leverage.energies`).

Intervals come from a bootstrap that draws whole frames. A pair counts as often as the product of the numbers of times
that its frames were drawn. Coverages of frames have exact binomial intervals instead, because a bootstrap is too sure
of shares near 0 and 1.
"""

import math
from typing import Dict, List, NamedTuple, Optional, Tuple

import numpy as np
from scipy.special import erf
from scipy.stats import binomtest

from e2ip_plugins.predictions.prediction_files import Predictions
from e2ip_plugins.scores.bootstrap import RESAMPLES, RESAMPLING_SEED, error_interval
from e2ip_plugins.scores.metrics import CALIBRATION_LEVELS, COVERAGE_LEVELS

#: Largest number of pairs that are scored, and the seed with which more are drawn from.
MAX_PAIRS, PAIRS_SEED = 5000, 0

#: Two frames are one structure where |u - u'| is less than this, relative to the larger of |u| and |u'|: what is left
#: of an error in a file is rounding then.
_SAME_STRUCTURE = 1e-3

#: Mean error of an atom in eV from which on energies are very likely those of another reference.
_OTHER_REFERENCE = 0.5

#: Resamples that are scored at once.
_AT_ONCE = 50


class EnergyResiduals(NamedTuple):
    """Errors of n energies or differences of energies, and what was predicted of them.

    Attributes
    ----------
    error, std : (n,)
        Reference minus prediction, and its predicted standard deviation, in eV.
    atoms : (n,)
        Number that MAE, CRPS and ranks are divided by: atoms of the frame, 1 for differences.
    frames : (n, 1) or (n, 2) int
        Frames of each, by their number in the file's predictions.
    possible : int
        Number of all there are, of which n may have been drawn.
    """

    error: np.ndarray
    std: np.ndarray
    atoms: np.ndarray
    frames: np.ndarray
    possible: int

    @property
    def of_single_frames(self) -> bool:
        """Whether they are energies, not differences."""
        return self.frames.shape[1] == 1


def negative_log_likelihood(error: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Return log σ + z²/2 + log(2π)/2 (n,), in nats for a density in 1/eV.

    >>> negative_log_likelihood(np.array([0.0]), np.array([1.0])).round(4)
    array([0.9189])
    """
    return np.log(std) + 0.5 * np.square(error / std) + 0.5 * math.log(2.0 * math.pi)


def crps(error: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Return the continuous ranked probability score of a Gaussian (n,), in the unit of the error.

    CRPS = σ (z (2 Φ(z) - 1) + 2 φ(z) - 1/√π), Gneiting and Raftery, J. Am. Stat. Assoc. 102, 359 (2007), eq. 21. It is
    |e| where σ is 0.

    >>> crps(np.array([3.0]), np.array([1e-9])).round(6)
    array([3.])
    """
    z = error / std
    density = np.exp(-0.5 * np.square(z)) / math.sqrt(2.0 * math.pi)
    return std * (z * erf(z / math.sqrt(2.0)) + 2.0 * density - 1.0 / math.sqrt(math.pi))


def central_level(error: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Return the level of the central interval that ends at the error (n,), 2 Φ(|z|) - 1: a PIT from 0 to 1.

    It is the same as the PIT of forces (`e2ip_plugins.families.laws`), in one dimension.
    """
    return erf(np.abs(error / std) / math.sqrt(2.0))


def of_frames(p: Predictions) -> Optional[EnergyResiduals]:
    """Return the errors of the frames that have a reference energy and an uncertainty; None where none has both."""
    if not p.has_energy_uncertainties:
        return None
    error = p.reference_energy - p.energy
    frames = np.flatnonzero(np.isfinite(error) & np.isfinite(p.energy_uncertainty))
    if not len(frames):
        return None
    return EnergyResiduals(error[frames], p.energy_uncertainty[frames], p.sizes[frames], frames[:, None], len(frames))


def of_pairs(p: Predictions) -> Optional[EnergyResiduals]:
    """Return the errors of differences between frames of one composition; None where there is no such pair.

    Of more than `MAX_PAIRS` pairs as many are drawn, with a fixed seed. Pairs of two copies of a structure, whose
    difference is certain, are left out.
    """
    if p.energy_error_vector is None:
        return None
    error = p.reference_energy - p.energy
    usable = np.flatnonzero(np.isfinite(error) & np.isfinite(p.energy_error_vector).all(-1))
    groups: Dict[Tuple, List[int]] = {}
    for i in usable.tolist():
        symbols, counts = np.unique(p.species[p.atoms_of[i]], return_counts=True)
        groups.setdefault((*symbols.tolist(), *counts.tolist()), []).append(i)
    pairs, possible = _draw_pairs([np.array(group) for group in groups.values()])
    first, second = p.energy_error_vector[pairs.T]
    std = np.linalg.norm(first - second, axis=-1)
    lengths = np.maximum(np.linalg.norm(first, axis=-1), np.linalg.norm(second, axis=-1))
    apart = std > _SAME_STRUCTURE * lengths
    if not apart.any():
        return None
    pairs, std = pairs[apart], std[apart]
    differences = error[pairs[:, 0]] - error[pairs[:, 1]]
    return EnergyResiduals(differences, std, np.ones(len(std)), pairs, possible)


def _draw_pairs(groups: List[np.ndarray]) -> Tuple[np.ndarray, int]:
    """Return pairs (n, 2) of two frames of one group each, and the number of all such pairs."""
    sizes = np.array([len(group) * (len(group) - 1) // 2 for group in groups], dtype=np.int64)
    ends, possible = np.cumsum(sizes), int(sizes.sum())
    numbers = np.arange(min(possible, MAX_PAIRS))
    if possible > MAX_PAIRS:
        numbers = np.sort(np.random.default_rng(PAIRS_SEED).choice(possible, MAX_PAIRS, replace=False))
    place = np.searchsorted(ends, numbers, side="right")
    pairs = np.empty((len(numbers), 2), dtype=int)
    for i in np.unique(place):
        chosen = place == i
        # Pairs of a group in the order 01, 02, 12, 03, …: the second frame has a triangular number of pairs before it.
        within = numbers[chosen] - (ends[i] - sizes[i])
        second = np.floor(0.5 * (1.0 + np.sqrt(1.0 + 8.0 * within))).astype(np.int64)
        pairs[chosen] = np.stack([groups[i][within - second * (second - 1) // 2], groups[i][second]], axis=1)
    return pairs, possible


def energy_figures(residuals: EnergyResiduals) -> Dict[str, float]:
    """Return the mean figures of energies or of their differences.

    Returns
    -------
    dict
        ``mae`` and ``crps`` in eV/atom, of differences in eV; ``nll`` in nats for a density of the whole energy in
        1/eV; ``calibration_error`` and ``coverage50`` to ``coverage95``, as those of forces with intervals in place of
        ellipsoids; ``z_rms``, the root mean square of z, ``beyond3``, the share of |z| above 3, and for frames
        ``z_mean`` (the sign of a pair means nothing); ``spearman``, the rank correlation of |error| and standard
        deviation, both per atom, NaN where it is undefined.
    """
    of_all = _weighted_figures(residuals, np.ones((1, len(residuals.error))))
    return {name: float(values[0]) for name, values in of_all.items()}


def energy_intervals(residuals: EnergyResiduals) -> Optional[Dict[str, Tuple[float, float]]]:
    """Return 95 % intervals of `energy_figures`, see the module; None with fewer than two frames."""
    frames, index = np.unique(residuals.frames, return_inverse=True)
    index = index.reshape(residuals.frames.shape)
    count = len(frames)
    if count < 2:
        return None
    drawn = np.random.default_rng(RESAMPLING_SEED).multinomial(count, np.full(count, 1.0 / count), size=RESAMPLES)
    parts = []
    for some in np.array_split(drawn.astype(np.float64), RESAMPLES // _AT_ONCE):
        weights = some[:, index].prod(-1)
        # Of three frames, one may have been drawn three times: such a resample has no pair.
        parts.append(_weighted_figures(residuals, weights[weights.any(1)]))
    values, intervals = energy_figures(residuals), {}
    for name, value in values.items():
        resampled = np.concatenate([part[name] for part in parts])
        resampled = resampled[np.isfinite(resampled)]
        if name == "calibration_error":
            intervals[name] = error_interval(value, resampled)
        elif math.isfinite(value) and len(resampled):
            low, high = np.quantile(resampled, [0.025, 0.975])
            intervals[name] = (float(low), float(high))
    return {**intervals, **(_binomial_intervals(residuals) if residuals.of_single_frames else {})}


def _binomial_intervals(residuals: EnergyResiduals) -> Dict[str, Tuple[float, float]]:
    """Return the exact 95 % intervals (Clopper and Pearson) of the coverages of independent frames."""
    pit, intervals = central_level(residuals.error, residuals.std), {}
    for level in COVERAGE_LEVELS:
        interval = binomtest(int((pit <= level).sum()), len(pit)).proportion_ci(method="exact")
        intervals[f"coverage{round(100 * level)}"] = (float(interval.low), float(interval.high))
    return intervals


def _weighted_figures(r: EnergyResiduals, weights: np.ndarray) -> Dict[str, np.ndarray]:
    """Return the figures (R,) with weights (R, n)."""
    total = weights.sum(1)
    z, pit = r.error / r.std, central_level(r.error, r.std)

    def mean(values: np.ndarray) -> np.ndarray:
        return weights @ values / total

    inside = (pit[:, None] <= CALIBRATION_LEVELS).astype(np.float64)
    observed = weights @ inside / total[:, None]
    return {
        "mae": mean(np.abs(r.error) / r.atoms),
        "nll": mean(negative_log_likelihood(r.error, r.std)),
        "crps": mean(crps(r.error, r.std) / r.atoms),
        "calibration_error": np.abs(observed - CALIBRATION_LEVELS).mean(1),
        **{f"coverage{round(100 * level)}": mean(pit <= level) for level in COVERAGE_LEVELS},
        "z_rms": np.sqrt(mean(np.square(z))),
        "beyond3": mean(np.abs(z) > 3.0),
        **({"z_mean": mean(z)} if r.of_single_frames else {}),
        "spearman": weighted_spearman(np.abs(r.error) / r.atoms, r.std / r.atoms, weights),
    }


def weighted_spearman(a: np.ndarray, b: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the Spearman rank correlation (R,) of a and b (n,) with weights (R, n); NaN where it is undefined.

    With whole numbers as weights it is that of the values repeated as often.
    """
    total = weights.sum(1, keepdims=True)
    ranks = []
    for values in (a, b):
        _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
        starts = np.cumsum(counts) - counts
        of_value = np.add.reduceat(weights[:, np.argsort(place, kind="stable")], starts, axis=1)
        # Equal values share the middle of their ranks.
        rank = (np.cumsum(of_value, axis=1) - 0.5 * of_value)[:, place]
        ranks.append(rank - (weights * rank).sum(1, keepdims=True) / total)
    products = [(weights * x * y).sum(1) for x, y in ((ranks[0], ranks[1]), (ranks[0],) * 2, (ranks[1],) * 2)]
    norm = np.sqrt(products[1] * products[2])
    # A variance of ranks that is rounding is none.
    defined = norm > 1e-9 * total[:, 0] ** 3
    return np.divide(products[0], norm, out=np.full(len(weights), np.nan), where=defined)


def reference_doubt(p: Predictions) -> Optional[str]:
    """Return a warning where reference energies are very likely those of another reference than the predicted ones."""
    error = (p.reference_energy - p.energy) / p.sizes
    known = np.isfinite(error)
    if not known.any() or abs(offset := float(np.median(error[known]))) < _OTHER_REFERENCE:
        return None
    return (
        f"the reference energies differ from the predicted ones by {offset:.3g} eV per atom: are they of another "
        "reference (energies of atoms, functional, basis) than the energies that the model was trained on? Their error "
        "bars do not hold that"
    )
