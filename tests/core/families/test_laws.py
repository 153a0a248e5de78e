"""Per-atom scores of force distributions: against SciPy, closed forms, quadrature and Monte Carlo."""

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats
from scipy.integrate import quad
from scipy.special import erf

from e2ip_plugins.families import laws as predictive
from e2ip_plugins.maths import student as niw


def scale_matrix(p):
    return np.einsum("nij,nj,nkj->nik", p.axes, np.exp(p.log_scale), p.axes)


def gaussian(p):
    return predictive.Predictive(p.error, p.log_scale, p.axes, np.full(len(p.dof), np.inf), p.epistemic_std)


def test_nll_is_that_of_scipy_and_of_the_loss(draw):
    arguments = draw(50)
    p = predictive.from_niw(*arguments)
    nll = predictive.negative_log_likelihood(p)
    scales = scale_matrix(p)
    expected = [
        -stats.multivariate_t(np.zeros(3), s, df=m).logpdf(e) for s, m, e in zip(scales, p.dof, p.error, strict=True)
    ]
    np.testing.assert_allclose(nll, expected, rtol=1e-10)
    error, log_sigma0, nu, kappa = (torch.as_tensor(a) for a in arguments)
    np.testing.assert_allclose(nll, niw.negative_log_likelihood(log_sigma0, nu, kappa, error).numpy(), atol=1e-10)

    normal = [-stats.multivariate_normal(np.zeros(3), s).logpdf(e) for s, e in zip(scales, p.error, strict=True)]
    np.testing.assert_allclose(predictive.negative_log_likelihood(gaussian(p)), normal, rtol=1e-10)


def test_nll_keeps_its_digits_at_large_evidence(draw):
    error, log_sigma0, _, kappa = draw(20)
    for nu in (1e4, 1e6, 1e8):
        p = predictive.from_niw(error, log_sigma0, np.full(20, nu), kappa)
        q = niw.negative_log_likelihood(*map(torch.as_tensor, (log_sigma0, p.dof + 2.0, kappa, error)))
        np.testing.assert_allclose(predictive.negative_log_likelihood(p), q.numpy(), atol=1e-10)


def test_radial_pit_is_that_of_scipy(draw):
    p = predictive.from_niw(*draw(50))
    M = np.einsum("ni,nij,nj->n", p.error, np.linalg.inv(scale_matrix(p)), p.error)
    np.testing.assert_allclose(p.mahalanobis, M, rtol=1e-9)
    np.testing.assert_allclose(predictive.radial_pit(M, p.dof), stats.f.cdf(M / 3, 3, p.dof), rtol=1e-12)
    infinite = np.full(50, np.inf)
    np.testing.assert_allclose(predictive.radial_pit(M, infinite), stats.chi2.cdf(M, 3), rtol=1e-12)


def test_total_std_and_epistemic_std_are_those_of_the_model_keys(draw):
    from e2ip_plugins.families.e2ip import derive_niw

    error, log_sigma0, nu, kappa = draw(30)
    p = predictive.from_niw(error, log_sigma0, nu, kappa)
    names = {"e2ip_log_sigma0": log_sigma0, "e2ip_nu": nu, "e2ip_kappa": kappa}
    keys = derive_niw({k: torch.as_tensor(v) for k, v in names.items()})
    np.testing.assert_allclose(p.epistemic_std, keys["forces_epistemic_std"].numpy(), rtol=1e-12)
    total = np.sqrt(np.trace(keys["forces_cov"].numpy(), axis1=1, axis2=2) / 3)
    np.testing.assert_allclose(p.total_std, total, rtol=1e-12)


def test_energy_score_of_isotropic_distributions():
    """E‖X - y‖ is elementary for an isotropic Gaussian, and one integral over its variance for a Student-t."""
    sigma, m = 0.3, 4.5

    def to_reference(a, s):  # mean distance of N(0, s²I) from a point at distance a
        b = a / s
        return s * (np.sqrt(2 / np.pi) * np.exp(-0.5 * b**2) + (b + 1 / b) * erf(b / np.sqrt(2)))

    distances = np.array([1e-3, 0.5, 40.0])
    error = np.outer(distances, [0.6, 0.0, -0.8])
    n = len(error)
    p = predictive.Predictive(
        error, np.full((n, 3), 2 * np.log(sigma)), np.tile(np.eye(3), (n, 1, 1)), np.full(n, m), np.ones(n)
    )
    between_gauss = 4 * sigma / np.sqrt(np.pi)
    expected = [to_reference(a, sigma) - 0.5 * between_gauss for a in distances]
    np.testing.assert_allclose(predictive.energy_score(gaussian(p)), expected, rtol=1e-9)

    chi2 = stats.chi2(m)

    def mixed(a):  # given χ², X is Gaussian with variance σ² m/χ²
        return quad(lambda q: chi2.pdf(q) * to_reference(a, sigma * np.sqrt(m / q)), 0, np.inf, epsabs=0, epsrel=1e-10)

    # X - X′ given both χ² is Gaussian; sqrt(m/χ² + m/χ′²) is a function of their sum and of the share of one.
    inverse_sum = quad(lambda q: stats.chi2(2 * m).pdf(q) / np.sqrt(q), 0, np.inf, epsrel=1e-10)[0]
    share = quad(lambda u: stats.beta.pdf(u, m / 2, m / 2) / np.sqrt(u * (1 - u)), 0, 1, epsrel=1e-10)[0]
    between = sigma * np.sqrt(8 / np.pi) * np.sqrt(m) * inverse_sum * share
    expected = [mixed(a)[0] - 0.5 * between for a in distances]
    np.testing.assert_allclose(predictive.energy_score(p), expected, rtol=1e-7)


@pytest.mark.parametrize("family", ["student", "gauss"])
def test_energy_score_of_anisotropic_distributions(draw, family):
    """48 nodes against adaptive 30-digit quadrature, and against sampling, which shares no formula."""
    p = predictive.from_niw(*draw(4, seed=3, inflate=2.0))
    if family == "gauss":
        p = gaussian(p)
    scores = predictive.energy_score(p)
    rng = np.random.default_rng(1)
    n = 200_000
    for i, score in enumerate(scores):
        m = p.dof[i]
        root = p.axes[i] * np.exp(0.5 * p.log_scale[i])
        x, y = rng.normal(size=(2, n, 3)) @ root.T
        if family == "student":
            x, y = (v / np.sqrt(rng.chisquare(m, size=n) / m)[:, None] for v in (x, y))
        sample = np.linalg.norm(x - p.error[i], axis=1) - 0.5 * np.linalg.norm(x - y, axis=1)
        assert abs(score - sample.mean()) < 4.5 * sample.std() / np.sqrt(n)

    lam = [mpmath.mpf(v) for v in np.exp(p.log_scale[0])]
    e2 = [mpmath.mpf(v) for v in np.square(p.error[0] @ p.axes[0])]
    m = mpmath.mpf(p.dof[0])

    def integrand(log_w):
        w = mpmath.exp(log_w)
        det = mpmath.fprod(1 + w * v for v in lam)
        wq = mpmath.fsum(a * w / (1 + w * v) for a, v in zip(e2, lam, strict=True))
        radial = mpmath.exp(-wq / 2) if mpmath.isinf(m) else (1 + wq / m) ** (-(m - 1) / 2)
        return mpmath.exp(-log_w / 2) * (1 - radial / mpmath.sqrt(det))

    with mpmath.workdps(30):
        integral = mpmath.quad(integrand, [-90, -40, *range(-20, 21, 4), 40, 90]) / mpmath.sqrt(2 * mpmath.pi)
        constant, spread = mpmath.mpf(1), mpmath.sqrt(2)
        if not mpmath.isinf(m):
            constant = mpmath.sqrt(m / 2) * mpmath.gamma((m - 1) / 2) / mpmath.gamma(m / 2)
            beta = mpmath.beta((m - 1) / 2, (m - 1) / 2) / mpmath.beta(m / 2, m / 2)
            spread = mpmath.sqrt(m / 2) * mpmath.gamma(m - 0.5) / mpmath.gamma(m) * beta
        expected = constant * integral - mpmath.sqrt(2 / mpmath.pi) * mpmath.elliprg(*lam) * spread
    assert scores[0] == pytest.approx(float(expected), rel=1e-8)


def test_energy_score_is_finite_and_smooth_at_its_limits(draw):
    """Zero error, huge error, extreme anisotropy, and the Gaussian as the limit m → ∞."""
    error, log_sigma0, nu, kappa = draw(5)
    log_sigma0[0, :3] += [-20.0, 0.0, 15.0]
    error[1] = 0.0
    error[2] = [1e4, 0.0, 0.0]
    p = predictive.from_niw(error, log_sigma0, nu, kappa)
    scores = predictive.energy_score(p)
    assert np.isfinite(scores).all() and (scores > 0).all()
    assert scores[2] == pytest.approx(1e4, rel=1e-3)
    p = predictive.from_niw(error, log_sigma0, np.full(5, 1e9), kappa)
    np.testing.assert_allclose(predictive.energy_score(p), predictive.energy_score(gaussian(p)), rtol=1e-7)


def test_energy_score_does_not_depend_on_slices(draw):
    p = predictive.from_niw(*draw(25))
    np.testing.assert_allclose(predictive.energy_score(p), predictive.energy_score(p, chunk=7), rtol=1e-13)
