"""Scores of predicted force distributions against reference forces (NumPy, float64).

Notation: e = y - γ is the reference minus the predicted force of an atom, Λ the scale matrix of its
predictive Student-t and m the degrees of freedom; m = ∞ is a Gaussian with covariance Λ. Everything
starts from the eigenvalues and eigenvectors of Λ, so that no score depends on its conditioning.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Dict, Optional

import numpy as np
from scipy.special import elliprg, fdtr, poch, stdtr
from scipy.stats import mannwhitneyu, rankdata

#: Levels p at which observed and expected coverage are compared.
CALIBRATION_LEVELS = np.arange(1, 100) / 100.0

#: Levels that tables report.
COVERAGE_LEVELS = (0.5, 0.8, 0.9, 0.95)

#: AUROC asks whether the uncertainty finds this share of atoms, those with the largest errors.
WORST_SHARE = 0.1


@dataclass(frozen=True)
class Predictive:
    """Student-t (or Gaussian) force distributions of N atoms, seen from their references.

    Attributes
    ----------
    error : (N, 3)
        e = y - γ in eV/Å.
    log_scale : (N, 3)
        Logarithm of Λ's eigenvalues in eV²/Å², ascending.
    axes : (N, 3, 3)
        Eigenvectors of Λ as columns, in the same order.
    dof : (N,)
        m > 2; ``inf`` for a Gaussian.
    epistemic_std : (N,)
        sqrt(tr U_epi / 3) in eV/Å.
    """

    error: np.ndarray
    log_scale: np.ndarray
    axes: np.ndarray
    dof: np.ndarray
    epistemic_std: np.ndarray

    @cached_property
    def whitened(self) -> np.ndarray:
        """Λ^(-1/2) e in Λ's eigenframe (N, 3)."""
        return np.einsum("nij,ni->nj", self.axes, self.error) * np.exp(-0.5 * self.log_scale)

    @cached_property
    def mahalanobis(self) -> np.ndarray:
        """M = eᵀ Λ⁻¹ e (N,)."""
        return np.square(self.whitened).sum(-1)

    @cached_property
    def covariance_factor(self) -> np.ndarray:
        """Covariance / Λ = m/(m-2) (N,)."""
        return 1.0 / (1.0 - 2.0 / self.dof)

    @property
    def total_std(self) -> np.ndarray:
        """sqrt(tr covariance / 3) in eV/Å (N,)."""
        return np.sqrt(self.covariance_factor * np.exp(self.log_scale).mean(-1))

    @property
    def z_scores(self) -> np.ndarray:
        """e along the principal axes, each in units of its predicted standard deviation (N, 3)."""
        return self.whitened / np.sqrt(self.covariance_factor)[:, None]


def from_niw(error: np.ndarray, log_sigma0: np.ndarray, nu: np.ndarray, kappa: np.ndarray) -> Predictive:
    """Predictive Student-t of a Normal-Inverse-Wishart readout (paper, Eq. "student_t_main").

    Parameters
    ----------
    error : (N, 3)
        Reference minus predicted forces in eV/Å.
    log_sigma0 : (N, 6)
        log(Σ0/(eV²/Å²)) in the order xx, yy, zz, yz, xz, xy.
    nu, kappa : (N,)
    """
    # Imported here: torch takes seconds, and only files with uncertainties need it.
    import torch

    from e2ip_plugins.niw import epistemic_factor, predictive_scale_factor
    from e2ip_plugins.spd import sym6_to_matrix

    def tensor(x):
        return torch.as_tensor(np.asarray(x, dtype=np.float64))

    log_eigenvalues, axes = np.linalg.eigh(sym6_to_matrix(tensor(log_sigma0)).numpy())
    scale = predictive_scale_factor(tensor(nu), tensor(kappa)).numpy()
    epistemic = epistemic_factor(tensor(nu), tensor(kappa)).numpy()
    return Predictive(
        error=np.asarray(error, dtype=np.float64),
        log_scale=log_eigenvalues + np.log(scale)[:, None],
        axes=axes,
        dof=np.asarray(nu, dtype=np.float64) - 2.0,
        epistemic_std=np.sqrt(epistemic * np.exp(log_eigenvalues).mean(-1)),
    )


def negative_log_likelihood(p: Predictive) -> np.ndarray:
    """-log density at the reference, in nats for a density in (eV/Å)⁻³ (N,)."""
    m, M, half_log_det = p.dof, p.mahalanobis, 0.5 * p.log_scale.sum(-1)
    gauss = np.isinf(m)
    m = np.where(gauss, 1.0, m)
    # poch(m/2, 3/2) = Γ((m+3)/2)/Γ(m/2) keeps the digits that a difference of two lgammas loses.
    student = 1.5 * np.log(m * np.pi) - np.log(poch(0.5 * m, 1.5)) + 0.5 * (m + 3.0) * np.log1p(M / m)
    return half_log_det + np.where(gauss, 1.5 * np.log(2.0 * np.pi) + 0.5 * M, student)


def radial_pit(mahalanobis: np.ndarray, dof: np.ndarray) -> np.ndarray:
    """F_{F(3, m)}(M/3): probability content of the ellipsoid on whose surface the reference lies (N,)."""
    # fdtr turns NaN at m = ∞; at 1e15 it equals χ²₃ to rounding.
    return fdtr(3.0, np.minimum(dof, 1e15), mahalanobis / 3.0)


def axis_pit(p: Predictive) -> np.ndarray:
    """Probability content of the central interval out to the reference along each principal axis (N, 3).

    The radial PIT cannot see a covariance that points the wrong way; these can.
    """
    return 1.0 - 2.0 * stdtr(np.minimum(p.dof, 1e15)[:, None], -np.abs(p.whitened))


def observed_coverage(pit: np.ndarray, levels: np.ndarray = CALIBRATION_LEVELS) -> np.ndarray:
    """Share of atoms whose PIT is at most p, for every level p."""
    return np.searchsorted(np.sort(pit), levels, side="right") / len(pit)


def calibration_error(pit: np.ndarray) -> float:
    """Mean |observed - expected| coverage over the levels 0.01 … 0.99."""
    return float(np.abs(observed_coverage(pit) - CALIBRATION_LEVELS).mean())


_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(48)
_THETA = 0.25 * np.pi * (_NODES + 1.0)


def energy_score(p: Predictive, chunk: int = 20_000) -> np.ndarray:
    """E‖X - y‖ - E‖X - X′‖/2 for independent X, X′ of the predictive, in eV/Å (N,). No sampling.

    The first term is C/√(2π) ∫₀^∞ w^(-3/2) [1 - |I + wΛ|^(-1/2) (1 + wQ/m)^(-(m-1)/2)] dw with
    Q = eᵀ(I + wΛ)⁻¹e and C = √(m/2) Γ((m-1)/2)/Γ(m/2). With w = (c tan θ)² the integrand is
    analytic on 0 ≤ θ ≤ π/2, and Gauss-Legendre with 48 nodes has a relative error below 1e-9 for
    condition numbers up to 1e3 and below 1e-6 up to 1e10. The second is Carlson's R_G of Λ's eigenvalues.
    """
    score = np.empty(len(p.dof))
    # In slices, because each holds a dozen arrays of (atoms, nodes).
    for start in range(0, len(score), chunk):
        part = slice(start, start + chunk)
        score[part] = _energy_score(np.exp(p.log_scale[part]), np.square(p.whitened[part]), p.dof[part])
    return score


def _energy_score(eigenvalues: np.ndarray, whitened2: np.ndarray, dof: np.ndarray) -> np.ndarray:
    projected2 = whitened2 * eigenvalues
    gauss = np.isinf(dof)
    m = np.where(gauss, 3.0, dof)

    l1, l2, l3 = eigenvalues.T[:, :, None]
    step = np.sqrt(3.0 / (projected2 + eigenvalues).sum(-1))[:, None]
    w = np.square(step * np.tan(_THETA))
    # log|I + wΛ| from elementary symmetric functions: relative precision survives w → 0.
    log_det = np.log1p(w * ((l1 + l2 + l3) + w * ((l1 * l2 + l1 * l3 + l2 * l3) + w * (l1 * l2 * l3))))
    wq = sum(projected2[:, i, None] * w / (1.0 + w * eigenvalues[:, i, None]) for i in range(3))
    radial = np.where(gauss[:, None], 0.5 * wq, 0.5 * (m - 1.0)[:, None] * np.log1p(wq / m[:, None]))
    integrand = -np.expm1(-0.5 * log_det - radial) / np.square(np.sin(_THETA))
    integral = (integrand / step) @ (0.5 * np.pi * _WEIGHTS)
    to_reference = np.where(gauss, 1.0, np.sqrt(0.5 * m) / poch(0.5 * (m - 1.0), 0.5)) * integral / np.sqrt(2 * np.pi)

    spread = np.where(gauss, np.sqrt(2.0), np.sqrt(0.5 * m) * poch(m - 1.0, 0.5) / poch(0.5 * (m - 1.0), 0.5) ** 2)
    between_draws = 2.0 * np.sqrt(2.0 / np.pi) * elliprg(*eigenvalues.T) * spread
    return to_reference - 0.5 * between_draws


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


def score_atoms(error: np.ndarray, predictive: Optional[Predictive] = None) -> AtomScores:
    """All per-atom scores; without a predictive, errors only."""
    if predictive is None:
        return AtomScores(error=error)
    return AtomScores(
        error=error,
        nll=negative_log_likelihood(predictive),
        pit=radial_pit(predictive.mahalanobis, predictive.dof),
        energy_score=energy_score(predictive),
        epistemic_std=predictive.epistemic_std,
        total_std=predictive.total_std,
        z_scores=predictive.z_scores,
        axis_pit=axis_pit(predictive),
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
