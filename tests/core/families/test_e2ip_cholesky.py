"""``e2ip-cholesky``: the distribution of ``e2ip``, made of L Lᵀ."""

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_t

from e2ip_plugins.leverage.form import Around, Support
from e2ip_plugins.maths.spd import sym6_to_matrix

F64 = torch.float64
UNIT = 0.05


def test_sigma0_is_what_its_factor_says_and_its_logarithm_fits(build, example):
    coefficients, _, outputs = example(build("e2ip-cholesky"), spread=0.7)
    c = coefficients.detach()
    factor = torch.zeros(len(c), 3, 3, dtype=F64)
    factor[:, 0, 0], factor[:, 1, 1], factor[:, 2, 2] = (c[:, i].exp() for i in (0, 3, 4))
    factor[:, 1, 0], factor[:, 2, 0], factor[:, 2, 1] = (c[:, i].exp() * c[:, j] for i, j in ((3, 5), (4, 6), (4, 7)))
    expected = UNIT**2 * factor @ factor.mT
    torch.testing.assert_close(outputs["e2ip_sigma0"], expected, rtol=1e-10, atol=0)
    log_sigma0 = sym6_to_matrix(outputs["e2ip_log_sigma0"])
    torch.testing.assert_close(torch.matrix_exp(log_sigma0), expected, rtol=1e-8, atol=1e-14)


@pytest.mark.parametrize("options", [{}, {"evidence": "independent", "evidence_weight": 0.0}, {"preset": "paper"}])
def test_loss_is_scipys_density(options, build, example, law_from):
    module = build("e2ip-cholesky", **options)
    _, residual, outputs = example(module, spread=0.7)
    nll, _ = module.nll_terms(outputs["e2ip_coefficients"], residual, outputs["e2ip_force_unit"])
    nu, kappa = outputs["e2ip_nu"].detach().numpy(), outputs["e2ip_kappa"].detach().numpy()
    scale = outputs["e2ip_sigma0"].detach().numpy() * (nu * (kappa + 1) / (kappa * (nu - 2)))[:, None, None]
    expected = [
        -multivariate_t(shape=s, df=n - 2).logpdf(e)
        for s, n, e in zip(scale, nu, residual.detach().numpy(), strict=True)
    ]
    np.testing.assert_allclose(nll.detach().numpy(), expected, rtol=1e-9)
    law = law_from(module, outputs)
    np.testing.assert_allclose(law.negative_log_likelihood(residual.detach().numpy()), expected, rtol=1e-8)


def test_isotropic_it_is_e2ip_in_loss_pull_and_outputs(build):
    mine, theirs = build("e2ip-cholesky"), build("e2ip")
    s = torch.linspace(-20, 20, 9, dtype=F64)
    nu = torch.linspace(-3, 5, 9, dtype=F64)
    sigma = 3**0.5 / 6 * s
    zero = torch.zeros_like(s)
    generator = torch.Generator().manual_seed(0)
    residual = UNIT * torch.randn(9, 3, dtype=F64, generator=generator)
    found = []
    for module, coefficients in (
        (mine, torch.stack([sigma, nu, zero, sigma, sigma, zero, zero, zero], -1)),
        (theirs, torch.stack([s, nu, *[zero] * 6], -1)),
    ):
        outputs = module(coefficients, torch.tensor(UNIT, dtype=F64))
        outputs |= {"e2ip_force_unit": torch.full((9,), UNIT, dtype=F64), "e2ip_coefficients": coefficients}
        moved = residual.clone().requires_grad_()
        loss = module.force_loss(moved, outputs)
        found.append((loss.detach(), torch.autograd.grad(loss.sum(), moved)[0], outputs))
    for mine_value, their_value in zip(found[0][:2], found[1][:2], strict=True):
        torch.testing.assert_close(mine_value, their_value, rtol=1e-9, atol=1e-14)
    for key in theirs.output_keys():
        torch.testing.assert_close(found[0][2][key.name], found[1][2][key.name], rtol=1e-9, atol=1e-12)
    assert torch.equal(found[0][2]["e2ip_plateau"], found[1][2]["e2ip_plateau"])


@pytest.mark.parametrize("column", [0, 1, 4, 7])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_coefficient_that_is_not_finite_spoils_its_own_atom_only(column, bad, build):
    coefficients = torch.zeros(3, 8, dtype=F64)
    coefficients[1, column] = bad
    outputs = build("e2ip-cholesky")(coefficients, torch.tensor(UNIT, dtype=F64))
    assert not outputs["forces_cov"][1].isfinite().all() and outputs["forces_cov"][[0, 2]].isfinite().all()
    assert outputs["e2ip_log_sigma0"][1].isnan().any() and outputs["e2ip_log_sigma0"][[0, 2]].isfinite().all()


@pytest.mark.parametrize("evidence", ["leverage", "coupled", "independent"])
@pytest.mark.parametrize("unit", [None, 2.0])
def test_derivatives_of_its_outputs(evidence, unit, build, example):
    """Of what a biased MD differentiates, in units other than eV, too; twice where the trace alone has its say."""
    module = build("e2ip-cholesky", evidence=evidence)
    coefficients = example(module, count=4, spread=0.7)[0].detach().requires_grad_()
    ones = torch.ones(4, dtype=F64)
    pairs = torch.tensor([[0, 1, 2], [1, 0, 3]])
    around = Around(*pairs, 0.5 * ones[:3], ones.index_add(0, pairs[1], 0.5 * ones[:3]))
    fitted = torch.tensor(True)
    support = Support(3 * ones, 5 * ones, 2.5 * ones, 0.4 * ones, -6 * ones, 0.1 * ones, fitted, ones[:, None], around)

    def uncertainties(c):
        outputs = module(c, torch.tensor(UNIT, dtype=F64), support)
        outputs = outputs if unit is None else outputs | module.in_units(outputs, unit)
        return outputs["forces_epistemic_std"], outputs["forces_cov"]

    assert torch.autograd.gradcheck(uncertainties, coefficients, eps=1e-6, atol=1e-7, rtol=1e-6)
    if unit is None:
        assert torch.autograd.gradgradcheck(uncertainties, coefficients, eps=1e-6, atol=1e-6, rtol=1e-5)
