"""The shallow ensemble against NumPy's covariance of members, PyTorch's Gaussian likelihood and SciPy's density."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal

from e2ip_plugins import families
from e2ip_plugins.errors import InputError
from e2ip_plugins.families.shallow import ENERGY_UNIT, FLOOR, SHRINKAGE
from e2ip_plugins.readout.settings import Settings

F64 = torch.float64
UNIT = 0.05


@pytest.mark.parametrize("members", [2, 3, 5, 16])
def test_covariance_is_that_of_members_about_their_mean(members, build, example):
    module = build("shallow", members=members)
    coefficients, _, outputs = example(module)
    # Orthonormal rows, each of sum 0: members' deviations from their mean.
    basis = np.linalg.qr(np.column_stack([np.ones(members), np.eye(members)[:, 1:]]))[0][:, 1:].T
    deviations = coefficients.detach().numpy().reshape(-1, members - 1, 3) * ENERGY_UNIT * UNIT
    forces = np.einsum("nkc,km->nmc", deviations, basis)
    np.testing.assert_allclose(forces.sum(1), 0.0, atol=1e-12)
    sample = np.stack([np.cov(atom.T, ddof=1) for atom in forces])
    mean = np.trace(sample, axis1=1, axis2=2)[:, None, None] / 3 * np.eye(3)
    expected = (1 - SHRINKAGE) * sample + SHRINKAGE * mean + FLOOR * UNIT**2 * np.eye(3)
    np.testing.assert_allclose(outputs["forces_cov"].detach().numpy(), expected, rtol=1e-12, atol=1e-16)
    np.testing.assert_allclose(outputs["forces_epistemic_cov"].detach().numpy(), expected, rtol=1e-12, atol=1e-16)
    assert not outputs["forces_aleatoric_cov"].any() and (outputs["ensemble_epistemic_share"] == 1).all()


@pytest.mark.parametrize("members", [2, 5])
def test_full_likelihood_is_that_of_the_law(members, build, example, law_from):
    module = build("shallow", members=members)
    _, residual, outputs = example(module)
    law = law_from(module, outputs)
    expected = 2 * UNIT**2 / 3 * law.negative_log_likelihood(residual.detach().numpy())
    loss = module.force_loss(residual, outputs).detach().numpy()
    np.testing.assert_allclose(loss - loss[0], expected - expected[0], rtol=1e-8, atol=1e-12)
    _, _, outputs = example(module, spread=0.0)
    assert (module.force_loss(torch.zeros(30, 3, dtype=F64), outputs).abs() < 1e-15).all()


def test_loss_of_components_is_their_likelihood_up_to_a_constant_and_never_negative(build, example):
    module = build("shallow", likelihood="components")
    _, residual, outputs = example(module)
    loss = module.force_loss(residual, outputs)
    variance = outputs["forces_cov"].diagonal(dim1=1, dim2=2)
    nll = torch.nn.GaussianNLLLoss(full=True, eps=1e-12, reduction="none")(residual, torch.zeros(30, 3), variance)
    expected = 2 * UNIT**2 / 3 * nll.sum(1)
    torch.testing.assert_close(loss - loss[0], expected - expected[0], rtol=1e-10, atol=1e-14)
    _, _, outputs = example(module, spread=0.0)
    assert (module.force_loss(torch.zeros(30, 3, dtype=F64), outputs).abs() < 1e-15).all()


@pytest.mark.parametrize("members", [2, 5])
def test_law_is_the_gaussian_with_that_covariance(members, build, example, law_from):
    module = build("shallow", members=members)
    _, residual, outputs = example(module)
    law = law_from(module, outputs)
    error, covariances = residual.detach().numpy(), outputs["forces_cov"].detach().numpy()
    expected = [-multivariate_normal(cov=c).logpdf(e) for e, c in zip(error, covariances, strict=True)]
    np.testing.assert_allclose(law.negative_log_likelihood(error), expected, rtol=1e-8)
    np.testing.assert_allclose(law.epistemic_std(), law.total_std())


@pytest.mark.parametrize("members", [2, 3, 5])
@pytest.mark.parametrize("spread", [0.0, 1e-6, 1e6])
def test_covariance_is_well_conditioned_however_few_members_there_are(members, spread, build, example):
    coefficients, _, outputs = example(build("shallow", members=members), spread=spread)
    values = torch.linalg.eigvalsh(outputs["forces_cov"])
    assert (values[:, 0] > 0).all() and (values[:, 2] / values[:, 0]).max() < 1e3
    assert (outputs["e2ip_plateau"] == float(spread < 1)).all()
    views = sum(value.sum() for value in outputs.values())
    for gradient in torch.autograd.grad(views, coefficients):
        assert gradient.isfinite().all()


@pytest.mark.parametrize(("beta", "likelihood"), [(0.5, "components"), (1.0, "full")])
def test_beta_changes_the_pull_on_the_forces_alone(beta, likelihood, build, example):
    found = []
    for options in ({"likelihood": likelihood, "beta": 0.0}, {"beta": beta, "likelihood": likelihood}):
        coefficients, residual, outputs = example(build("shallow", **options))
        loss = build("shallow", **options).force_loss(residual, outputs)
        found.append((loss, *torch.autograd.grad(loss.sum(), [coefficients, residual])))
    (loss, slope, pull), (same_loss, same_slope, changed) = found
    assert torch.equal(loss, same_loss) and torch.equal(slope, same_slope)
    covariance = outputs["forces_cov"].detach() / UNIT**2
    diagonal = covariance.diagonal(dim1=1, dim2=2)
    variance = (torch.linalg.det(covariance) if likelihood == "full" else diagonal.prod(1)).pow(1 / 3)
    torch.testing.assert_close(changed, variance.pow(beta)[:, None] * pull, rtol=1e-9, atol=0)


def test_a_gradient_that_is_not_finite_spoils_its_own_atom_only(build):
    module = build("shallow")
    coefficients = torch.full((3, module.num_columns()), 1.0 / ENERGY_UNIT, dtype=F64)
    coefficients[1, 4] = math.inf
    outputs = module(coefficients, torch.tensor(UNIT, dtype=F64))
    for name in ("forces_cov", "ensemble_log_cov"):
        assert not outputs[name][1].isfinite().all() and outputs[name][[0, 2]].isfinite().all()


@pytest.mark.parametrize("members", [1, 0, -3, 2.5, True])
def test_fewer_than_two_members_are_no_ensemble(members, build):
    with pytest.raises(InputError, match=f"members must be a whole number of at least 2, got {members}"):
        build("shallow", members=members)


def test_options():
    assert families.get("shallow").resolve({}) == {"members": 5, "likelihood": "full", "beta": 0.5}
    assert Settings.of("shallow", {"members": "7"}, UNIT).build().num_scalars == 6
    with pytest.raises(InputError, match="members must be a int, got 'many'"):
        Settings.of("shallow", {"members": "many"}, UNIT)
    five, eight = (
        Settings.of("shallow", {"members": members, "beta": beta}, UNIT) for members, beta in ((5, 0), (8, 1))
    )
    assert five.differences(eight, weights_only=True) == ["members"]


def test_unknown_likelihood(build):
    with pytest.raises(InputError, match="unknown likelihood 'best'; choose from: full, components"):
        build("shallow", likelihood="best")


def test_forces_of_the_host_are_refused():
    with pytest.raises(InputError, match=r"forces 'host' does not go with readout 'shallow'.*leave it out"):
        Settings.of("shallow", {}, UNIT, "host")
