"""``eip`` against SciPy's Student-t, and against the integral that its quantile likelihood comes from."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from e2ip_plugins.errors import InputError
from e2ip_plugins.families.eip import QUANTILE

F64 = torch.float64
UNIT = 0.05


def components(outputs):
    """SciPy's distributions of all components, in eV/Å."""
    shift, log_scale2, dof = (outputs[f"eip_{name}"].detach().numpy() for name in ("shift", "log_scale2", "dof"))
    return stats.t(df=dof, loc=shift, scale=np.exp(0.5 * log_scale2))


@pytest.mark.parametrize("likelihood", ["quantile", "nig"])
def test_loss_is_the_likelihood_of_the_law_up_to_a_constant(likelihood, build, example, law_from):
    module = build("eip", likelihood=likelihood, regulariser_weight=0.0)
    _, residual, outputs = example(module)
    loss = module.force_loss(residual, outputs).detach().numpy()
    expected = -components(outputs).logpdf(residual.detach().numpy()).sum(-1)
    np.testing.assert_allclose(loss - loss[0], 2 * UNIT**2 / 3 * (expected - expected[0]), rtol=1e-9, atol=1e-14)
    np.testing.assert_allclose(law_from(module, outputs).negative_log_likelihood(residual.detach().numpy()), expected)
    assert (loss > 0).all()


def test_marginal_of_a_normal_inverse_gamma(build, example):
    """∫ N(e; μ, σ²) N(μ; 0, σ²/ν) IG(σ²; α, β): a Gaussian of variance σ²(1 + 1/ν) over σ²."""
    module = build("eip", likelihood="nig")
    coefficients, residual, outputs = example(module, count=2, unit=1.0)
    nu, alpha, beta = (value.detach().numpy() for value in module.evidence(coefficients))
    found = components(outputs).pdf(residual.detach().numpy())
    for place in np.ndindex(found.shape):
        prior = stats.invgamma(alpha[place], scale=beta[place])

        def density(log_variance, place=place, prior=prior):
            variance = math.exp(log_variance)
            gauss = stats.norm(scale=math.sqrt(variance * (1 + 1 / nu[place])))
            return gauss.pdf(residual.detach().numpy()[place]) * prior.pdf(variance) * variance

        assert integrate.quad(density, -30, 30, limit=200)[0] == pytest.approx(found[place], rel=1e-6)
    variance = beta / (alpha - 1)
    aleatoric, epistemic = (outputs[f"forces_{kind}_cov"].detach().numpy() for kind in ("aleatoric", "epistemic"))
    np.testing.assert_allclose(np.diagonal(aleatoric, axis1=1, axis2=2), variance)
    np.testing.assert_allclose(np.diagonal(epistemic, axis1=1, axis2=2), variance / nu)


def test_quantile_likelihood_is_the_published_formula(build, example):
    module = build("eip", regulariser_weight=0.1)
    coefficients, residual, outputs = example(module)
    nu, alpha, beta = module.evidence(coefficients)
    error, q = residual / UNIT, QUANTILE
    z, omega, tau = beta / (alpha - 1), 2 / (q * (1 - q)), (1 - 2 * q) / (q * (1 - q))
    big = 4 * beta * (1 + omega * nu * z)
    nll = 0.5 * torch.log(math.pi / nu) - alpha * torch.log(big)
    nll = nll + (alpha + 0.5) * torch.log(nu * (error - tau * z) ** 2 + big)
    nll = nll + torch.lgamma(alpha) - torch.lgamma(alpha + 0.5)
    pinball = torch.where(error > 0, q * error, (q - 1) * error)
    expected = (nll + 0.1 * pinball * error.abs() * (2 * nu + alpha + 1 / beta)).sum(-1)
    loss = module.force_loss(residual, outputs) * 1.5 / UNIT**2
    torch.testing.assert_close(loss - loss[0], expected - expected[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("likelihood", ["quantile", "nig"])
def test_law_and_views_agree_with_draws(likelihood, build, example, law_from):
    module = build("eip", likelihood=likelihood)
    coefficients, _, outputs = example(module, count=4)
    coefficients.data[:, 3:6] += 8.0  # moments of draws want many degrees of freedom
    outputs = module(coefficients, torch.tensor(UNIT, dtype=F64))
    law = law_from(module, outputs)
    draws = law.sample(np.random.default_rng(0), 200_000)
    variance = draws.var(0)
    np.testing.assert_allclose(np.diagonal(law.covariance(), axis1=1, axis2=2), variance, rtol=0.03)
    np.testing.assert_allclose(outputs["forces_cov"].detach().numpy(), law.covariance(), rtol=1e-10)
    np.testing.assert_allclose(outputs["forces_epistemic_std"].detach().numpy(), law.epistemic_std(), rtol=1e-10)
    np.testing.assert_allclose(draws.mean(0), outputs["eip_shift"].detach().numpy(), atol=0.01 * variance.max() ** 0.5)
    error = draws[7]
    np.testing.assert_allclose(law.pit(error), np.abs(2 * components(outputs).cdf(error) - 1), atol=1e-12)
    nearer = np.abs(draws - outputs["eip_shift"].detach().numpy()) <= np.abs(
        error - outputs["eip_shift"].detach().numpy()
    )
    np.testing.assert_allclose(law.pit(error), nearer.mean(0), atol=0.005)
    assert (np.diff(law.covariance().diagonal(axis1=1, axis2=2)[0][law._by_size[0]]) >= 0).all()


@pytest.mark.parametrize("likelihood", ["quantile", "nig"])
def test_units_and_views_from_files(likelihood, build, example):
    module = build("eip", likelihood=likelihood)
    coefficients, _, outputs = example(module)
    parameters = {key.name: outputs[key.name] for key in module.parameter_keys}
    for name, value in module.in_units(parameters, 1.0).items():
        torch.testing.assert_close(value, outputs[name])
    other = module(coefficients, torch.tensor(3.0 * UNIT, dtype=F64))
    for name, value in module.in_units(parameters, 3.0).items():
        torch.testing.assert_close(value, other[name])


@pytest.mark.parametrize("likelihood", ["quantile", "nig"])
@pytest.mark.parametrize("size", [30.0, 1e3])
def test_wild_coefficients_give_finite_numbers(likelihood, size, build, example):
    coefficients, _, outputs = example(build("eip", likelihood=likelihood), spread=size)
    assert torch.isfinite(outputs["forces_cov"]).all() and outputs["e2ip_plateau"].any()
    (gradient,) = torch.autograd.grad(torch.log(outputs["forces_uncertainty"]).sum(), coefficients)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("column", [0, 4, 8])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_coefficient_that_is_not_finite_spoils_its_own_atom_only(column, bad, build):
    coefficients = torch.zeros(3, 9, dtype=F64)
    coefficients[1, column] = bad
    covariance = build("eip")(coefficients, torch.tensor(UNIT, dtype=F64))["forces_cov"]
    assert covariance[1].isnan().any() and covariance[[0, 2]].isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"likelihood": "gauss"}, "unknown likelihood 'gauss'"),
        ({"regulariser_weight": -1.0}, "regulariser_weight must be a finite number"),
        ({"evidence": "coupled"}, "evidence is no option of readout 'eip'"),
    ],
)
def test_bad_options(options, message, build):
    with pytest.raises(InputError, match=message):
        build("eip", **options)
