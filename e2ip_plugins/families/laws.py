"""Predicted force distributions of N atoms, and scores of errors under them (NumPy, float64).

Notation: e = y - γ is the reference minus the predicted force of an atom. `law_of` makes a `Law` of the parameters of a
family; everything that judges predictions asks the law and knows no family. Packaged models carry neither this file nor
SciPy, so no family may import `laws`.
"""

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Callable, Dict, Optional, Type, Union

import numpy as np
from scipy.special import chdtr, elliprg, fdtr, poch, stdtr

from e2ip_plugins.families.interface import Family

#: Draws per atom, and their seed, where a law has no closed form for a score.
SAMPLES, SEED = 500, 0


class Law(ABC):
    """Distributions of N force errors. Scores without a closed form are sampled, with a fixed seed."""

    @abstractmethod
    def negative_log_likelihood(self, error: np.ndarray) -> np.ndarray:
        """Return -log density at the errors (N, 3), in nats for a density in (eV/Å)⁻³ (N,)."""

    @abstractmethod
    def covariance(self) -> np.ndarray:
        """Return the covariances in eV²/Å² (N, 3, 3)."""

    @abstractmethod
    def epistemic_std(self) -> np.ndarray:
        """Return sqrt(tr U_epi / 3) in eV/Å (N,)."""

    @abstractmethod
    def sample(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Draw errors in eV/Å (count, N, 3), mean 0 unless the law is shifted."""

    def mean(self) -> np.ndarray:
        """Return the expected error in eV/Å (N, 3)."""
        return np.zeros((len(self.total_std()), 3))

    def total_std(self) -> np.ndarray:
        """Return sqrt(tr covariance / 3) in eV/Å (N,)."""
        return np.sqrt(np.trace(self.covariance(), axis1=-2, axis2=-1) / 3.0)

    def condition_number(self) -> np.ndarray:
        """Return the largest over the smallest eigenvalue of the covariance (N,)."""
        return np.linalg.cond(self.covariance())

    def z_scores(self, error: np.ndarray) -> np.ndarray:
        """Return e along the covariance's principal axes, smallest variance first, by standard deviation (N, 3)."""
        return self._principal(error - self.mean())

    def pit(self, error: np.ndarray) -> np.ndarray:
        """Return the probability of a smaller Mahalanobis distance than the error's; uniform if calibrated (N,).

        Per component (N, 3) where components have distributions of their own.
        """
        distance = np.square(self.z_scores(error)).sum(-1)
        return np.mean(np.square(self._draws_in_frame).sum(-1) <= distance, axis=0)

    def axis_pit(self, error: np.ndarray) -> np.ndarray:
        """Return the content of the central interval out to the error along each principal axis (N, 3).

        The radial PIT cannot see a covariance that points the wrong way; these can.
        """
        return np.mean(np.abs(self._draws_in_frame) <= np.abs(self.z_scores(error)), axis=0)

    def energy_score(self, error: np.ndarray) -> np.ndarray:
        """Return E‖X - e‖ - E‖X - X′‖/2 for independent draws X, X′, in eV/Å (N,)."""
        return self._energy_terms(error).mean(0)

    def energy_score_error(self, error: np.ndarray) -> np.ndarray:
        """Return the standard error of `energy_score` from sampling, in eV/Å (N,); 0 for closed forms and quadratures.

        Every atom has draws of its own: errors of different atoms are independent.
        """
        terms = self._energy_terms(error)
        deviation = terms - terms.mean(0)
        # A draw is in two terms, so that neighbours are correlated, and no others are.
        variance = np.mean(deviation * (deviation + 2.0 * np.roll(deviation, 1, axis=0)), axis=0)
        return np.sqrt(variance.clip(min=0.0) / len(terms))

    def _energy_terms(self, error: np.ndarray) -> np.ndarray:
        """Return the terms (draws, N) whose mean is the energy score; pairs are neighbours in the ring of draws."""
        draws = self._draws
        between = np.linalg.norm(draws - np.roll(draws, 1, axis=0), axis=-1)
        return np.linalg.norm(draws - error, axis=-1) - 0.5 * between

    @cached_property
    def _draws(self) -> np.ndarray:
        return self.sample(np.random.default_rng(SEED), SAMPLES)

    @cached_property
    def _draws_in_frame(self) -> np.ndarray:
        return self._principal(self._draws - self.mean())

    def _principal(self, error: np.ndarray) -> np.ndarray:
        variances, axes = np.linalg.eigh(self.covariance())
        return np.einsum("nij,...ni->...nj", axes, error) / np.sqrt(variances)


class Elliptical(Law):
    """Student-t, or with m = ∞ a Gaussian, with scale matrix Λ.

    Everything starts from the eigenvalues and eigenvectors of Λ, so that no score depends on its conditioning.

    Parameters
    ----------
    log_scale : (N, 3)
        Logarithm of Λ's eigenvalues in eV²/Å², ascending.
    axes : (N, 3, 3)
        Eigenvectors of Λ as columns, in the same order.
    dof : (N,), optional
        m > 2; default: a Gaussian, whose covariance is Λ.
    epistemic_share : (N,), optional
        Epistemic part of the covariance; default 0.

    Examples
    --------
    A Gaussian with a standard deviation of 0.1 eV/Å, and an error of just that along x:

    >>> law = Elliptical(np.full((1, 3), 2 * np.log(0.1)), np.eye(3)[None])
    >>> law.pit(np.array([[0.1, 0.0, 0.0]])), law.total_std()
    (array([0.1987]), array([0.1]))
    """

    def __init__(
        self,
        log_scale: np.ndarray,
        axes: np.ndarray,
        dof: Optional[np.ndarray] = None,
        epistemic_share: Optional[np.ndarray] = None,
    ) -> None:
        self.log_scale, self.axes = log_scale, axes
        n = len(log_scale)
        self.dof = np.full(n, np.inf) if dof is None else dof
        self.epistemic_share = np.zeros(n) if epistemic_share is None else epistemic_share

    @classmethod
    def of_log_matrix(
        cls,
        log_matrix: np.ndarray,
        log_factor: Optional[np.ndarray] = None,
        dof: Optional[np.ndarray] = None,
        epistemic_share: Optional[np.ndarray] = None,
    ) -> "Elliptical":
        """Return the law whose Λ has this logarithm, sym6 (N, 6), times exp(``log_factor``) (N,)."""
        xx, yy, zz, yz, xz, xy = np.asarray(log_matrix, dtype=np.float64).T
        log_scale, axes = np.linalg.eigh(np.stack([xx, xy, xz, xy, yy, yz, xz, yz, zz], -1).reshape(-1, 3, 3))
        if log_factor is not None:
            log_scale = log_scale + log_factor[:, None]
        return cls(log_scale, axes, dof, epistemic_share)

    @cached_property
    def _covariance_factor(self) -> np.ndarray:
        """Return covariance / Λ = m/(m-2) (N,)."""
        return 1.0 / (1.0 - 2.0 / self.dof)

    def whitened(self, error: np.ndarray) -> np.ndarray:
        """Return Λ^(-1/2) e in Λ's eigenframe (N, 3)."""
        return np.einsum("nij,ni->nj", self.axes, error) * np.exp(-0.5 * self.log_scale)

    def covariance(self) -> np.ndarray:
        """See `Law`."""
        scale = np.exp(self.log_scale) * self._covariance_factor[:, None]
        return np.einsum("nij,nj,nkj->nik", self.axes, scale, self.axes)

    def total_std(self) -> np.ndarray:
        """See `Law`."""
        return np.sqrt(self._covariance_factor * np.exp(self.log_scale).mean(-1))

    def epistemic_std(self) -> np.ndarray:
        """See `Law`."""
        return np.sqrt(self.epistemic_share) * self.total_std()

    def condition_number(self) -> np.ndarray:
        """See `Law`; infinite where a floating-point number cannot hold it."""
        with np.errstate(over="ignore"):
            return np.exp(np.ptp(self.log_scale, axis=-1))

    def z_scores(self, error: np.ndarray) -> np.ndarray:
        """See `Law`."""
        return self.whitened(error) / np.sqrt(self._covariance_factor)[:, None]

    def sample(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """See `Law`; by the symmetric square root of Λ, so that rotated parameters and deviates give rotated draws."""
        n = len(self.dof)
        deviates = rng.standard_normal((count, n, 3))
        finite = np.isfinite(self.dof)
        chi2 = rng.chisquare(np.where(finite, self.dof, 1.0), (count, n))
        spread = np.where(finite, np.sqrt(np.where(finite, self.dof, 1.0) / chi2), 1.0)
        root = np.einsum("nij,nj,nkj->nik", self.axes, np.exp(0.5 * self.log_scale), self.axes)
        return spread[..., None] * np.einsum("nij,cnj->cni", root, deviates)

    def negative_log_likelihood(self, error: np.ndarray) -> np.ndarray:
        """See `Law`."""
        m, distance = self.dof, np.square(self.whitened(error)).sum(-1)
        gauss = np.isinf(m)
        m = np.where(gauss, 1.0, m)
        # poch(m/2, 3/2) = Γ((m+3)/2)/Γ(m/2) keeps the digits that a difference of two lgammas loses.
        student = 1.5 * np.log(m * np.pi) - np.log(poch(0.5 * m, 1.5)) + 0.5 * (m + 3.0) * np.log1p(distance / m)
        return 0.5 * self.log_scale.sum(-1) + np.where(gauss, 1.5 * np.log(2.0 * np.pi) + 0.5 * distance, student)

    def pit(self, error: np.ndarray) -> np.ndarray:
        """Return F_{F(3, m)}(M/3): probability content of the ellipsoid on whose surface the error lies (N,)."""
        distance = np.square(self.whitened(error)).sum(-1)
        # fdtr turns NaN at m = ∞, and before SciPy 1.17 it loses digits on the way; from 1e8 on it is χ²₃ to 1e-8.
        finite = fdtr(3.0, np.minimum(self.dof, 1e8), distance / 3.0)
        return np.where(self.dof < 1e8, finite, chdtr(3.0, distance))

    def axis_pit(self, error: np.ndarray) -> np.ndarray:
        """See `Law`."""
        return 1.0 - 2.0 * stdtr(np.minimum(self.dof, 1e15)[:, None], -np.abs(self.whitened(error)))

    def energy_score(self, error: np.ndarray, chunk: int = 20_000) -> np.ndarray:
        """See `Law`; no sampling.

        The first term is C/√(2π) ∫₀^∞ w^(-3/2) [1 - det(I + wΛ)^(-1/2) (1 + wQ/m)^(-(m-1)/2)] dw with
        Q = eᵀ(I + wΛ)⁻¹e and C = √(m/2) Γ((m-1)/2)/Γ(m/2). With w = (c tan θ)² the integrand is
        analytic on 0 ≤ θ ≤ π/2, and Gauss-Legendre with 48 nodes has a relative error below 1e-9 for
        condition numbers up to 1e3 and below 1e-6 up to 1e10. The second is Carlson's R_G of Λ's eigenvalues.
        """
        score, whitened2 = np.empty(len(self.dof)), np.square(self.whitened(error))
        # In slices, because each holds a dozen arrays of (atoms, nodes).
        for start in range(0, len(score), chunk):
            part = slice(start, start + chunk)
            score[part] = _energy_score(np.exp(self.log_scale[part]), whitened2[part], self.dof[part])
        return score

    def energy_score_error(self, error: np.ndarray) -> np.ndarray:
        """See `Law`; zeros."""
        return np.zeros(len(self.dof))


_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(48)
_THETA = 0.25 * np.pi * (_NODES + 1.0)


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
    to_error = np.where(gauss, 1.0, np.sqrt(0.5 * m) / poch(0.5 * (m - 1.0), 0.5)) * integral / np.sqrt(2 * np.pi)

    spread = np.where(gauss, np.sqrt(2.0), np.sqrt(0.5 * m) * poch(m - 1.0, 0.5) / poch(0.5 * (m - 1.0), 0.5) ** 2)
    between_draws = 2.0 * np.sqrt(2.0 / np.pi) * elliprg(*eigenvalues.T) * spread
    return to_error - 0.5 * between_draws


class Componentwise(Law):
    """Independent Student-t distributions along x, y and z, of one location and scale each.

    Its PIT is per component (N, 3): there is no ellipsoid to be in.

    Parameters
    ----------
    shift : (N, 3)
        Location in eV/Å, relative to the forces that errors are counted from.
    log_scale : (N, 3)
        Logarithm of the squared scale in eV²/Å².
    dof : (N, 3)
        Degrees of freedom > 2.
    epistemic_share : (N, 3)
        Epistemic part of every variance.
    """

    def __init__(self, shift: np.ndarray, log_scale: np.ndarray, dof: np.ndarray, epistemic_share: np.ndarray) -> None:
        self.shift, self.log_scale, self.dof, self.epistemic_share = shift, log_scale, dof, epistemic_share

    @cached_property
    def _variance(self) -> np.ndarray:
        return np.exp(self.log_scale) * self.dof / (self.dof - 2.0)

    def mean(self) -> np.ndarray:
        """See `Law`."""
        return self.shift

    @cached_property
    def _by_size(self) -> np.ndarray:
        return np.argsort(self._variance, axis=-1)

    def _relative(self, error: np.ndarray) -> np.ndarray:
        """Return (e - shift) / scale (N, 3)."""
        return (error - self.shift) * np.exp(-0.5 * self.log_scale)

    def negative_log_likelihood(self, error: np.ndarray) -> np.ndarray:
        """See `Law`."""
        m = self.dof
        # As in `Elliptical`, in one dimension.
        norm = 0.5 * np.log(m * np.pi) - np.log(poch(0.5 * m, 0.5)) + 0.5 * self.log_scale
        return (norm + 0.5 * (m + 1.0) * np.log1p(np.square(self._relative(error)) / m)).sum(-1)

    def covariance(self) -> np.ndarray:
        """See `Law`."""
        return self._variance[:, :, None] * np.eye(3)

    def epistemic_std(self) -> np.ndarray:
        """See `Law`."""
        return np.sqrt((self.epistemic_share * self._variance).mean(-1))

    def z_scores(self, error: np.ndarray) -> np.ndarray:
        """See `Law`."""
        return np.take_along_axis((error - self.shift) / np.sqrt(self._variance), self._by_size, -1)

    def pit(self, error: np.ndarray) -> np.ndarray:
        """Return the content of the central interval out to the error along x, y and z (N, 3)."""
        return 1.0 - 2.0 * stdtr(self.dof, -np.abs(self._relative(error)))

    def axis_pit(self, error: np.ndarray) -> np.ndarray:
        """See `Law`; exact."""
        return np.take_along_axis(self.pit(error), self._by_size, -1)

    def sample(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """See `Law`."""
        deviates = rng.standard_t(self.dof, size=(count, *self.dof.shape))
        return self.shift + np.exp(0.5 * self.log_scale) * deviates


#: Laws by `Family.law_name`; they take what `Family.law_arguments` gives.
_LAWS: Dict[str, Callable[..., Law]] = {"elliptical": Elliptical.of_log_matrix, "componentwise": Componentwise}


def law_of(family: Union[Family, Type[Family]], parameters: Dict[str, np.ndarray]) -> Law:
    """Return the distributions that a family means by its NumPy parameters (N, …)."""
    return _LAWS[family.law_name](**family.law_arguments(parameters))
