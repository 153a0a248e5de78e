"""The e2ip family: options, distribution and loss against the formulas of `maths`, written out."""

import math

import pytest
import torch

from e2ip_plugins.errors import InputError
from e2ip_plugins.families import niw
from e2ip_plugins.families.e2ip import E2IP
from e2ip_plugins.families.interface import TENSOR_DAMPER
from e2ip_plugins.families.niw import PRESETS, PULL_POWER
from e2ip_plugins.keys import KCAL_PER_MOL
from e2ip_plugins.maths import spd, student

F64 = torch.float64


def family(**options):
    return E2IP(E2IP.resolve(options))


def example(module, count=8, unit=KCAL_PER_MOL, spread=1.0):
    """Outputs of a family for random coefficients, and residuals of about their size."""
    generator = torch.Generator().manual_seed(0)
    coefficients = spread * torch.randn(count, 8, dtype=F64, generator=generator)
    coefficients.requires_grad_()
    outputs = module(coefficients, torch.tensor(unit, dtype=F64))
    outputs["e2ip_coefficients"], outputs["e2ip_force_unit"] = coefficients, torch.full((count,), unit, dtype=F64)
    residual = unit * torch.randn(count, 3, dtype=F64, generator=generator)
    return residual.requires_grad_(), outputs


def parameters(outputs):
    return [outputs[key.name] for key in E2IP.parameter_keys]


def test_paper_preset_is_the_paper():
    paper = PRESETS["paper"]
    assert (paper.evidence, paper.evidence_weight) == ("independent", 0.1)
    assert paper.scalar_damper == (4.0, 5.0) == TENSOR_DAMPER and not paper.mse_like
    module = family(preset="paper")
    residual, outputs = example(module)
    log_sigma0, nu, kappa = parameters(outputs)
    nll = student.negative_log_likelihood(log_sigma0, nu, kappa, residual)
    regulariser = (nu + kappa) * residual.norm(dim=-1) / KCAL_PER_MOL
    torch.testing.assert_close(module.force_loss(residual, outputs), nll + 0.1 * regulariser)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("evidence", ["coupled", "independent"])
def test_parameters_are_those_of_the_coefficients(preset, evidence):
    _, outputs = example(family(preset=preset, evidence=evidence), spread=4.0)
    c = outputs["e2ip_coefficients"]
    s = spd.damp(c[:, 0], *PRESETS[preset].scalar_damper)
    log_sigma0 = spd.tangent_to_sym6(s, spd.damp_vector(c[:, 3:], *TENSOR_DAMPER))
    log_sigma0[:, :3] += 2 * math.log(KCAL_PER_MOL)
    nu, kappa = student.evidence(c[:, 1], None if evidence == "coupled" else c[:, 2])
    for ours, theirs in zip(parameters(outputs), (log_sigma0, nu, kappa), strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(
        spd.sym6_to_matrix(log_sigma0).matrix_exp(), outputs["e2ip_sigma0"], rtol=1e-9, atol=1e-12
    )
    past = (c[:, 0].abs() > PRESETS[preset].scalar_damper[0]) | (c[:, 3:].norm(dim=1) > TENSOR_DAMPER[0])
    assert torch.equal(outputs["e2ip_plateau"] == 1, past) and past.any()


def test_covariance_is_that_of_the_student_t():
    _, outputs = example(family(evidence="independent"))
    _, nu, kappa = parameters(outputs)
    scale = student.predictive_scale_factor(nu, kappa)[:, None, None] * outputs["e2ip_sigma0"]
    m = (nu - 2)[:, None, None]
    torch.testing.assert_close(outputs["forces_cov"], scale * m / (m - 2))


def test_default_loss_is_the_likelihood_in_value_and_in_the_coefficients():
    module = family()
    residual, outputs = example(module)
    loss = module.force_loss(residual, outputs)
    nll = student.negative_log_likelihood(*parameters(outputs), residual)
    factor = 2 * KCAL_PER_MOL**2 / 3
    torch.testing.assert_close(loss - loss[0], factor * (nll - nll[0]))
    (ours,) = torch.autograd.grad(loss.sum(), outputs["e2ip_coefficients"], retain_graph=True)
    (theirs,) = torch.autograd.grad(factor * nll.sum(), outputs["e2ip_coefficients"])
    torch.testing.assert_close(ours, theirs)


def test_default_loss_is_never_negative():
    module = family()
    _, outputs = example(module)
    best = torch.zeros(8, 8, dtype=F64)
    best[:, 0], best[:, 1] = -1e3, 1e8
    loss = module.force_loss(torch.zeros(8, 3, dtype=F64), {**outputs, "e2ip_coefficients": best})
    assert (loss >= 0).all() and (loss < 1e-6).all()


def relative_pull(sigmas: list[float]) -> torch.Tensor:
    """Force gradient of the default loss over that of the mean square error, for σ in force units."""
    module, count = family(), len(sigmas)
    residual, outputs = example(module, count)
    coefficients = torch.zeros(count, 8, dtype=F64)
    coefficients[:, 0], coefficients[:, 1] = 2 * math.sqrt(3) * torch.tensor(sigmas, dtype=F64).log(), 1e9
    loss = module.force_loss(residual, {**outputs, "e2ip_coefficients": coefficients})
    (pull,) = torch.autograd.grad(loss.sum(), residual)
    ratio = pull / (2 / 3 * residual.detach())
    torch.testing.assert_close(ratio, ratio[:, :1].expand(count, 3), rtol=1e-5, atol=0)
    return ratio[:, 0]


def test_default_loss_pulls_less_where_the_variance_is_large_but_less_so_than_the_likelihood():
    sigmas = torch.tensor([0.5, 1.0, 2.0, 50.0], dtype=F64)
    expected = sigmas ** (2 * PULL_POWER - 2)
    torch.testing.assert_close(relative_pull(sigmas.tolist()), expected, rtol=1e-5, atol=0)


def test_pull_changes_the_gradient_in_the_force_alone(monkeypatch):
    module, found = family(), []
    for power in (0.0, PULL_POWER):
        monkeypatch.setattr(niw, "PULL_POWER", power)
        residual, outputs = example(module, 50)
        coefficients = outputs["e2ip_coefficients"].detach().requires_grad_()
        loss = module.force_loss(residual, {**outputs, "e2ip_coefficients": coefficients})
        found.append((loss, *torch.autograd.grad(loss.sum(), [coefficients, residual])))
    (loss, slope, pull), (same_loss, same_slope, kept) = found
    assert torch.equal(loss, same_loss)
    assert torch.equal(slope, same_slope)
    parameters = {key.name: outputs[key.name].detach() for key in module.parameter_keys}
    nu = parameters["e2ip_nu"]
    # det(Λ)^(1/3) with Λ = ν/(ν-2) (1 + 1/κ) Σ0
    variance = torch.exp(module.log_variance(parameters)) * nu / (nu - 2) / outputs["e2ip_force_unit"].square()
    torch.testing.assert_close(kept, variance.detach().pow(PULL_POWER)[:, None] * pull, rtol=1e-10, atol=0)


def test_loss_does_not_depend_on_the_units_of_the_host():
    """Everything scaled by f: NLL + λ reg shifts by exactly 3 ln f, whatever λ."""
    module, f = family(preset="paper"), 23.06
    residual, outputs = example(module)
    loss = module.force_loss(residual, outputs)
    scaled = module.force_loss(f * residual, {**outputs, "e2ip_force_unit": f * outputs["e2ip_force_unit"]})
    torch.testing.assert_close(scaled, loss + 3 * math.log(f))


def test_default_options():
    assert E2IP.resolve({}) == {"preset": "default", "evidence": "leverage", "evidence_weight": 0.0}
    assert E2IP.resolve({"preset": "paper"})["evidence_weight"] == 0.1
    assert E2IP.resolve({"evidence": "independent", "evidence_weight": 0})["evidence_weight"] == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"evidence": "coupled", "evidence_weight": 0.1}, "coupled"),
        ({"evidence_weight": 0.1}, "leverage"),
        ({"evidence": "independent", "evidence_weight": -0.1}, "evidence_weight must be"),
        ({"evidence": "independent", "evidence_weight": float("nan")}, "evidence_weight must be"),
        ({"evidence": "independent", "evidence_weight": "much"}, "evidence_weight must be"),
        ({"evidence": "both"}, "unknown evidence mode 'both'; choose from: independent, coupled, leverage"),
        ({"preset": "papper"}, "unknown preset 'papper'; choose from: paper, default"),
    ],
)
def test_options_that_do_not_go_together(options, message):
    with pytest.raises(InputError, match=message):
        E2IP.resolve(options)
