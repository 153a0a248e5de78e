"""What a fitted support does to a covariance: the factor itself, and evidence mode ``leverage`` of e2ip."""

import math

import pytest
import torch

from e2ip_plugins import families
from e2ip_plugins.errors import InputError
from e2ip_plugins.families.e2ip import E2IP
from e2ip_plugins.families.laws import law_of
from e2ip_plugins.leverage.form import FORM, Around, Support, inflate, log_around, surplus
from e2ip_plugins.maths.spd import split_trace, sym6_to_matrix

F64 = torch.float64
UNIT = torch.tensor(0.05, dtype=F64)
#: r(2).
USUAL_REACH = 2.0 * (1.0025 / 1.16) ** 0.25


def family(evidence="leverage", **options):
    return E2IP(E2IP.resolve({"evidence": evidence, **options}))


#: What the formulas of forces do not read.
WHITENED = torch.zeros(1, 1, dtype=F64)


def inflated(support, own, form=FORM):
    return inflate(support, own, log_around(support, own, form), form)


def coefficients(count=20, seed=0):
    return torch.randn(count, 8, dtype=F64, generator=torch.Generator().manual_seed(seed))


def trained(count=20):
    """Outputs before there was a fit: those of mode ``coupled``."""
    return family("coupled")(coefficients(count), UNIT)


def support_of(outputs, distance=2.0, growth=1.7, log_scale=0.4, relative=0.0, fitted=True, surplus=0.0):
    """``relative``: logarithm of the species' mean variance over the atom's own."""
    own = E2IP.log_variance(outputs)
    full = torch.ones_like(own)
    distance = distance * full
    leverage = distance / 2.0
    return Support(
        leverage=leverage if fitted else -full,
        distance=distance,
        growth=torch.tensor([growth], dtype=F64),
        surplus=torch.tensor([surplus], dtype=F64),
        log_typical=own + relative,
        log_scale=log_scale * full,
        fitted=torch.tensor(fitted),
        whitened=full[:, None],
    )


# The factor


@pytest.mark.parametrize("surplus", [0.0, math.log(3.0)])
def test_factor_by_hand(surplus):
    """a = 0.5, distance 10, v̄ = 4v, u = 3v̄: ((1 + r/2)² - 1) u^(1-w) v̄^w / v.

    With a surplus 1 + that has a factor for it.
    """
    support = support_of(trained(1), distance=10.0, growth=0.5, log_scale=0.1, relative=math.log(4.0), surplus=surplus)
    log_own = support.log_typical - math.log(4.0)
    log_factor, excess = inflate(support, log_own, torch.full_like(log_own, math.log(3.0)))
    reach, usual, far = 10.0 * (1.0625 / 5.0) ** 0.25, USUAL_REACH, 16.0 / 17.0
    total = (1.0 + ((1.0 + 0.5 * reach) ** 2 - 1.0) * 4.0 * 3.0 ** (0.6 / 5.0)) * math.exp(surplus * far)
    assert excess.item() == pytest.approx(total - 1.0)
    assert log_factor.item() == pytest.approx(0.1 - 2.0 * math.log(1.0 + 0.5 * usual))


@pytest.mark.parametrize("distance", [0.0, 1e-12, 2.0, 1e3, 2e6])
@pytest.mark.parametrize("relative", [-20.0, 0.0, 20.0])
@pytest.mark.parametrize("growth, surplus", [(1e-3, 0.0), (2.5, 1.0), (1e3, 3.0)])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_factor_and_its_gradient_stay_within_bounds(distance, relative, growth, surplus, dtype):
    one = torch.ones(1, dtype=dtype)
    own = (-5.0 * one).requires_grad_()
    far = (distance * one).requires_grad_()
    support = Support(
        one,
        far,
        growth * one,
        surplus * one,
        own.detach() + relative,
        0 * one,
        torch.tensor(True),
        WHITENED,
    )
    log_factor, excess = inflated(support, own)
    assert 0.999 / 1e6 <= excess.item() <= 1.001 * 1e6 and log_factor.isfinite()
    for gradient in torch.autograd.grad(excess.log().sum(), (own, far)):
        assert gradient.isfinite().all()


def test_an_alternative_form_is_the_form_with_other_constants():
    """Only what the constant is about changes: near the training set hardly anything, far out the reach."""
    distance = torch.tensor([0.1, 2e4], dtype=F64)
    one = torch.ones_like(distance)
    support = Support(one, distance, 0.01 * one, 0 * one, 0 * one, 0 * one, torch.tensor(True), WHITENED)
    (_, usual), (_, excess) = inflated(support, 0 * one), inflated(support, 0 * one, FORM._replace(linear=15.0))
    torch.testing.assert_close(excess[0], usual[0], rtol=1e-3, atol=0)
    assert ((1 + excess[1]).sqrt() - 1).item() == pytest.approx(
        0.01 * 2e4 * ((1 + (2e4 / 15) ** 2) / (1 + 1.6e7)) ** 0.25, rel=1e-6
    )


def test_factor_grows_with_distance_and_less_for_atoms_that_have_grown_by_themselves():
    outputs = trained(1)
    distances = torch.linspace(0.01, 100.0, 50, dtype=F64)
    one, spread = support_of(outputs), torch.ones(50, dtype=F64)
    support = one._replace(distance=distances, log_typical=one.log_typical * spread)
    _, excess = inflated(support, one.log_typical * spread)
    assert (excess.diff() > 0).all()
    _, of_large = inflated(support, one.log_typical * spread + 2.0)
    assert (of_large.diff() > 0).all()
    torch.testing.assert_close(of_large[0], excess[0] * math.exp(-0.4 * 2.0), rtol=1e-4, atol=0)


@pytest.mark.parametrize("own", [-6.0, 0.0, 6.0])
def test_far_away_the_species_variance_counts(own):
    """What the network says there is an extrapolation, up or down."""
    support = Support(
        *torch.tensor([[3e4], [6e4], [2.5], [0.0], [-3.0], [0.2]], dtype=F64),
        torch.tensor(True),
        WHITENED,
    )
    log_factor, excess = inflated(support, torch.tensor([own], dtype=F64), FORM._replace(max_ratio=1e12))
    epistemic = math.exp(own + log_factor.item()) * excess.item()
    grown = ((1.0 + 2.5 * 6e4 * ((1.0 + 2.25e6) / (1.0 + 1.44e8)) ** 0.25) ** 2 - 1.0) / (1.0 + 2.5 * USUAL_REACH) ** 2
    rest = 0.6 * (own + 3.0) / (1.0 + 1.44e8)
    assert epistemic == pytest.approx(math.exp(-3.0 + 0.2 + rest) * grown, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_far_away_a_network_that_is_sure_does_not_undo_the_growth(dtype):
    """However little variance it says, also past the bound of the ratio."""
    own = torch.linspace(-30.0, 0.0, 31, dtype=dtype)
    one = torch.ones_like(own)
    support = Support(one, 2e6 * one, 0.5 * one, 0.0 * one, 0.0 * one, 0.0 * one, torch.tensor(True), WHITENED)
    log_factor, excess = inflated(support, own)
    log_epistemic = own + log_factor + excess.log()
    torch.testing.assert_close(log_epistemic.diff(), 0.0 * one[1:], atol=1e-5, rtol=1e-5)
    expected = math.log(1e3 * (1e3 + 2.0)) - 2.0 * math.log(1.0 + 0.5 * USUAL_REACH)
    assert log_epistemic[-1].item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("surplus", [0.0, 1.0])
@pytest.mark.parametrize("own", [-3.0, 0.0, 4.0])
def test_factor_grows_everywhere(own, surplus):
    """Also where its slope is least, and for atoms whose variance has grown by itself to 50 times their species'."""
    distance = torch.linspace(0.1, 200.0, 4000, dtype=F64)
    one = torch.ones_like(distance)
    support = Support(one, distance, 2.5 * one, surplus * one, 0.0 * one, 0.0 * one, torch.tensor(True), WHITENED)
    _, excess = inflated(support, own * one, FORM._replace(max_ratio=1e7))
    assert (excess.diff() > 0).all()


def test_surplus_is_of_optimism_and_relative_error():
    """With errors of a fiftieth of the forces the variance far out is 2.5 times as large: 0.05/0.02."""
    assert surplus(0.0, None) == 0.0 and surplus(0.4, None) == pytest.approx(math.tanh(0.6))
    assert math.exp(surplus(0.0, 0.02)) == pytest.approx(2.5)
    assert surplus(0.4, 0.05) == pytest.approx(math.tanh(0.6))
    assert (surplus(0.0, 10.0), surplus(0.0, 1e-9)) == (0.0, 2.0)


# The variance around an atom


def surrounded(log_own, weights, log_typical=0.0):
    """ln u/v̄ of atoms that all have each other as neighbours, with the weights (N, N)."""
    n = len(log_own)
    sender, receiver = (index.flatten() for index in torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij"))
    off = sender != receiver
    sender, receiver = sender[off], receiver[off]
    weight = weights[sender, receiver]
    around = Around(sender, receiver, weight, torch.ones(n, dtype=F64).index_add(0, receiver, weight))
    one = torch.ones(n, dtype=F64)
    support = Support(one, one, one, one, log_typical + 0 * one, one, torch.tensor(True), one[:, None], around)
    return log_around(support, log_own)


def test_the_variance_around_an_atom_by_hand():
    """Species that are different compare by v/v̄: 1, 2 and 4 here, with weights 1/2 and 1/4 for the first atom."""
    ratios, typical = torch.tensor([1.0, 2.0, 4.0], dtype=F64), torch.tensor([-6.0, 0.0, 3.0], dtype=F64)
    weights = torch.tensor([[0.0, 0.5, 0.25], [0.5, 0.0, 0.0], [0.25, 0.0, 0.0]], dtype=F64)
    around = surrounded(typical + ratios.log(), weights, typical).exp()
    mean = (1.0 + 0.5 * 2.0**4 + 0.25 * 4.0**4) / 1.75
    assert around[0].item() == pytest.approx((0.98 + 0.02 * mean) ** 0.25)
    assert around[2].item() == pytest.approx((0.98 * 4.0**4 + 0.02 * (4.0**4 + 0.25) / 1.25) ** 0.25)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_an_atom_without_a_variance_leaves_its_neighbours_finite(broken):
    log_own = torch.tensor([0.0, broken, 0.0], dtype=F64)
    around = surrounded(log_own, torch.ones(3, 3, dtype=F64))
    assert around.isfinite().all() and (around.abs() <= math.log(1e3)).all()


def test_alone_it_is_the_atoms_own():
    log_own = torch.linspace(-3.0, 3.0, 7, dtype=F64)
    torch.testing.assert_close(surrounded(log_own, torch.zeros(7, 7, dtype=F64)), log_own)


def test_a_sure_atom_among_unsure_ones_grows_with_them():
    """It gets about a third of their variance, where that is more than its own."""
    log_own = torch.full((20,), 3.0, dtype=F64)
    log_own[0] = -3.0
    around = surrounded(log_own, torch.ones(20, 20, dtype=F64))
    assert around[0].item() == pytest.approx(3.0 + 0.25 * math.log(0.02 * 0.95), abs=1e-3)
    torch.testing.assert_close(around[1:], log_own[1:], rtol=0, atol=1e-3)


# Evidence mode leverage


@pytest.mark.parametrize("support", ["unfitted", "none"])
def test_until_it_is_fitted_everything_is_as_in_mode_coupled(support):
    expected = trained()
    given = None if support == "none" else support_of(expected, distance=7.0, fitted=False)
    found = family()(coefficients(), UNIT, given)
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("evidence", ["coupled", "independent"])
def test_other_modes_ignore_a_support(evidence):
    module, expected = family(evidence), family(evidence)(coefficients(), UNIT)
    found = module(coefficients(), UNIT, support_of(expected, distance=7.0))
    assert not module.takes_support and all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_supported_atom_gets_the_trained_size_times_the_scale():
    expected = trained()
    found = family()(coefficients(), UNIT, support_of(expected, distance=2.0, log_scale=0.4))
    torch.testing.assert_close(E2IP.log_variance(found), 0.4 + E2IP.log_variance(expected), rtol=0, atol=1e-12)
    near = family()(coefficients(), UNIT, support_of(expected, distance=1e-3, log_scale=0.4))
    factor = (E2IP.log_variance(near) - E2IP.log_variance(expected)).exp()[:, None, None]
    torch.testing.assert_close(near["forces_cov"], factor * expected["forces_cov"], rtol=1e-11, atol=0)


def test_the_distribution_is_the_trained_one_with_the_factor_and_the_shape_of_its_distance():
    expected, generator = trained(), torch.Generator().manual_seed(1)
    distance = torch.rand(20, dtype=F64, generator=generator) * 50.0
    relative = torch.randn(20, dtype=F64, generator=generator)
    support = support_of(expected, distance, relative=relative, surplus=0.5)
    found = family()(coefficients(), UNIT, support)
    log_factor, excess = inflated(support, E2IP.log_variance(expected))
    size = E2IP.log_variance(expected) + log_factor + torch.log1p(excess)
    torch.testing.assert_close(E2IP.log_variance(found), size, rtol=0, atol=1e-11)
    torch.testing.assert_close(found["e2ip_kappa"], 1.0 / excess)
    far = (distance / 5.0) ** 4 / (1.0 + (distance / 5.0) ** 4)
    before, after = (split_trace(outputs["e2ip_log_sigma0"])[1] for outputs in (expected, found))
    norms = [sym6_to_matrix(traceless).square().sum((-1, -2)) for traceless in (before, after)]
    torch.testing.assert_close(1.0 / norms[1], 1.0 / norms[0] + far / 0.64, rtol=1e-10, atol=0)
    torch.testing.assert_close(after * (norms[0] / norms[1]).sqrt()[:, None], before, rtol=1e-9, atol=1e-12)
    less = 1.0 / (1.0 / (expected["e2ip_nu"] - 5.0) + far / 2.0)
    torch.testing.assert_close(found["e2ip_nu"], 5.0 + less, rtol=1e-12, atol=0)
    # The parameters are the interchange: every view follows from them.
    for name, value in E2IP.derive({key.name: found[key.name] for key in E2IP.parameter_keys}).items():
        torch.testing.assert_close(value, found[name], rtol=1e-10, atol=0)
    # The fit looks at the same distribution.
    parameters = E2IP.far_out({key.name: expected[key.name] for key in E2IP.parameter_keys}, far)
    laws = [law_of(E2IP, {k.name: out[k.name].numpy() for k in E2IP.parameter_keys}) for out in (found, parameters)]
    log_scale = laws[1].log_scale + (log_factor + torch.log1p(excess)).numpy()[:, None]
    torch.testing.assert_close(torch.from_numpy(laws[0].log_scale), torch.from_numpy(log_scale))
    torch.testing.assert_close(torch.from_numpy(laws[0].dof), torch.from_numpy(laws[1].dof))


@pytest.mark.parametrize("evidence", [1e-9, 1.0, 1e6])
def test_far_out_there_is_hardly_any_evidence_and_no_long_axis(evidence):
    """Whatever the network says."""
    far, nu = torch.ones(1, dtype=F64), torch.full((1,), 5.0 + evidence, dtype=F64)
    log = torch.tensor([[9.0, -4.5, -4.5, 1.0, 2.0, 3.0]], dtype=F64)
    found = E2IP.far_out({"e2ip_log_sigma0": log, "e2ip_nu": nu}, far)
    assert 5.0 < found["e2ip_nu"].item() < 7.0
    assert 0.79 < sym6_to_matrix(found["e2ip_log_sigma0"]).norm().item() < 0.8


def test_kappa_and_covariances_stay_within_bounds_however_far_an_atom_is():
    expected = trained(5)
    distance = torch.tensor([0.0, 1.0, 1e3, 1e6, 2e6], dtype=F64)
    for dtype in (F64, torch.float32):
        support = Support(*(v if v.dtype == torch.bool else v.to(dtype) for v in support_of(expected, distance)[:-1]))
        found = family()(coefficients(5).to(dtype), UNIT.to(dtype), support)
        kappa = found["e2ip_kappa"]
        assert (kappa >= 0.999 / 1e6).all() and (kappa <= 1.001 * 1e6).all()
        assert (kappa.diff() <= 0).all()
        for name, value in found.items():
            assert value.isfinite().all(), name


@pytest.mark.parametrize("fitted", [True, False])
def test_mode_leverage_scripts(fitted):
    expected = trained()
    support = support_of(expected, torch.linspace(0.5, 90.0, 20, dtype=F64), fitted=fitted)
    module = family()
    scripted = torch.jit.script(module)(coefficients(), UNIT, support)
    for name, value in module(coefficients(), UNIT, support).items():
        torch.testing.assert_close(scripted[name], value)


def test_the_loss_does_not_see_the_support():
    """It starts from the coefficients: a fitted model that is trained on learns the covariance of training atoms."""
    losses = []
    for support in (None, support_of(trained(), 30.0)):
        outputs = family()(coefficients(), UNIT, support)
        outputs["e2ip_coefficients"], outputs["e2ip_force_unit"] = coefficients(), UNIT.expand(20)
        losses.append(family().force_loss(0.1 * torch.ones(20, 3, dtype=F64), outputs))
    assert torch.equal(*losses)


def test_constant_coefficients_offer_tails_from_heavy_to_gaussian():
    module = family()
    chosen = torch.zeros(len(module.constant_scalars()), 8, dtype=F64)
    chosen[:, :3] = torch.tensor(module.constant_scalars(), dtype=F64)
    nu = module(chosen, UNIT)["e2ip_nu"]
    assert 5.0 < nu[0] < 5.2 and nu[-1] > 30.0 and (nu.diff() > 0).all()
    assert torch.equal(chosen[:, 0], chosen[:1, 0].expand(len(nu)))


@pytest.mark.parametrize("weight", [0.1, 0.0])
def test_mode_leverage_has_no_regulariser(weight):
    with pytest.raises(InputError, match=r"evidence mode 'leverage' has no regulariser.*'independent'"):
        E2IP.resolve({"evidence": "leverage", "evidence_weight": weight})
    assert E2IP.resolve({"evidence": "leverage"})["evidence_weight"] == 0.0


def test_log_variance_is_the_geometric_mean_over_directions():
    outputs = trained()
    nu, kappa = outputs["e2ip_nu"], outputs["e2ip_kappa"]
    # Of the covariance ν/(ν-4) (1 + 1/κ) Σ0 without its first factor, which no support changes.
    per_component = torch.linalg.det(outputs["forces_cov"]).log() / 3.0 - torch.log(nu / (nu - 4.0))
    torch.testing.assert_close(E2IP.log_variance(outputs), per_component)
    assert (kappa > 0).all()


def test_families_that_take_no_support_ignore_it(toy_family):
    module = families.get(toy_family.name)({})
    assert not module.takes_support
    support = support_of(trained(4), 100.0)
    outputs = module(coefficients(4)[:, :1], UNIT, support)
    assert torch.equal(outputs["forces_cov"], module(coefficients(4)[:, :1], UNIT)["forces_cov"])
