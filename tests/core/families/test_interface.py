"""What all families share: committees, units, options."""

import numpy as np
import pytest
import torch

from e2ip_plugins import families
from e2ip_plugins.errors import InputError
from e2ip_plugins.families.interface import committee_views
from e2ip_plugins.families.laws import law_of

#: Options of families with which their forward takes another way.
OTHER_FORWARDS = [
    ("e2ip-ablation", {"damper": "off"}),
    ("e2ip-ablation", {"numerics": "published"}),
    ("eip", {"likelihood": "nig"}),
]

#: Options with which the loss of a family is the likelihood of its law and nothing else; by default those of `resolve`.
LIKELIHOOD_ALONE = {"eip": {"regulariser_weight": 0.0}, "shallow": {"likelihood": "full"}}

#: Power of the force unit that a key's unit holds.
POWER = {"eV²/Å²": 2, "eV/Å": 1}

#: Force unit of `example`, in eV/Å.
UNIT = 0.05


def parameters_of(family, *shape):
    generator = torch.Generator().manual_seed(0)
    drawn = {}
    for key in family.parameter_keys:
        values = torch.rand(*shape, *key.shape, generator=generator, dtype=torch.float64)
        drawn[key.name] = values + key.above + 1.0 if key.above > -float("inf") else 2.0 * values - 5.0
    return drawn, torch.randn(*shape, 3, generator=generator, dtype=torch.float64)


@pytest.fixture(params=sorted(families.table()))
def family(request):
    return families.get(request.param)


def test_unit_factor_is_squared_on_covariances_and_plain_on_stds(family):
    factor = 27.2113 / 0.529177
    parameters, _ = parameters_of(family, 3, 7)
    before, after = family.derive(parameters), family.derive(family.convert(parameters, factor))
    views = family.output_keys()[len(family.parameter_keys) :]
    assert set(before) == {key.name for key in views}
    for key in views:
        assert before[key.name].shape == (3, 7, *key.shape)
        expected = before[key.name] * factor ** POWER.get(key.unit, 0)
        torch.testing.assert_close(after[key.name], expected, rtol=1e-12, atol=0)


def test_views_are_consistent(family):
    out = family.derive(parameters_of(family, 20)[0])
    torch.testing.assert_close(out["forces_cov"], out["forces_aleatoric_cov"] + out["forces_epistemic_cov"])
    torch.testing.assert_close(out["forces_uncertainty"] ** 2, out["forces_cov"].diagonal(dim1=1, dim2=2))
    trace = out["forces_epistemic_cov"].diagonal(dim1=1, dim2=2).sum(-1)
    torch.testing.assert_close(out["forces_epistemic_std"] ** 2 * 3, trace)
    assert (torch.linalg.eigvalsh(out["forces_cov"]) > 0).all()


def test_law_has_the_covariance_of_the_views(family):
    parameters, _ = parameters_of(family, 20)
    law = law_of(family, {name: value.numpy() for name, value in parameters.items()})
    views = family.derive(parameters)
    torch.testing.assert_close(torch.from_numpy(law.covariance()), views["forces_cov"])
    torch.testing.assert_close(torch.from_numpy(law.epistemic_std()), views["forces_epistemic_std"])


def test_widened_covariance(family):
    """factor · covariance + floor · I, atom by atom; everything without a unit stays."""
    parameters, _ = parameters_of(family, 30)
    before = family.derive(parameters)["forces_cov"]
    scale = before.diagonal(dim1=1, dim2=2).mean(-1)
    factor = torch.linspace(0.1, 5.0, 30, dtype=torch.float64)
    floor = scale * torch.tensor([0.0, 1e-9, 1e-3, 1.0, 1e3] * 6, dtype=torch.float64)
    wide = family.widen(parameters, factor, floor)
    assert set(wide) == set(parameters)
    expected = factor[:, None, None] * before + floor[:, None, None] * torch.eye(3, dtype=torch.float64)
    found = family.derive(wide)["forces_cov"]
    assert ((found - expected).norm(dim=(1, 2)) / expected.norm(dim=(1, 2))).max() < 1e-12
    for key in family.parameter_keys:
        assert key.unit != "1" or torch.equal(wide[key.name], parameters[key.name])
    law = law_of(family, {name: value.numpy() for name, value in wide.items()})
    torch.testing.assert_close(torch.from_numpy(law.covariance()), expected)


def test_a_factor_on_the_covariance_is_one_on_the_unit_of_errors(family):
    parameters, error = parameters_of(family, 20)
    wide = family.widen(parameters, torch.full((20,), 4.0, dtype=torch.float64), torch.zeros(20, dtype=torch.float64))
    before, after = (law_of(family, {name: v.numpy() for name, v in p.items()}) for p in (parameters, wide))
    error, twice = before.mean() + error.numpy(), before.mean() + 2.0 * error.numpy()
    assert after.pit(twice) == pytest.approx(before.pit(error), rel=1e-10)
    expected = before.negative_log_likelihood(error) + 3.0 * np.log(2.0)
    assert after.negative_log_likelihood(twice) == pytest.approx(expected, rel=1e-10)


def test_parameters_that_are_not_widened_are_the_same_to_the_bit(family):
    parameters, _ = parameters_of(family, 20)
    same = family.widen(parameters, torch.ones(20, dtype=torch.float64), torch.zeros(20, dtype=torch.float64))
    assert all(torch.equal(same[name], value) for name, value in parameters.items())


def test_committee_covariance_is_that_of_samples_from_the_mixture(family):
    parameters, forces = parameters_of(family, 3, 7)
    members = family.derive(parameters)
    got = committee_views(members, forces)
    # E[xxᵀ] - E[x]E[x]ᵀ of the mixture, which must not depend on how it is split.
    second_moment = (members["forces_cov"] + forces.unsqueeze(-1) * forces.unsqueeze(-2)).mean(0)
    mean = forces.mean(0)
    expected = second_moment - mean.unsqueeze(-1) * mean.unsqueeze(-2)
    torch.testing.assert_close(got["forces_cov"], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got["forces_aleatoric_cov"], members["forces_aleatoric_cov"].mean(0))
    assert all(key.startswith("forces_") for key in got)


def test_committee_of_one_model_is_that_model(family):
    parameters, forces = parameters_of(family, 1, 7)
    single = family.derive({key: value[0] for key, value in parameters.items()})
    for key, value in committee_views(family.derive(parameters), forces).items():
        assert torch.equal(value, single[key])


def test_an_option_of_another_family_is_an_error(family):
    with pytest.raises(InputError, match=f"wings is no option of readout '{family.name}'"):
        family.resolve({"wings": 2})


@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in sorted(families.table())), *OTHER_FORWARDS])
def test_families_script_and_put_out_what_they_name(build, example, name, options):
    module = build(name, **options)
    family = type(module)
    coefficients, _, outputs = example(module)
    scripted = torch.jit.script(module)(coefficients, outputs["e2ip_force_unit"][0])
    assert set(scripted) == {key.name for key in family.output_keys()} | {"e2ip_plateau"}
    for key in family.output_keys():
        assert outputs[key.name].shape == (30, *key.shape)
    for key, value in scripted.items():
        torch.testing.assert_close(value, outputs[key])
    # Parameters are the interchange: the views follow from them.
    for key, value in family.derive({key.name: outputs[key.name] for key in family.parameter_keys}).items():
        torch.testing.assert_close(value, outputs[key])


def test_loss_is_the_gradient_of_something_finite(family):
    """The loss follows errors and coefficients: finite gradients, and a larger error costs more."""
    module = family(family.resolve({}))
    coefficients = torch.randn(5, module.num_columns(), dtype=torch.float64).requires_grad_()
    unit = torch.tensor(0.05, dtype=torch.float64)
    outputs = {**module(coefficients, unit), "e2ip_coefficients": coefficients, "e2ip_force_unit": unit.expand(5)}
    residual = 0.1 * torch.randn(5, 3, dtype=torch.float64)
    residual[4] = 0.0  # an atom that does not count
    residual.requires_grad_()
    loss = module.force_loss(residual, outputs)
    assert loss.shape == (5,) and (module.force_loss(3 * residual, outputs) > loss)[:4].all()
    for gradient in torch.autograd.grad(loss.sum(), (coefficients, residual)):
        assert torch.isfinite(gradient).all() and gradient.abs().sum() > 0


def test_loss_is_the_likelihood_of_the_law_up_to_a_constant(family, build, example, law_from):
    """What is trained is what predictions are judged by; the factor makes it as large as a mean square error."""
    module = build(family.name, **LIKELIHOOD_ALONE.get(family.name, {}))
    _, residual, outputs = example(module)
    loss = module.force_loss(residual, outputs).detach().numpy()
    expected = law_from(module, outputs).negative_log_likelihood(residual.detach().numpy())
    np.testing.assert_allclose(loss - loss[0], 2 * UNIT**2 / 3 * (expected - expected[0]), rtol=1e-8, atol=1e-12)


def test_loss_is_not_negative_at_the_start(family):
    """Also without errors; schedulers with a relative threshold misread a negative loss."""
    module = family(family.resolve({}))
    coefficients = torch.zeros(1, module.num_columns(), dtype=torch.float64)
    coefficients[0, : len(module.initial_scalars)] = torch.tensor(module.initial_scalars, dtype=torch.float64)
    unit = torch.tensor(0.05, dtype=torch.float64)
    outputs = {**module(coefficients, unit), "e2ip_coefficients": coefficients, "e2ip_force_unit": unit.expand(1)}
    assert module.force_loss(torch.zeros(1, 3, dtype=torch.float64), outputs).item() >= 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_coefficients_that_are_not_finite_spoil_their_atom_alone(build, example, family, bad):
    module = build(family.name)
    coefficients, _, before = example(module)
    coefficients = coefficients.detach().clone()
    coefficients[1] = bad
    covariance = module(coefficients, before["e2ip_force_unit"][0])["forces_cov"]
    others = [0, *range(2, len(covariance))]
    assert not covariance[1].isfinite().all()
    torch.testing.assert_close(covariance[others], before["forces_cov"][others])
