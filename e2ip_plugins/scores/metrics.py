"""Figures of merit over many atoms: calibration, ranking and errors (NumPy, float64)."""

from typing import Callable, Dict, Optional

import numpy as np
from scipy.stats import mannwhitneyu, rankdata

from e2ip_plugins.families.laws import Law

#: Levels p at which observed and expected coverage are compared.
CALIBRATION_LEVELS = np.arange(1, 100) / 100.0

#: Levels that tables report.
COVERAGE_LEVELS = (0.5, 0.8, 0.9, 0.95)

#: Share of atoms, those with the largest errors, that the uncertainty should find (AUROC).
WORST_SHARE = 0.1


def observed_coverage(pit: np.ndarray, levels: np.ndarray = CALIBRATION_LEVELS) -> np.ndarray:
    """Return the share of atoms, or of components, whose PIT is at most p, for every level p."""
    return np.searchsorted(np.sort(pit, axis=None), levels, side="right") / pit.size


def calibration_error(pit: np.ndarray) -> float:
    """Return the mean of ``|observed - expected|`` coverage over the levels 0.01 … 0.99.

    >>> calibration_error((np.arange(1000) + 0.5) / 1000) < 0.001
    True
    """
    return float(np.abs(observed_coverage(pit) - CALIBRATION_LEVELS).mean())


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Return the Spearman rank correlation; NaN where it is undefined.

    `scipy.stats.spearmanr` computes a p-value, too, which would take most of the time in a training loop.
    """
    if len(a) < 2 or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("nan")
    ra, rb = rankdata(a), rankdata(b)
    ra, rb = ra - ra.mean(), rb - rb.mean()
    norm = np.sqrt((ra @ ra) * (rb @ rb))
    return float(ra @ rb / norm) if norm > 0 else float("nan")


def auroc(a: np.ndarray, b: np.ndarray) -> float:
    """Return the probability that a value of a is larger than one of b; NaN where either is empty.

    Ties count half, values may be infinite, NaN are left out.

    >>> auroc(np.array([2.0, np.inf]), np.array([1.0, 2.0]))
    0.875
    """
    a, b = a[~np.isnan(a)], b[~np.isnan(b)]
    if not (len(a) and len(b)):
        return float("nan")
    return float(mannwhitneyu(a, b, method="asymptotic").statistic / (len(a) * len(b)))


def auroc_worst(uncertainty: np.ndarray, error_norm: np.ndarray) -> float:
    """Return the probability that an atom among the worst 10 % errors has a larger uncertainty than another atom.

    NaN where no atom is of one of these kinds, or where all uncertainties are equal.
    """
    worst = error_norm > np.quantile(error_norm, 1.0 - WORST_SHARE)
    if worst.all() or not worst.any() or (uncertainty == uncertainty[0]).all():
        return float("nan")
    return auroc(uncertainty[worst], uncertainty[~worst])


def sparsification(ranking: np.ndarray, error_norm: np.ndarray) -> np.ndarray:
    """Return the mean error of the atoms left when those ranked highest are dropped, relative to the mean of all.

    Atoms of the same rank count with their mean error, because their order in a file means nothing.

    Returns
    -------
    (N,)
        Entry i: the i atoms of highest rank are gone.
    """
    _, place, sizes = np.unique(ranking, return_inverse=True, return_counts=True)
    kept_first = np.repeat(np.bincount(place, error_norm) / sizes, sizes)
    left = np.cumsum(kept_first) / np.arange(1, len(kept_first) + 1)
    # All errors are zero in perfect crystals.
    return (left / left[-1])[::-1] if left[-1] > 0.0 else np.ones_like(left)


def ause(uncertainty: np.ndarray, error_norm: np.ndarray) -> float:
    """Return the area between the sparsification curves by uncertainty and by the error itself; 0 is perfect.

    NaN where all uncertainties are equal.
    """
    if (uncertainty == uncertainty[0]).all():
        return float("nan")
    return float(np.mean(sparsification(uncertainty, error_norm) - sparsification(error_norm, error_norm)))


def frame_scores(
    sizes: np.ndarray, leverage: Optional[np.ndarray], epistemic_std: Optional[np.ndarray]
) -> Dict[str, np.ndarray]:
    """Return figures of frames that may tell those out of distribution from those in distribution.

    Parameters
    ----------
    sizes : (F,)
        Atoms per frame.
    leverage : (N,) or None
        NaN for atoms without a leverage, which means leave out.
    epistemic_std : (N,) or None
        In eV/Å.

    Returns
    -------
    dict
        ``mean_leverage``, ``max_epistemic_std`` and ``mean_epistemic_std`` (F,); NaN for frames without the quantity.

    Examples
    --------
    >>> frame_scores(np.array([2, 1]), np.array([1.0, np.nan, 4.0]), None)["mean_leverage"]
    array([1., 4.])
    """

    def of_frames(reduce: Callable[[np.ndarray], float], values: Optional[np.ndarray]) -> np.ndarray:
        if values is None:
            return np.full(len(sizes), np.nan)
        known = [frame[~np.isnan(frame)] for frame in np.split(values, np.cumsum(sizes)[:-1])]
        return np.array([reduce(frame) if len(frame) else np.nan for frame in known])

    return {
        "mean_leverage": of_frames(np.mean, leverage),
        "max_epistemic_std": of_frames(np.max, epistemic_std),
        "mean_epistemic_std": of_frames(np.mean, epistemic_std),
    }


#: Condition number up to which a covariance has no principal axes: files keep eight decimals.
ISOTROPIC_CONDITION = 1.001

#: Condition number from which on a covariance has no full rank: its smallest principal axis is rounding.
SINGULAR_CONDITION = 1e10

#: Per-atom scores by name, computed once; tables of subsets only average them.
AtomScores = Dict[str, np.ndarray]


def score_atoms(
    error: Optional[np.ndarray], law: Optional[Law] = None, leverage: Optional[np.ndarray] = None
) -> AtomScores:
    """Return all per-atom scores that can be computed from errors (N, 3) in eV/Å, a law and a leverage (N,).

    Returns
    -------
    dict
        ``leverage`` (N,); of a law ``epistemic_std`` and ``total_std`` (N,); of errors ``error`` (N, 3) and
        ``error_norm`` (N,) in eV/Å. Of both: ``nll``; ``pit`` (N,), or per component (N, 3); ``energy_score`` and
        ``energy_score_error``, its standard error from sampling; ``z_scores`` and ``axis_pit`` (N, 3) along the
        principal axes, smallest predicted variance first; ``directed`` (N,), whether a covariance has such axes; and
        ``singular`` (N,), whether it has no full rank.
    """
    scores: AtomScores = {} if leverage is None else {"leverage": leverage}
    if law is not None:
        scores |= {"epistemic_std": law.epistemic_std(), "total_std": law.total_std()}
    if error is not None:
        scores |= {"error": error, "error_norm": np.linalg.norm(error, axis=-1)}
    if law is not None and error is not None:
        scores |= {"nll": law.negative_log_likelihood(error), "pit": law.pit(error)}
        scores |= {"energy_score": law.energy_score(error), "energy_score_error": law.energy_score_error(error)}
        scores |= {"z_scores": law.z_scores(error), "axis_pit": law.axis_pit(error)}
        condition = law.condition_number()
        scores |= {"directed": condition > ISOTROPIC_CONDITION, "singular": ~(condition < SINGULAR_CONDITION)}
    return scores


def _ranking(score: Callable[[np.ndarray, np.ndarray], float], std: str) -> Callable[[AtomScores], float]:
    return lambda s: score(s[std], s["error_norm"])


def _of_axis(i: int, score: str, average: Callable[[np.ndarray], float]) -> Callable[[AtomScores], Optional[float]]:
    return lambda s: average(s[score][s["directed"], i]) if s["directed"].any() else None


def _coverage(level: float) -> Callable[[AtomScores], float]:
    return lambda s: float(np.mean(s["pit"] <= level))


def _axis_coverage95(pit: np.ndarray) -> float:
    return float(np.mean(pit <= 0.95))


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.square(values).mean()))


def _error_of_mean(independent: np.ndarray) -> float:
    return float(np.linalg.norm(independent) / len(independent))


def _finite_mean(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else float("nan")


_AXES = ("minor", "middle", "major")

#: Averages over atoms that need a distribution and errors. ``energy_score_error`` is the standard error of the mean
#: energy score from sampling. ``z_rms_*`` and ``axis_coverage95_*`` belong to the principal axes of smallest, middle
#: and largest predicted variance: 1 and 0.95 for a calibrated model, None where all covariances are isotropic.
UNCERTAINTY_FIGURES: Dict[str, Callable[[AtomScores], Optional[float]]] = {
    "nll": lambda s: s["nll"].mean(),
    "calibration_error": lambda s: calibration_error(s["pit"]),
    **{f"coverage{round(100 * level)}": _coverage(level) for level in COVERAGE_LEVELS},
    "energy_score": lambda s: s["energy_score"].mean(),
    "energy_score_error": lambda s: _error_of_mean(s["energy_score_error"]),
    **{f"spearman_{kind}": _ranking(spearman, f"{kind}_std") for kind in ("epistemic", "total")},
    **{f"auroc_{kind}": _ranking(auroc_worst, f"{kind}_std") for kind in ("epistemic", "total")},
    **{f"ause_{kind}": _ranking(ause, f"{kind}_std") for kind in ("epistemic", "total")},
    **{f"z_rms_{axis}": _of_axis(i, "z_scores", _rms) for i, axis in enumerate(_AXES)},
    **{f"axis_coverage95_{axis}": _of_axis(i, "axis_pit", _axis_coverage95) for i, axis in enumerate(_AXES)},
}


def summarise(s: AtomScores) -> Dict[str, Optional[float]]:
    """Return averages over atoms; None where the distribution, the leverage or the errors for one are missing.

    Force MAE and RMSE in eV/Å run over components, as in MACE's and NequIP's own tables. The mean leverage is that of
    atoms with a finite one.
    """
    figures = {
        "force_mae": np.abs(s["error"]).mean() if "error" in s else None,
        "force_rmse": _rms(s["error"]) if "error" in s else None,
        "leverage": _finite_mean(s["leverage"]) if "leverage" in s else None,
        **{name: s[name].mean() if name in s else None for name in ("epistemic_std", "total_std")},
        **{name: of(s) if "pit" in s else None for name, of in UNCERTAINTY_FIGURES.items()},
    }
    return {name: None if value is None else float(value) for name, value in figures.items()}
