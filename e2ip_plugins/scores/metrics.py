"""Calibration, ranking and error figures over many atoms (NumPy, float64)."""

from dataclasses import dataclass
from typing import Dict, Optional

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


@dataclass(frozen=True)
class AtomScores:
    """Everything that is computed once per atom; tables of subsets only average these.

    Attributes
    ----------
    error : (N, 3)
        Reference minus predicted forces in eV/Å.
    nll, pit, energy_score, epistemic_std, total_std : (N,), or None
        None when the predictions carry no distribution.
    z_scores, axis_pit : (N, 3), or None
        Along the principal axes, smallest predicted variance first.
    """

    error: np.ndarray
    nll: Optional[np.ndarray] = None
    pit: Optional[np.ndarray] = None
    energy_score: Optional[np.ndarray] = None
    epistemic_std: Optional[np.ndarray] = None
    total_std: Optional[np.ndarray] = None
    z_scores: Optional[np.ndarray] = None
    axis_pit: Optional[np.ndarray] = None

    @property
    def error_norm(self) -> np.ndarray:
        """‖e‖ in eV/Å (N,)."""
        return np.linalg.norm(self.error, axis=-1)

    def subset(self, mask: np.ndarray) -> "AtomScores":
        """Scores of some of the atoms."""
        return AtomScores(**{k: None if v is None else v[mask] for k, v in vars(self).items()})


def score_atoms(error: np.ndarray, law: Optional[Law] = None) -> AtomScores:
    """All per-atom scores of errors (N, 3) in eV/Å; without a law, errors only."""
    if law is None:
        return AtomScores(error=error)
    return AtomScores(
        error=error,
        nll=law.negative_log_likelihood(error),
        pit=law.pit(error),
        energy_score=law.energy_score(error),
        epistemic_std=law.epistemic_std(),
        total_std=law.total_std(),
        z_scores=law.z_scores(error),
        axis_pit=law.axis_pit(error),
    )


def summarise(s: AtomScores) -> Dict[str, Optional[float]]:
    """Averages over atoms. Uncertainty entries are None for predictions without a distribution.

    Force MAE and RMSE run over components, as in both hosts' own tables; forces in eV/Å.
    ``z_rms_*`` and ``axis_coverage95_*`` belong to the principal axes of smallest, middle and
    largest predicted variance; calibrated, they are 1 and 0.95 on each.
    """
    names = ["minor", "middle", "major"]
    result: Dict[str, Optional[float]] = {
        "atoms": len(s.error),
        "force_mae": float(np.abs(s.error).mean()),
        "force_rmse": float(np.sqrt(np.square(s.error).mean())),
    }
    if s.pit is None:
        uncertain = ["nll", "calibration_error", *(f"coverage{round(100 * p)}" for p in COVERAGE_LEVELS)]
        uncertain += ["energy_score"]
        uncertain += [f"{score}_{kind}" for kind in ("epistemic", "total") for score in ("spearman", "auroc", "ause")]
        uncertain += ["epistemic_std", "total_std"]
        uncertain += [f"{score}_{n}" for score in ("z_rms", "axis_coverage95") for n in names]
        return result | dict.fromkeys(uncertain)
    norm = s.error_norm
    result["nll"] = float(s.nll.mean())
    result["calibration_error"] = calibration_error(s.pit)
    for p in COVERAGE_LEVELS:
        result[f"coverage{round(100 * p)}"] = float(np.mean(s.pit <= p))
    result["energy_score"] = float(s.energy_score.mean())
    for kind, std in (("epistemic", s.epistemic_std), ("total", s.total_std)):
        result[f"spearman_{kind}"] = spearman(std, norm)
        result[f"auroc_{kind}"] = auroc_worst(std, norm)
        result[f"ause_{kind}"] = ause(std, norm)
    result["epistemic_std"] = float(s.epistemic_std.mean())
    result["total_std"] = float(s.total_std.mean())
    for i, name in enumerate(names):
        result[f"z_rms_{name}"] = float(np.sqrt(np.square(s.z_scores[:, i]).mean()))
    for i, name in enumerate(names):
        result[f"axis_coverage95_{name}"] = float(np.mean(s.axis_pit[:, i] <= 0.95))
    return result
