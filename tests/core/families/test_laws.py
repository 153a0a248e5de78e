"""Per-atom scores of force distributions: against SciPy, closed forms, quadrature and Monte Carlo."""

import mpmath
import numpy as np
import pytest
import scoringrules
import torch
from scipy import stats
from scipy.integrate import quad
from scipy.special import erf, gamma, ndtri

from e2ip_plugins.families.e2ip import E2IP
from e2ip_plugins.families.laws import Componentwise, Elliptical, Law
from e2ip_plugins.maths import student


def scale_matrix(p):
    return np.einsum("nij,nj,nkj->nik", p.axes, np.exp(p.log_scale), p.axes)


def gaussian(p):
    return Elliptical(p.log_scale, p.axes)


def test_nll_is_that_of_scipy_and_of_the_loss(draw, law):
    error, *parameters = draw(50)
    p = law(*parameters)
    nll = p.negative_log_likelihood(error)
    scales = scale_matrix(p)
    expected = [
        -stats.multivariate_t(np.zeros(3), s, df=m).logpdf(e) for s, m, e in zip(scales, p.dof, error, strict=True)
    ]
    np.testing.assert_allclose(nll, expected, rtol=1e-10)
    log_sigma0, nu, kappa = map(torch.as_tensor, parameters)
    same = student.negative_log_likelihood(log_sigma0, nu, kappa, torch.as_tensor(error))
    np.testing.assert_allclose(nll, same.numpy(), atol=1e-10)

    normal = [-stats.multivariate_normal(np.zeros(3), s).logpdf(e) for s, e in zip(scales, error, strict=True)]
    np.testing.assert_allclose(gaussian(p).negative_log_likelihood(error), normal, rtol=1e-10)


def test_nll_keeps_its_digits_at_large_evidence(draw, law):
    error, log_sigma0, _, kappa = draw(20)
    for nu in (1e4, 1e6, 1e8):
        p = law(log_sigma0, np.full(20, nu), kappa)
        q = student.negative_log_likelihood(*map(torch.as_tensor, (log_sigma0, p.dof + 2.0, kappa, error)))
        np.testing.assert_allclose(p.negative_log_likelihood(error), q.numpy(), atol=1e-10)


def test_radial_pit_is_that_of_scipy(draw, law):
    error, *parameters = draw(50)
    p = law(*parameters)
    M = np.einsum("ni,nij,nj->n", error, np.linalg.inv(scale_matrix(p)), error)
    np.testing.assert_allclose(p.pit(error), stats.f.cdf(M / 3, 3, p.dof), rtol=1e-9)
    np.testing.assert_allclose(gaussian(p).pit(error), stats.chi2.cdf(M, 3), rtol=1e-9)
    # On the way there SciPy 1.16 and earlier err by 0.03.
    nearly = Elliptical(p.log_scale, p.axes, np.full(50, 1e12))
    np.testing.assert_allclose(nearly.pit(error), stats.chi2.cdf(M, 3), rtol=1e-9)


def test_covariance_and_stds_are_those_of_the_model_keys(draw, law):
    _, log_sigma0, nu, kappa = draw(30)
    p = law(log_sigma0, nu, kappa)
    names = {"e2ip_log_sigma0": log_sigma0, "e2ip_nu": nu, "e2ip_kappa": kappa}
    keys = E2IP.derive({k: torch.as_tensor(v) for k, v in names.items()})
    np.testing.assert_allclose(p.epistemic_std(), keys["forces_epistemic_std"].numpy(), rtol=1e-12)
    np.testing.assert_allclose(p.covariance(), keys["forces_cov"].numpy(), rtol=1e-10, atol=1e-14)
    total = np.sqrt(np.trace(keys["forces_cov"].numpy(), axis1=1, axis2=2) / 3)
    np.testing.assert_allclose(p.total_std(), total, rtol=1e-12)


class TurnedDeviates:
    """A random generator whose normal vectors are those of another one, rotated."""

    def __init__(self, seed, rotation):
        self.rng, self.rotation = np.random.default_rng(seed), rotation

    def standard_normal(self, shape):
        return self.rng.standard_normal(shape) @ self.rotation.T

    def chisquare(self, dof, shape):
        return self.rng.chisquare(dof, shape)


def test_sampling_is_equivariant(draw, law):
    """Rotated parameters and rotated deviates give rotated draws, which a Cholesky factor would not."""
    p = law(*draw(6)[1:])
    rotation = -np.linalg.qr(np.random.default_rng(3).normal(size=(3, 3)))[0]
    turned = Elliptical(p.log_scale, rotation @ p.axes, p.dof)
    plain = p.sample(TurnedDeviates(4, np.eye(3)), 5)
    np.testing.assert_allclose(
        turned.sample(TurnedDeviates(4, rotation), 5), plain @ rotation.T, rtol=1e-12, atol=1e-14
    )
    assert np.abs(plain).min() > 0


def test_samples_follow_the_law(law):
    """Covariance, mean NLL (SciPy's entropy), uniform PIT: of draws from the law itself."""
    matrix = np.array([[-4.0, -6.0, -5.0, 0.6, -0.3, 0.2]])
    p = law(matrix, np.array([12.0]), np.array([0.7]))
    draws = p.sample(np.random.default_rng(2), 200_000)[:, 0]
    many = Elliptical(*(np.repeat(x, len(draws), axis=0) for x in (p.log_scale, p.axes, p.dof)))
    covariance = draws.T @ draws / len(draws)
    assert np.linalg.norm(covariance - p.covariance()[0]) < 0.02 * np.linalg.norm(covariance)
    entropy = stats.multivariate_t.entropy(None, scale_matrix(p)[0], df=10.0)
    assert abs(many.negative_log_likelihood(draws).mean() - entropy) < 0.02
    assert stats.kstest(many.pit(draws), "uniform").pvalue > 1e-3
    normal = gaussian(p).sample(np.random.default_rng(2), 200_000)[:, 0]
    assert np.linalg.norm(normal.T @ normal / len(normal) - gaussian(p).covariance()[0]) < 0.02 * np.linalg.norm(
        covariance
    )


class Sampled(Law):
    """The law of another, of which it lets no closed form through."""

    def __init__(self, inner):
        self.inner = inner

    def negative_log_likelihood(self, error):
        return self.inner.negative_log_likelihood(error)

    def covariance(self):
        return self.inner.covariance()

    def epistemic_std(self):
        return self.inner.epistemic_std()

    def sample(self, rng, count):
        return self.inner.sample(rng, count)


def test_what_is_sampled_agrees_with_what_is_closed(draw, law):
    error, log_sigma0, nu, kappa = draw(60)
    p = law(log_sigma0, nu, kappa)
    q = Sampled(p)
    np.testing.assert_allclose(q.total_std(), p.total_std(), rtol=1e-10)
    np.testing.assert_allclose(np.abs(q.z_scores(error)), np.abs(p.z_scores(error)), rtol=1e-6)
    # 500 draws: a probability has an error of at most 0.022.
    assert np.abs(q.pit(error) - p.pit(error)).max() < 0.1
    assert np.abs(q.axis_pit(error) - p.axis_pit(error)).max() < 0.1
    np.testing.assert_allclose(q.energy_score(error), p.energy_score(error), rtol=0.25)
    assert abs(np.mean(q.energy_score(error) / p.energy_score(error)) - 1) < 0.02


def test_energy_score_of_isotropic_distributions():
    """E‖X - y‖ is elementary for an isotropic Gaussian, and one integral over its variance for a Student-t."""
    sigma, m = 0.3, 4.5

    def to_reference(a, s):  # mean distance of N(0, s²I) from a point at distance a
        b = a / s
        return s * (np.sqrt(2 / np.pi) * np.exp(-0.5 * b**2) + (b + 1 / b) * erf(b / np.sqrt(2)))

    distances = np.array([1e-3, 0.5, 40.0])
    error = np.outer(distances, [0.6, 0.0, -0.8])
    n = len(error)
    p = Elliptical(np.full((n, 3), 2 * np.log(sigma)), np.tile(np.eye(3), (n, 1, 1)), np.full(n, m))
    between_gauss = 4 * sigma / np.sqrt(np.pi)
    expected = [to_reference(a, sigma) - 0.5 * between_gauss for a in distances]
    np.testing.assert_allclose(gaussian(p).energy_score(error), expected, rtol=1e-9)

    chi2 = stats.chi2(m)

    def mixed(a):  # given χ², X is Gaussian with variance σ² m/χ²
        return quad(lambda q: chi2.pdf(q) * to_reference(a, sigma * np.sqrt(m / q)), 0, np.inf, epsabs=0, epsrel=1e-10)

    # X - X′ given both χ² is Gaussian; sqrt(m/χ² + m/χ′²) is a function of their sum and of the share of one.
    inverse_sum = quad(lambda q: stats.chi2(2 * m).pdf(q) / np.sqrt(q), 0, np.inf, epsrel=1e-10)[0]
    share = quad(lambda u: stats.beta.pdf(u, m / 2, m / 2) / np.sqrt(u * (1 - u)), 0, 1, epsrel=1e-10)[0]
    between = sigma * np.sqrt(8 / np.pi) * np.sqrt(m) * inverse_sum * share
    expected = [mixed(a)[0] - 0.5 * between for a in distances]
    np.testing.assert_allclose(p.energy_score(error), expected, rtol=1e-7)


@pytest.mark.parametrize("family", ["student", "gauss"])
def test_energy_score_of_anisotropic_distributions(draw, law, family):
    """48 nodes against adaptive 30-digit quadrature, and against sampling, which shares no formula."""
    error, *parameters = draw(4, seed=3, inflate=2.0)
    p = law(*parameters)
    if family == "gauss":
        p = gaussian(p)
    scores = p.energy_score(error)
    rng = np.random.default_rng(1)
    n = 200_000
    for i, score in enumerate(scores):
        m = p.dof[i]
        root = p.axes[i] * np.exp(0.5 * p.log_scale[i])
        x, y = rng.normal(size=(2, n, 3)) @ root.T
        if family == "student":
            x, y = (v / np.sqrt(rng.chisquare(m, size=n) / m)[:, None] for v in (x, y))
        sample = np.linalg.norm(x - error[i], axis=1) - 0.5 * np.linalg.norm(x - y, axis=1)
        assert abs(score - sample.mean()) < 4.5 * sample.std() / np.sqrt(n)

    lam = [mpmath.mpf(v) for v in np.exp(p.log_scale[0])]
    e2 = [mpmath.mpf(v) for v in np.square(error[0] @ p.axes[0])]
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


@pytest.mark.parametrize("m", [3.0, np.inf])
def test_energy_score_of_ten_million_draws(m):
    """To 1e-6, by ten scrambled Sobol sequences: as many independent draws would have an error of 1e-4.

    χ²₃ as χ²₂, which is -2 ln u, by weights: E₃ f(q) = c E₂ √q f(q), c = Γ(1) 2/(Γ(3/2) 2^(3/2)).
    """
    axes = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0]
    log_scale, error = np.array([-7.0, -6.0, -4.5]), np.array([0.05, -0.08, 0.02])
    score = Elliptical(log_scale[None], axes[None], np.array([m])).energy_score(error[None])[0]
    means = []
    for seed in range(10):
        u = stats.qmc.Sobol(3 if np.isinf(m) else 5, seed=seed).random_base2(20).clip(1e-16)
        x = ndtri(u[:, :3]) @ (axes * np.exp(0.5 * log_scale)).T
        # X - X′ is the Gaussian part of X by a factor that does not depend on it.
        between, weight = np.linalg.norm(x, axis=1).mean() * np.sqrt(2.0), 1.0
        if np.isfinite(m):
            q, r = -2.0 * np.log(u[:, 3:].T)
            c = gamma(1.0) * 2.0 / (gamma(1.5) * 2.0**1.5)
            between *= np.mean(c**2 * np.sqrt(0.5 * m * (q + r)))
            x, weight = x * np.sqrt(m / q)[:, None], c * np.sqrt(q)
        means.append(np.mean(weight * np.linalg.norm(x - error, axis=1)) - 0.5 * between)
    assert score == pytest.approx(np.mean(means), rel=1e-6)
    assert abs(score - np.mean(means)) < 4.0 * stats.sem(means)


@pytest.mark.parametrize("family", ["student", "gauss"])
def test_energy_score_is_that_of_ensembles_of_scoringrules(draw, law, family):
    error, *parameters = draw(8, seed=4, inflate=1.5)
    p = law(*parameters) if family == "student" else gaussian(law(*parameters))
    ensembles = p.sample(np.random.default_rng(0), 300 * 40).reshape(300, 40, 8, 3)
    errors = np.broadcast_to(error, (300, 8, 3))
    found = scoringrules.es_ensemble(errors, ensembles.swapaxes(1, 2), estimator="fair", backend="numpy")
    assert (np.abs(p.energy_score(error) - found.mean(0)) < 4.0 * stats.sem(found)).all()


def test_energy_score_along_a_line_is_the_crps_of_scoringrules():
    """Where the distribution and the error have one dimension only."""
    error, scale, m = np.array([-0.3, 0.0, 0.02, 2.0]), 0.15, 4.5
    log_scale = np.log(scale**2) + np.tile([-18.5, -18.5, 0.0], (4, 1))
    p = Elliptical(log_scale, np.tile(np.eye(3), (4, 1, 1)), np.full(4, m))
    along = error[:, None] * np.eye(3)[2]
    np.testing.assert_allclose(p.energy_score(along), scoringrules.crps_t(error, m, 0.0, scale), rtol=1e-5)
    normal = scoringrules.crps_normal(error, 0.0, scale)
    np.testing.assert_allclose(gaussian(p).energy_score(along), normal, rtol=1e-5)


def componentwise(n):
    rng = np.random.default_rng(5)
    shift, log_scale = 0.05 * rng.normal(size=(n, 3)), -4.0 + rng.normal(size=(n, 3))
    return Componentwise(shift, log_scale, 3.0 + 5.0 * rng.random((n, 3)), np.full((n, 3), 0.5))


def test_sampled_energy_score_is_that_of_scoringrules():
    """The same draws, the same estimator: its approximate kernel representation."""
    p, error = componentwise(12), 0.2 * np.random.default_rng(1).normal(size=(12, 3))
    expected = scoringrules.es_ensemble(error, p._draws.swapaxes(0, 1), estimator="akr", backend="numpy")
    np.testing.assert_allclose(p.energy_score(error), expected, rtol=1e-12)


def test_sampled_energy_score_knows_its_error(draw, law):
    """In units of it, deviations from the quadrature have a variance of 1; quadratures have none."""
    error, *parameters = draw(2000)
    p = law(*parameters)
    q = Sampled(p)
    deviation = (q.energy_score(error) - p.energy_score(error)) / q.energy_score_error(error)
    assert np.mean(deviation**2) == pytest.approx(1.0, abs=0.15)
    assert abs(deviation.mean()) < 4.0 / np.sqrt(2000)
    assert not p.energy_score_error(error).any() and p.energy_score_error(error).shape == (2000,)


def test_condition_number(draw, law):
    p = law(*draw(10)[1:])
    expected = [values[-1] / values[0] for values in np.linalg.eigvalsh(p.covariance())]
    np.testing.assert_allclose(p.condition_number(), expected, rtol=1e-9)
    np.testing.assert_allclose(Sampled(p).condition_number(), expected, rtol=1e-9)
    far = Elliptical(np.array([[-900.0, 0.0, 900.0]]), np.eye(3)[None])
    assert np.isinf(far.condition_number()).all()
    variances = np.diagonal(componentwise(10).covariance(), axis1=1, axis2=2)
    np.testing.assert_allclose(componentwise(10).condition_number(), variances.max(1) / variances.min(1), rtol=1e-9)


def test_energy_score_is_finite_and_smooth_at_its_limits(draw, law):
    """Zero error, huge error, extreme anisotropy, and the Gaussian as the limit m → ∞."""
    error, log_sigma0, nu, kappa = draw(5)
    log_sigma0[0, :3] += [-20.0, 0.0, 15.0]
    error[1] = 0.0
    error[2] = [1e4, 0.0, 0.0]
    p = law(log_sigma0, nu, kappa)
    scores = p.energy_score(error)
    assert np.isfinite(scores).all() and (scores > 0).all()
    assert scores[2] == pytest.approx(1e4, rel=1e-3)
    p = law(log_sigma0, np.full(5, 1e9), kappa)
    np.testing.assert_allclose(p.energy_score(error), gaussian(p).energy_score(error), rtol=1e-7)


def test_energy_score_does_not_depend_on_slices(draw, law):
    error, *parameters = draw(25)
    p = law(*parameters)
    np.testing.assert_allclose(p.energy_score(error), p.energy_score(error, chunk=7), rtol=1e-13)
