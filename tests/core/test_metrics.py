"""Scores of force distributions: against SciPy, closed forms and Monte Carlo; calibration must show."""

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats
from scipy.integrate import quad
from scipy.special import erf

from e2ip_plugins import metrics, niw


def draw(n, seed=0, inflate=1.0, nu=None, spread=0.8):
    """n atoms whose references are drawn from the predictive itself, errors inflated by a factor."""
    rng = np.random.default_rng(seed)
    axes = np.linalg.qr(rng.normal(size=(n, 3, 3)))[0]
    log_eigenvalues = -6.0 + rng.normal(size=(n, 1)) + spread * rng.normal(size=(n, 3))
    nu = 5.5 + 10.0 * rng.random(n) if nu is None else np.full(n, nu)
    kappa = np.exp(rng.normal(size=n))
    scale = np.exp(log_eigenvalues) * (nu * (kappa + 1) / (kappa * (nu - 2)))[:, None]
    t = rng.normal(size=(n, 3)) / np.sqrt(rng.chisquare(nu - 2) / (nu - 2))[:, None]
    error = inflate * np.einsum("nij,nj->ni", axes, np.sqrt(scale) * t)
    L = np.einsum("nij,nj,nkj->nik", axes, log_eigenvalues, axes)
    log_sigma0 = np.stack([L[:, 0, 0], L[:, 1, 1], L[:, 2, 2], L[:, 1, 2], L[:, 0, 2], L[:, 0, 1]], axis=-1)
    return error, log_sigma0, nu, kappa


def scale_matrix(p):
    return np.einsum("nij,nj,nkj->nik", p.axes, np.exp(p.log_scale), p.axes)


def gaussian(p):
    return metrics.Predictive(p.error, p.log_scale, p.axes, np.full(len(p.dof), np.inf), p.epistemic_std)


def test_nll_is_that_of_scipy_and_of_the_loss():
    arguments = draw(50)
    p = metrics.from_niw(*arguments)
    nll = metrics.negative_log_likelihood(p)
    scales = scale_matrix(p)
    expected = [
        -stats.multivariate_t(np.zeros(3), s, df=m).logpdf(e) for s, m, e in zip(scales, p.dof, p.error, strict=True)
    ]
    np.testing.assert_allclose(nll, expected, rtol=1e-10)
    error, log_sigma0, nu, kappa = (torch.as_tensor(a) for a in arguments)
    np.testing.assert_allclose(nll, niw.negative_log_likelihood(log_sigma0, nu, kappa, error).numpy(), atol=1e-10)

    normal = [-stats.multivariate_normal(np.zeros(3), s).logpdf(e) for s, e in zip(scales, p.error, strict=True)]
    np.testing.assert_allclose(metrics.negative_log_likelihood(gaussian(p)), normal, rtol=1e-10)


def test_nll_keeps_its_digits_at_large_evidence():
    error, log_sigma0, _, kappa = draw(20)
    for nu in (1e4, 1e6, 1e8):
        p = metrics.from_niw(error, log_sigma0, np.full(20, nu), kappa)
        q = niw.negative_log_likelihood(*map(torch.as_tensor, (log_sigma0, p.dof + 2.0, kappa, error)))
        np.testing.assert_allclose(metrics.negative_log_likelihood(p), q.numpy(), atol=1e-10)


def test_radial_pit_is_that_of_scipy():
    p = metrics.from_niw(*draw(50))
    M = np.einsum("ni,nij,nj->n", p.error, np.linalg.inv(scale_matrix(p)), p.error)
    np.testing.assert_allclose(p.mahalanobis, M, rtol=1e-9)
    np.testing.assert_allclose(metrics.radial_pit(M, p.dof), stats.f.cdf(M / 3, 3, p.dof), rtol=1e-12)
    infinite = np.full(50, np.inf)
    np.testing.assert_allclose(metrics.radial_pit(M, infinite), stats.chi2.cdf(M, 3), rtol=1e-12)


def test_total_std_and_epistemic_std_are_those_of_the_model_keys():
    from e2ip_plugins.families import derive_niw

    error, log_sigma0, nu, kappa = draw(30)
    p = metrics.from_niw(error, log_sigma0, nu, kappa)
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
    p = metrics.Predictive(
        error, np.full((n, 3), 2 * np.log(sigma)), np.tile(np.eye(3), (n, 1, 1)), np.full(n, m), np.ones(n)
    )
    between_gauss = 4 * sigma / np.sqrt(np.pi)
    expected = [to_reference(a, sigma) - 0.5 * between_gauss for a in distances]
    np.testing.assert_allclose(metrics.energy_score(gaussian(p)), expected, rtol=1e-9)

    chi2 = stats.chi2(m)

    def mixed(a):  # given χ², X is Gaussian with variance σ² m/χ²
        return quad(lambda q: chi2.pdf(q) * to_reference(a, sigma * np.sqrt(m / q)), 0, np.inf, epsabs=0, epsrel=1e-10)

    # X - X′ given both χ² is Gaussian; its mean length needs E sqrt(1/χ² + 1/χ′²).
    def spread(q):
        inner = quad(lambda r: chi2.pdf(r) * np.sqrt(m / q + m / r), 0, np.inf, epsrel=1e-9)[0]
        return chi2.pdf(q) * inner

    between = sigma * np.sqrt(8 / np.pi) * quad(spread, 0, np.inf, epsrel=1e-9)[0]
    expected = [mixed(a)[0] - 0.5 * between for a in distances]
    np.testing.assert_allclose(metrics.energy_score(p), expected, rtol=1e-7)


@pytest.mark.parametrize("family", ["student", "gauss"])
def test_energy_score_of_anisotropic_distributions(family):
    """48 nodes against adaptive 30-digit quadrature, and against sampling, which shares no formula."""
    p = metrics.from_niw(*draw(4, seed=3, inflate=2.0))
    if family == "gauss":
        p = gaussian(p)
    scores = metrics.energy_score(p)
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


def test_energy_score_is_finite_and_smooth_at_its_limits():
    """Zero error, huge error, extreme anisotropy, and the Gaussian as the limit m → ∞."""
    error, log_sigma0, nu, kappa = draw(5)
    log_sigma0[0, :3] += [-20.0, 0.0, 15.0]
    error[1] = 0.0
    error[2] = [1e4, 0.0, 0.0]
    p = metrics.from_niw(error, log_sigma0, nu, kappa)
    scores = metrics.energy_score(p)
    assert np.isfinite(scores).all() and (scores > 0).all()
    assert scores[2] == pytest.approx(1e4, rel=1e-3)
    p = metrics.from_niw(error, log_sigma0, np.full(5, 1e9), kappa)
    np.testing.assert_allclose(metrics.energy_score(p), metrics.energy_score(gaussian(p)), rtol=1e-7)


def test_energy_score_does_not_depend_on_slices():
    p = metrics.from_niw(*draw(25))
    np.testing.assert_allclose(metrics.energy_score(p), metrics.energy_score(p, chunk=7), rtol=1e-13)


def test_rotations_change_nothing():
    error, log_sigma0, nu, kappa = draw(40)
    rotation = np.linalg.qr(np.random.default_rng(5).normal(size=(3, 3)))[0]
    xx, yy, zz, yz, xz, xy = log_sigma0.T
    L = np.array([[xx, xy, xz], [xy, yy, yz], [xz, yz, zz]]).transpose(2, 0, 1)
    L = rotation @ L @ rotation.T
    turned = np.stack([L[:, 0, 0], L[:, 1, 1], L[:, 2, 2], L[:, 1, 2], L[:, 0, 2], L[:, 0, 1]], axis=-1)
    a = metrics.score_atoms(error, metrics.from_niw(error, log_sigma0, nu, kappa))
    b = metrics.score_atoms(error @ rotation.T, metrics.from_niw(error @ rotation.T, turned, nu, kappa))
    for name in ("nll", "pit", "energy_score", "epistemic_std", "total_std", "axis_pit"):
        np.testing.assert_allclose(getattr(a, name), getattr(b, name), rtol=1e-7, atol=1e-12)


def test_a_calibrated_model_is_seen_as_calibrated():
    n = 40_000
    error, log_sigma0, nu, kappa = draw(n)
    summary = metrics.summarise(metrics.score_atoms(error, metrics.from_niw(error, log_sigma0, nu, kappa)))
    assert summary["calibration_error"] < 0.006
    for p in metrics.COVERAGE_LEVELS:
        assert summary[f"coverage{round(100 * p)}"] == pytest.approx(p, abs=4.5 * np.sqrt(p * (1 - p) / n))
    for axis in ("minor", "middle", "major"):
        assert summary[f"axis_coverage95_{axis}"] == pytest.approx(0.95, abs=4.5 * np.sqrt(0.95 * 0.05 / n))
    assert summary["spearman_total"] > 0.6 and summary["auroc_total"] > 0.8


@pytest.mark.parametrize("inflate, confident", [(1.6, True), (0.6, False)])
def test_a_wrong_size_shows(inflate, confident):
    error, log_sigma0, nu, kappa = draw(20_000, inflate=inflate)
    summary = metrics.summarise(metrics.score_atoms(error, metrics.from_niw(error, log_sigma0, nu, kappa)))
    assert summary["calibration_error"] > 0.1
    assert (summary["coverage95"] < 0.9) == confident
    # Both scores are proper: the right size beats the wrong one.
    right = log_sigma0 + 2 * np.log(inflate) * np.array([1, 1, 1, 0, 0, 0])
    best = metrics.summarise(metrics.score_atoms(error, metrics.from_niw(error, right, nu, kappa)))
    assert summary["nll"] > best["nll"] and summary["energy_score"] > best["energy_score"]


def test_a_wrong_direction_shows_along_the_axes():
    """Major and minor axis exchanged: size and determinant are right, the direction is not."""
    error, log_sigma0, nu, kappa = draw(20_000, nu=40.0)
    p = metrics.from_niw(error, log_sigma0, nu, kappa)
    wrong = metrics.Predictive(p.error, p.log_scale, p.axes[:, :, ::-1], p.dof, p.epistemic_std)
    right_summary = metrics.summarise(metrics.score_atoms(error, p))
    summary = metrics.summarise(metrics.score_atoms(error, wrong))
    for axis in ("minor", "middle", "major"):
        assert right_summary[f"z_rms_{axis}"] == pytest.approx(1.0, abs=0.03)
    assert summary["z_rms_minor"] > 1.5 and summary["z_rms_major"] < 0.8


def test_calibration_error_by_hand():
    """All PITs 0: everything is always inside, |1 - p| averages to 0.5. Half 0, half 1: |0.5 - p|."""
    assert metrics.calibration_error(np.zeros(10)) == pytest.approx(0.5)
    half = np.repeat([0.0, 1.0], 5)
    assert metrics.calibration_error(half) == pytest.approx(np.abs(0.5 - metrics.CALIBRATION_LEVELS).mean())
    assert len(metrics.CALIBRATION_LEVELS) == 99


def test_spearman_is_that_of_scipy():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 9, 50).astype(float), rng.normal(size=50)
    assert metrics.spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic, rel=1e-12)
    assert np.isnan(metrics.spearman(np.ones(5), b[:5])) and np.isnan(metrics.spearman(a[:1], b[:1]))


def test_auroc_by_hand():
    error = np.arange(10.0)  # the largest one is the worst 10 %
    assert metrics.auroc_worst(error, error) == 1.0
    assert metrics.auroc_worst(-error, error) == 0.0
    assert metrics.auroc_worst(np.ones(10), error) == 0.5
    shuffled = np.array([9.0, 1, 2, 3, 4, 5, 6, 7, 8, 7.5])  # above 7 of the 9 others
    assert metrics.auroc_worst(shuffled, error) == pytest.approx(7 / 9)
    assert np.isnan(metrics.auroc_worst(np.ones(10), np.ones(10)))


def test_ause_by_hand():
    """Errors 4 3 2 1 (mean 2.5). Dropped in order: means 2.5, 2, 1.5, 1; in reverse order: 2.5, 3, 3.5, 4."""
    error = np.array([4.0, 3.0, 2.0, 1.0])
    assert metrics.ause(error, error) == 0.0
    assert metrics.ause(-error, error) == pytest.approx((0 + 1 + 2 + 3) / 4 / 2.5)
    np.testing.assert_allclose(metrics.sparsification(error, error) * 2.5, [2.5, 2.0, 1.5, 1.0])


def test_without_distribution_nothing_is_invented():
    error = np.array([[3.0, 0.0, 0.0], [0.0, -1.0, 2.0]])
    summary = metrics.summarise(metrics.score_atoms(error))
    assert summary["force_mae"] == pytest.approx(1.0) and summary["force_rmse"] == pytest.approx(np.sqrt(14 / 6))
    assert {k for k, v in summary.items() if v is not None} == {"atoms", "force_mae", "force_rmse"}
    full = metrics.summarise(metrics.score_atoms(error, metrics.from_niw(error, *[a[:2] for a in draw(2)[1:]])))
    assert set(full) == set(summary)
