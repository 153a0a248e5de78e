"""The Gaussian families against SciPy's density and PyTorch's matrix exponential."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal

from e2ip_plugins import families
from e2ip_plugins.errors import InputError
from e2ip_plugins.families.interface import TENSOR_DAMPER
from e2ip_plugins.maths.spd import sym6_to_matrix

F64 = torch.float64
UNIT = 0.05
NAMES = ["mve", "mve-spd"]


def nll(residual, outputs):
    pairs = zip(residual.detach().numpy(), outputs["forces_cov"].detach().numpy(), strict=True)
    return np.array([-multivariate_normal(cov=covariance).logpdf(error) for error, covariance in pairs])


@pytest.mark.parametrize("name", NAMES)
def test_loss_is_the_likelihood_up_to_a_constant_and_never_negative(name, build, example):
    module = build(name)
    _, residual, outputs = example(module, spread=3.0)
    loss, expected = module.force_loss(residual, outputs).detach().numpy(), nll(residual, outputs)
    np.testing.assert_allclose(loss - loss[0], 2 * UNIT**2 / 3 * (expected - expected[0]), rtol=1e-9, atol=1e-14)
    lowest = torch.zeros(1, module.num_scalars + 5 * module.num_tensors, dtype=F64)
    lowest[:, : module.num_scalars] = -1e3
    outputs = module(lowest, torch.tensor(UNIT, dtype=F64))
    outputs["e2ip_force_unit"] = torch.full((1,), UNIT, dtype=F64)
    assert abs(module.force_loss(torch.zeros(1, 3, dtype=F64), outputs).item()) < 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_law_is_the_same_gaussian(name, build, example, law_from):
    module = build(name)
    _, residual, outputs = example(module)
    law = law_from(module, outputs)
    np.testing.assert_allclose(law.negative_log_likelihood(residual.detach().numpy()), nll(residual, outputs))
    assert not law.epistemic_std().any() and not outputs["forces_epistemic_std"].any()
    log_covariance = sym6_to_matrix(outputs["gaussian_log_cov"])
    torch.testing.assert_close(outputs["forces_cov"], torch.matrix_exp(log_covariance), rtol=1e-9, atol=1e-14)


def test_mve_has_a_variance_for_every_component(build, example):
    coefficients, _, outputs = example(build("mve"))
    expected = torch.diag_embed(UNIT**2 * coefficients.exp())
    torch.testing.assert_close(outputs["forces_cov"], expected, rtol=1e-10, atol=0)
    assert outputs["e2ip_plateau"].sum() == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [30.0, 1e3, 1e20])
def test_dampers_bound_the_covariance(name, size, build, example):
    module = build(name)
    coefficients, _, outputs = example(module, spread=size)
    variances = torch.linalg.eigvalsh(outputs["forces_cov"])
    assert variances.isfinite().all() and (variances > 0).all()
    assert (variances[:, 2] / variances[:, 0]).max() < math.exp(math.sqrt(2) * TENSOR_DAMPER[1]) * (1 + 1e-9)
    assert outputs["e2ip_plateau"].any()
    (gradient,) = torch.autograd.grad(outputs["forces_cov"].sum(), coefficients)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_coefficient_that_is_not_finite_spoils_its_own_atom_only(name, bad, build):
    module = build(name)
    coefficients = torch.zeros(3, module.num_scalars + 5 * module.num_tensors, dtype=F64)
    coefficients[1, 0] = bad
    covariance = module(coefficients, torch.tensor(UNIT, dtype=F64))["forces_cov"]
    assert covariance[1].isnan().all() and covariance[[0, 2]].isfinite().all()


@pytest.mark.parametrize(("name", "beta"), [("mve", 0.0), ("mve-spd", 0.5), ("mve", 1.0), ("mve-spd", 0.0)])
def test_beta_changes_the_pull_on_the_forces_alone(name, beta, build, example):
    found = []
    for options in ({"beta": 0.0}, {"beta": beta}):
        module = build(name, **options)
        coefficients, residual, outputs = example(module)
        loss = module.force_loss(residual, outputs)
        found.append((loss, *torch.autograd.grad(loss.sum(), [coefficients, residual])))
    (loss, slope, pull), (same_loss, same_slope, changed) = found
    assert torch.equal(loss, same_loss) and torch.equal(slope, same_slope)
    variance = torch.linalg.det(outputs["forces_cov"]).pow(1 / 3) / UNIT**2
    torch.testing.assert_close(changed, variance.detach().pow(beta)[:, None] * pull, rtol=1e-9, atol=0)


def test_what_is_published_is_the_default_and_the_fair_rival_pulls_as_e2ip_does():
    assert families.get("mve").resolve({}) == {"beta": 0.0}
    assert families.get("mve-spd").resolve({}) == {"beta": 0.5}


@pytest.mark.parametrize("beta", [-0.1, 1.5, float("nan"), "much"])
def test_beta_out_of_range(beta, build):
    with pytest.raises(InputError, match="beta must be a number from 0 to 1"):
        build("mve", beta=beta)
