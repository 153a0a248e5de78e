"""Calibration, ranking and error figures over many atoms (NumPy, float64)."""

from typing import Callable, Dict, Optional

import numpy as np
from scipy import ndimage
from scipy.stats import mannwhitneyu, rankdata

from e2ip_plugins.families.laws import Law

#: Levels p at which observed and expected coverage are compared.
CALIBRATION_LEVELS = np.arange(1, 100) / 100.0

#: Levels that tables report.
COVERAGE_LEVELS = (0.5, 0.8, 0.9, 0.95)

#: AUROC asks whether the uncertainty finds this share of atoms, those with the largest errors.
WORST_SHARE = 0.1


def observed_coverage(pit: np.ndarray, levels: np.ndarray = CALIBRATION_LEVELS) -> np.ndarray:
    """Share of atoms, or of components, whose PIT is at most p, for every level p."""
    return np.searchsorted(np.sort(pit, axis=None), levels, side="right") / pit.size


def calibration_error(pit: np.ndarray) -> float:
    """Mean ``|observed - expected|`` coverage over the levels 0.01 … 0.99.

    >>> calibration_error((np.arange(1000) + 0.5) / 1000) < 0.001
    True
    """
    return float(np.abs(observed_coverage(pit) - CALIBRATION_LEVELS).mean())


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman rank correlation; NaN where it is undefined.

    `scipy.stats.spearmanr` without its p-value, which takes most of its time in a training loop.
    """
    if len(a) < 2 or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("nan")
    ra, rb = rankdata(a), rankdata(b)
    ra, rb = ra - ra.mean(), rb - rb.mean()
    norm = np.sqrt((ra @ ra) * (rb @ rb))
    return float(ra @ rb / norm) if norm > 0 else float("nan")


def auroc(a: np.ndarray, b: np.ndarray) -> float:
    """Probability that a value of a is larger than one of b, ties count half; NaN where either is empty.

    Values may be infinite; NaN are left out.

    >>> auroc(np.array([2.0, np.inf]), np.array([1.0, 2.0]))
    0.875
    """
    a, b = a[~np.isnan(a)], b[~np.isnan(b)]
    if not (len(a) and len(b)):
        return float("nan")
    return float(mannwhitneyu(a, b, method="asymptotic").statistic / (len(a) * len(b)))


def auroc_worst(uncertainty: np.ndarray, error_norm: np.ndarray) -> float:
    """Probability that an atom among the worst 10 % errors has a larger uncertainty than one that is not.

    NaN where there are none of either kind, or all uncertainties are the same: that ranks nothing.
    """
    worst = error_norm > np.quantile(error_norm, 1.0 - WORST_SHARE)
    if worst.all() or not worst.any() or (uncertainty == uncertainty[0]).all():
        return float("nan")
    return auroc(uncertainty[worst], uncertainty[~worst])


def sparsification(ranking: np.ndarray, error_norm: np.ndarray) -> np.ndarray:
    """Mean error of the atoms left when those ranked highest are dropped, relative to the mean of all.

    Atoms of the same rank count with their mean error: their order in a file says nothing.

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
    """Area between the sparsification curves by uncertainty and by the error itself; 0 is a perfect ranking.

    NaN where all uncertainties are the same, which rank nothing.
    """
    if (uncertainty == uncertainty[0]).all():
        return float("nan")
    return float(np.mean(sparsification(uncertainty, error_norm) - sparsification(error_norm, error_norm)))


def frame_scores(
    sizes: np.ndarray, leverage: Optional[np.ndarray], epistemic_std: Optional[np.ndarray]
) -> Dict[str, np.ndarray]:
    """What may tell a frame out of distribution from one in distribution.

    Parameters
    ----------
    sizes : (F,)
        Atoms per frame.
    leverage : (N,) or None
        NaN for atoms without one: means leave them out.
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
    frames = np.arange(len(sizes))
    frame = np.repeat(frames, sizes)

    def of_frames(reduce: Callable, values: Optional[np.ndarray]) -> np.ndarray:
        if values is None:
            return np.full(len(sizes), np.nan)
        kept = ~np.isnan(values)
        with np.errstate(invalid="ignore"):
            found = reduce(values, np.where(kept, frame, -1), frames)
        return np.where(np.isin(frames, frame[kept]), found, np.nan)

    return {
        "mean_leverage": of_frames(ndimage.mean, leverage),
        "max_epistemic_std": of_frames(ndimage.maximum, epistemic_std),
        "mean_epistemic_std": of_frames(ndimage.mean, epistemic_std),
    }


#: Condition number of a covariance up to which its principal axes mean nothing: files keep eight decimals.
ISOTROPIC = 1.001

#: From here on the smallest principal axis is rounding: no full rank.
SINGULAR = 1e10

#: Everything that is computed once per atom, by name; tables of subsets only average these.
AtomScores = Dict[str, np.ndarray]


def score_atoms(
    error: Optional[np.ndarray], law: Optional[Law] = None, leverage: Optional[np.ndarray] = None
) -> AtomScores:
    """All per-atom scores of errors (N, 3) in eV/Å; without a law, errors only, and the leverage (N,) if there is one.

    Returns
    -------
    dict
        ``leverage`` (N,) as given; ``epistemic_std``, ``total_std`` (N,) of a law. With errors also ``error`` (N, 3)
        and ``error_norm`` (N,) in eV/Å. With both ``nll``, ``pit`` (N,), or per component (N, 3), ``energy_score``,
        ``energy_score_error`` (its standard error from sampling), and ``z_scores`` and ``axis_pit`` (N, 3) along the
        principal axes, smallest predicted variance first; ``directed`` (N,): whether there are such axes, and
        ``singular`` (N,): whether a covariance has no full rank.
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
        scores |= {"directed": condition > ISOTROPIC, "singular": ~(condition < SINGULAR)}
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

#: Averages over atoms that need a distribution and errors. ``energy_score_error`` is the standard error that sampling,
#: where a law needs it, leaves in their mean energy score. ``z_rms_*`` and ``axis_coverage95_*`` belong to the
#: principal axes of smallest, middle and largest predicted variance; calibrated, they are 1 and 0.95 on each, and None
#: where all covariances are isotropic.
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
    """Averages over atoms; None where predictions lack the distribution, the leverage or the errors for it.

    Force MAE and RMSE run over components, as in both hosts' own tables; forces in eV/Å. The mean leverage is that of
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
