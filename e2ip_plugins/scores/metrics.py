"""Calibration, ranking and error figures over many atoms (NumPy, float64)."""

from typing import Any, Callable, Dict, Optional

import numpy as np
from scipy.stats import mannwhitneyu, rankdata

from e2ip_plugins.families.laws import Law

#: Levels p at which observed and expected coverage are compared.
CALIBRATION_LEVELS = np.arange(1, 100) / 100.0

#: Levels that tables report.
COVERAGE_LEVELS = (0.5, 0.8, 0.9, 0.95)

#: AUROC asks whether the uncertainty finds this share of atoms, those with the largest errors.
WORST_SHARE = 0.1


def observed_coverage(pit: np.ndarray, levels: np.ndarray = CALIBRATION_LEVELS) -> np.ndarray:
    """Share of atoms whose PIT is at most p, for every level p."""
    return np.searchsorted(np.sort(pit), levels, side="right") / len(pit)


def calibration_error(pit: np.ndarray) -> float:
    """Mean |observed - expected| coverage over the levels 0.01 … 0.99."""
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


def auroc_worst(uncertainty: np.ndarray, error_norm: np.ndarray) -> float:
    """Probability that an atom among the worst 10 % errors has a larger uncertainty than one that is not."""
    worst = error_norm > np.quantile(error_norm, 1.0 - WORST_SHARE)
    if worst.all() or not worst.any():
        return float("nan")
    a, b = uncertainty[worst], uncertainty[~worst]
    return float(mannwhitneyu(a, b, method="asymptotic").statistic / (len(a) * len(b)))


def sparsification(ranking: np.ndarray, error_norm: np.ndarray) -> np.ndarray:
    """Mean error of the atoms left when those ranked highest are dropped, relative to the mean of all.

    Returns
    -------
    (N,)
        Entry i: the i atoms of highest rank are gone.
    """
    kept_first = error_norm[np.argsort(ranking, kind="stable")]
    left = np.cumsum(kept_first) / np.arange(1, len(kept_first) + 1)
    return (left / left[-1])[::-1]


def ause(uncertainty: np.ndarray, error_norm: np.ndarray) -> float:
    """Area between the sparsification curves by uncertainty and by the error itself; 0 is a perfect ranking."""
    return float(np.mean(sparsification(uncertainty, error_norm) - sparsification(error_norm, error_norm)))


#: Everything that is computed once per atom, by name; tables of subsets only average these.
AtomScores = Dict[str, np.ndarray]


def score_atoms(error: np.ndarray, law: Optional[Law] = None) -> AtomScores:
    """All per-atom scores of errors (N, 3) in eV/Å; without a law, errors only.

    Returns
    -------
    dict
        ``error`` (N, 3) and ``error_norm`` (N,) in eV/Å. With a law also ``nll``, ``pit``, ``energy_score``,
        ``epistemic_std``, ``total_std`` (N,), and ``z_scores`` and ``axis_pit`` (N, 3) along the principal axes,
        smallest predicted variance first.
    """
    scores = {"error": error, "error_norm": np.linalg.norm(error, axis=-1)}
    if law is not None:
        scores |= {"nll": law.negative_log_likelihood(error), "pit": law.pit(error)}
        scores |= {"energy_score": law.energy_score(error)}
        scores |= {"epistemic_std": law.epistemic_std(), "total_std": law.total_std()}
        scores |= {"z_scores": law.z_scores(error), "axis_pit": law.axis_pit(error)}
    return scores


def summarise(s: AtomScores) -> Dict[str, Optional[float]]:
    """Averages over atoms. Uncertainty entries are None for predictions without a distribution.

    Force MAE and RMSE run over components, as in both hosts' own tables; forces in eV/Å.
    ``z_rms_*`` and ``axis_coverage95_*`` belong to the principal axes of smallest, middle and
    largest predicted variance; calibrated, they are 1 and 0.95 on each.
    """
    figures: Dict[str, Callable[[], Any]] = {
        "nll": lambda: s["nll"].mean(),
        "calibration_error": lambda: calibration_error(s["pit"]),
        **{f"coverage{round(100 * p)}": lambda p=p: np.mean(s["pit"] <= p) for p in COVERAGE_LEVELS},
        "energy_score": lambda: s["energy_score"].mean(),
    }
    for kind in ("epistemic_std", "total_std"):
        name = kind.removesuffix("_std")
        figures[f"spearman_{name}"] = lambda k=kind: spearman(s[k], s["error_norm"])
        figures[f"auroc_{name}"] = lambda k=kind: auroc_worst(s[k], s["error_norm"])
        figures[f"ause_{name}"] = lambda k=kind: ause(s[k], s["error_norm"])
        figures[kind] = lambda k=kind: s[k].mean()
    for i, axis in enumerate(("minor", "middle", "major")):
        figures[f"z_rms_{axis}"] = lambda i=i: np.sqrt(np.square(s["z_scores"][:, i]).mean())
        figures[f"axis_coverage95_{axis}"] = lambda i=i: np.mean(s["axis_pit"][:, i] <= 0.95)
    result: Dict[str, Optional[float]] = {
        "atoms": len(s["error"]),
        "force_mae": float(np.abs(s["error"]).mean()),
        "force_rmse": float(np.sqrt(np.square(s["error"]).mean())),
    }
    return result | {name: float(figure()) if "pit" in s else None for name, figure in figures.items()}
