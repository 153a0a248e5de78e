"""The leverage against its formulas in NumPy, at its edges, and in every form a readout travels in."""

import itertools

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from e2ip_plugins.leverage.module import Leverage, Neighbours
from e2ip_plugins.readout.layout import Layout
from e2ip_plugins.readout.readout import Readout
from e2ip_plugins.readout.settings import Settings

F64 = torch.float64
SIZE, SPECIES = 5, 3

#: Two heads of three species; head 0 never saw an atom of the last one.
REGIONS = [3, 1, 0, 1, 2, 1]


@pytest.fixture
def leverage(fill_leverage):
    filled = Leverage(SIZE, SPECIES, 2)
    fill_leverage(filled, REGIONS)
    return filled


def draw(count=12, seed=0, spread=1.5):
    """Features, species and heads; of head 0 no atom of the species that it never saw."""
    generator = torch.Generator().manual_seed(seed)
    heads = torch.arange(count) % 2
    species = torch.randint(0, SPECIES, (count,), generator=generator)
    species = torch.where((heads == 0) & (species == 2), 0, species)
    return spread * torch.randn(count, SIZE, generator=generator), species, heads


def random_neighbours(count=12, pairs=20, seed=1):
    """Pairs of different atoms, each in both directions."""
    rng = np.random.default_rng(seed)
    i = rng.integers(0, count, pairs)
    j = (i + rng.integers(1, count, pairs)) % count
    sender, receiver = torch.from_numpy(np.concatenate([[i, j], [j, i]], axis=1))
    lengths = torch.from_numpy(np.tile(1.0 + 3.0 * rng.random(pairs), 2))
    return Neighbours(lengths, (1.0 - lengths / 4.0).square(), sender, receiver)


def expected_h(regions, x, kind):
    """h of one atom: the formula of `e2ip_plugins.leverage.form`, region by region."""
    found = []
    for region in regions:
        if region.kind == kind:
            values, axes = np.linalg.eigh(region.covariance)
            t = np.square((x - region.mean) @ axes) / values
            found.append(region.norm * (np.sqrt(1.0 + t) - 1.0).sum())
    return np.average(found, weights=np.array(found) ** -4.0) if found else 1e6


def expected_mean(h, neighbours):
    """Mean of h over the neighbours of every atom, with dense matrices."""
    weights = np.zeros((len(h), len(h)))
    np.add.at(weights, (neighbours.receiver.numpy(), neighbours.sender.numpy()), neighbours.envelope.numpy())
    averaging = (np.eye(len(h)) + weights) / (1.0 + weights.sum(1, keepdims=True))
    return averaging @ np.minimum(h, 1e6)


# Against the formulas


def test_formula_by_region_and_kind(fill_leverage):
    leverage = Leverage(SIZE, SPECIES, 2)
    regions = fill_leverage(leverage, REGIONS)
    x, species, heads = draw(40)
    neighbours = random_neighbours(40, 60)
    found = leverage(x, species, heads, neighbours)
    kinds = (heads * SPECIES + species).numpy()
    assert set(kinds) == {0, 1, 3, 4, 5}
    h = np.array([expected_h(regions, *atom) for atom in zip(x.numpy(), kinds, strict=True)])
    np.testing.assert_allclose(found.leverage, h, rtol=1e-10)
    np.testing.assert_allclose(found.distance, h + expected_mean(h, neighbours), rtol=1e-10)
    assert torch.equal(found.growth, leverage.growth[heads]) and bool(found.fitted)
    assert torch.equal(found.surplus, leverage.surplus[heads])
    for name, buffer in (("log_typical", leverage.log_variance), ("log_scale", leverage.log_factor)):
        assert torch.equal(getattr(found, name), buffer[kinds]), name


def test_small_deviations_give_the_squared_mahalanobis_distance_and_large_ones_its_root():
    leverage = Leverage(1, 1)
    leverage.whitening.fill_(2.0)
    leverage.region_stretch.fill_(1.0)
    leverage.region_offsets.zero_()
    leverage.region_norms.fill_(2.0)
    leverage.fitted.fill_(True)
    z = torch.tensor([1e-3, 1e4])
    h = leverage(z[:, None] / 2.0, torch.zeros(2, dtype=torch.long)).leverage
    torch.testing.assert_close(h, torch.stack([z[0] ** 2, 2.0 * z[1] - 2.0]), rtol=1e-4, atol=0)


def test_the_nearest_region_counts_and_two_equal_ones_count_like_one(fill_leverage):
    leverage = Leverage(SIZE, 1)
    regions = fill_leverage(leverage, [2], spread=30.0)
    zero = torch.zeros(2, dtype=torch.long)
    deviation = 0.3 * torch.randn(2, SIZE, generator=torch.Generator().manual_seed(0))
    x = torch.from_numpy(np.stack([region.mean for region in regions])) + deviation
    found = leverage(x, zero).leverage.numpy()
    near = [expected_h([region], atom, 0) for region, atom in zip(regions, x.numpy(), strict=True)]
    np.testing.assert_allclose(found, near, rtol=1e-6)
    for buffer in (leverage.region_offsets, leverage.region_stretch, leverage.region_norms):
        buffer[:, 1] = buffer[:, 0]
    np.testing.assert_allclose(leverage(x, zero).leverage[0], near[0], rtol=1e-10)


# Neighbours


@pytest.mark.parametrize("strictly_local", [False, True])
def test_mean_over_neighbours(strictly_local, fill_leverage):
    leverage = Leverage(SIZE, SPECIES, 2, strictly_local)
    fill_leverage(leverage, REGIONS)
    neighbours = random_neighbours()
    found = leverage(*draw(), neighbours)
    h = found.leverage.numpy()
    expected = h if strictly_local else expected_mean(h, neighbours)
    np.testing.assert_allclose((found.distance - found.leverage).numpy(), expected, rtol=1e-10)


def test_without_neighbours_the_mean_is_that_of_the_atom_alone(leverage):
    none = Neighbours(torch.zeros(0), torch.zeros(0), *torch.zeros(2, 0, dtype=torch.long))
    for neighbours in (None, none):
        found = leverage(*draw(), neighbours)
        torch.testing.assert_close(found.distance, 2.0 * found.leverage, rtol=1e-14, atol=0)


def test_in_a_small_molecule_the_mean_is_that_of_the_molecule(leverage):
    """All atoms within each other's reach, at a constant envelope of 1."""
    count = 7
    pairs = torch.tensor(list(itertools.permutations(range(count), 2))).t()
    ones = torch.ones(count * (count - 1))
    found = leverage(*draw(count), Neighbours(ones, ones, *pairs))
    torch.testing.assert_close(found.distance - found.leverage, found.leverage.mean().expand(count))
    # A weak envelope mixes less, (1 - 0.2)/(1 + 6 · 0.2) of the deviations stay; the sum over atoms is kept.
    weak = leverage(*draw(count), Neighbours(ones, 0.2 * ones, *pairs))
    mean = weak.distance - weak.leverage
    torch.testing.assert_close(mean.mean(), found.leverage.mean())
    torch.testing.assert_close(mean.std(), 0.8 / 2.2 * found.leverage.std())


def test_an_atom_does_not_depend_on_the_rest_of_the_batch_nor_on_the_order(leverage):
    a, b = draw(12, seed=0), draw(9, seed=5)
    near_a, near_b = random_neighbours(12, 20), random_neighbours(9, 15, seed=4)
    together = Neighbours(*(torch.cat(parts) for parts in zip(near_a, near_b, strict=True)))
    index = [torch.cat([getattr(near_a, name), getattr(near_b, name) + 12]) for name in ("sender", "receiver")]
    together = together._replace(sender=index[0], receiver=index[1])
    x, species, heads = (torch.cat(parts) for parts in zip(a, b, strict=True))
    whole = leverage(x, species, heads, together)
    for part, alone in ((slice(0, 12), leverage(*a, near_a)), (slice(12, 21), leverage(*b, near_b))):
        for name in ("leverage", "distance"):
            torch.testing.assert_close(getattr(whole, name)[part], getattr(alone, name), rtol=1e-13, atol=0)
    order = torch.randperm(21, generator=torch.Generator().manual_seed(0))
    place = torch.argsort(order)
    shuffled = Neighbours(together.lengths, together.envelope, place[together.sender], place[together.receiver])
    found = leverage(x[order], species[order], heads[order], shuffled)
    for name in ("leverage", "distance"):
        torch.testing.assert_close(getattr(found, name), getattr(whole, name)[order], rtol=1e-13, atol=0)


# Edges


def test_nothing_grows_and_nothing_is_known_until_it_is_fitted(fill_leverage):
    leverage = Leverage(SIZE, SPECIES)
    x, species, _ = draw()
    for _ in range(2):
        found = leverage(x, species, None, random_neighbours())
        assert (found.leverage == -1).all() and found.distance.isfinite().all() and not found.fitted
        fill_leverage(leverage)
        assert leverage(x, species).leverage.isfinite().all()
        leverage.reset()


def test_a_species_without_training_atoms_is_far_away_with_finite_gradients(leverage):
    x, species, heads = draw(6)
    species[0] = 2
    x.requires_grad_()
    found = leverage(x, species, heads, random_neighbours(6, 8))
    torch.testing.assert_close(found.leverage[0], torch.tensor(1e6))
    assert (found.leverage[1:] < 1e3).all() and (found.distance <= 2 * 1e6).all()
    (gradient,) = torch.autograd.grad(found.distance.sum(), x)
    assert gradient.isfinite().all() and torch.equal(gradient[0], torch.zeros(SIZE)) and gradient[1:].abs().sum() > 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_features_that_are_not_finite_are_infinitely_far(leverage, bad):
    x, species, heads = draw()
    clean = leverage(x, species, heads)
    x[3, 2] = bad
    found = leverage(x, species, heads, random_neighbours())
    others = torch.arange(12) != 3
    assert found.leverage[3] == float("inf") and torch.equal(found.leverage[others], clean.leverage[others])
    assert found.distance.isfinite().all(), "a neighbour's mean must stay a number"
    assert found.distance[3] > 1e6


def test_atoms_at_the_same_place_are_infinitely_far(leverage):
    neighbours = random_neighbours()
    neighbours.lengths[[4, 24]] = 0.0
    touching = neighbours.receiver[[4, 24]]
    found = leverage(*draw(), neighbours)
    assert found.leverage[touching].isinf().all() and found.leverage.isinf().sum() == 2
    assert found.distance.isfinite().all() and (found.distance[touching] > 1e6).all()


def test_huge_features_are_far_and_finite(leverage):
    x, species, heads = draw()
    found = leverage(1e30 * x, species, heads)
    torch.testing.assert_close(found.leverage, torch.full((12,), 1e6))
    single = leverage.float()(1e12 * x.float(), species, heads)
    torch.testing.assert_close(single.leverage, torch.full((12,), 1e6, dtype=torch.float32))


def test_no_atoms(leverage):
    none = torch.zeros(0, dtype=torch.long)
    empty = leverage(torch.zeros(0, SIZE), none, none, Neighbours(torch.zeros(0), torch.zeros(0), none, none))
    for name in ("leverage", "distance", "log_typical", "log_scale", "growth", "surplus"):
        assert getattr(empty, name).shape == (0,)


# Smoothness


def border(regions, kind=0):
    """Where an atom goes from one region of a kind to the next."""
    first, second = [region for region in regions if region.kind == kind][:2]
    low, high = first.mean, second.mean
    for _ in range(60):
        middle = 0.5 * (low + high)
        closer = expected_h([first], middle, kind) < expected_h([second], middle, kind)
        low, high = (middle, high) if closer else (low, middle)
    return torch.from_numpy(low)


def test_gradients_are_those_of_finite_differences_also_between_regions(fill_leverage):
    leverage = Leverage(SIZE, SPECIES, 2)
    regions = fill_leverage(leverage, REGIONS)
    x, species, heads = draw(6)
    x[0], species[0], heads[0] = border(regions), 0, 0
    x[2], species[2], heads[2] = border(regions) + 1e-3, 0, 0
    near = expected_h(regions[:1], x[0].numpy(), 0), expected_h(regions[1:2], x[0].numpy(), 0)
    assert near[0] == pytest.approx(near[1], rel=1e-9)
    neighbours = random_neighbours(6, 8)

    def distance(x, envelope):
        found = leverage(x, species, heads, neighbours._replace(envelope=envelope))
        return found.leverage.log(), found.distance.log()

    inputs = x.requires_grad_(), neighbours.envelope.clone().requires_grad_()
    assert torch.autograd.gradcheck(distance, inputs, atol=1e-7, rtol=1e-6)
    assert torch.autograd.gradgradcheck(distance, inputs, atol=1e-6, rtol=1e-5)


def test_gradients_at_the_centre_of_a_region(leverage):
    x, species, heads = draw(2)
    x[0], species[0] = leverage.centres[1], 1
    leverage.region_offsets[1, 0] = 0.0
    x.requires_grad_()
    found = leverage(x, species, heads).leverage
    assert 0 < found[0] < 1e-9
    (gradient,) = torch.autograd.grad(found.sum(), x)
    assert not gradient[0].any() and gradient[1].any()


@pytest.mark.parametrize("key", ["e2ip_kappa", "forces_epistemic_std", "e2ip_leverage"])
def test_gradients_through_the_readout(key, fill_leverage):
    """What `uncertainty_gradient` differentiates; away from bounds."""
    layout = Layout([(0, SIZE)], [(SIZE, 2)], [(SIZE + 6, 1)], num_species=SPECIES)
    built = Readout(Settings.of("e2ip", {"evidence": "leverage"}, 0.05), layout, seed=1)
    regions = fill_leverage(built.leverage, [2, 1, 1])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, SIZE + 11, generator=generator)
    x[0, :SIZE] = border(regions)
    species, neighbours = torch.arange(6) % SPECIES, random_neighbours(6, 8)
    built.requires_grad_(False)

    def value(x, envelope):
        return built(x, x, species, neighbours._replace(envelope=envelope))[key].log()

    inputs = x.requires_grad_(), neighbours.envelope.clone().requires_grad_()
    slope = torch.autograd.grad(value(*inputs).sum(), inputs, allow_unused=True)
    assert slope[0][:, :SIZE].abs().min() > 0 and (slope[1] is not None and slope[1].any()) == (key != "e2ip_leverage")
    assert torch.autograd.gradcheck(value, inputs, atol=1e-7, rtol=1e-6)


# Forms


class Flat(torch.nn.Module):
    """Tensors in, tensors out: what exporters take."""

    def __init__(self, leverage):
        super().__init__()
        self.leverage = leverage

    def forward(self, x, species, heads, lengths, envelope, sender, receiver):
        *support, around = self.leverage(x, species, heads, Neighbours(lengths, envelope, sender, receiver))
        return *support, *around


def flat(count=12, pairs=20):
    return *draw(count), *random_neighbours(count, pairs)


def check_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("fitted", [True, False])
def test_scripted_equals_eager(leverage, fitted):
    leverage.fitted.fill_(fitted)
    scripted = torch.jit.script(leverage)
    x, species, heads = draw()
    for arguments in ((x, species, heads, random_neighbours()), (x, species, heads), (x[:0], species[:0], heads[:0])):
        check_same(scripted(*arguments), leverage(*arguments))


def test_traced_equals_eager_whatever_is_fitted_later(leverage, fill_leverage):
    """As NequIP compiles: buffers are inputs, numbers of atoms and pairs symbols."""
    module = Flat(leverage)
    leverage.reset()

    def call(buffers, *arguments):
        return torch.func.functional_call(module, buffers, arguments)

    traced = make_fx(call, tracing_mode="symbolic")(dict(module.named_buffers()), *flat())
    check_same(traced(dict(module.named_buffers()), *flat(9, 30)), module(*flat(9, 30)))
    assert (module(*flat(9, 30))[0] == -1).all()
    fill_leverage(leverage, REGIONS, seed=3)
    check_same(traced(dict(module.named_buffers()), *flat(9, 30)), module(*flat(9, 30)))
    assert module(*flat(9, 30))[0].isfinite().all()


def test_exported_equals_eager_for_other_numbers_of_atoms_and_pairs(leverage):
    module = Flat(leverage)
    atoms, edges = torch.export.Dim("atoms", min=2), torch.export.Dim("edges", min=2)
    shapes = [{0: atoms}] * 3 + [{0: edges}] * 4
    exported = torch.export.export(module, flat(), dynamic_shapes=tuple(shapes)).module()
    check_same(exported(*flat(9, 30)), module(*flat(9, 30)))
    # What was fitted travels in it.
    assert (module(*flat())[0] >= 0).all()


def test_single_precision_is_that_of_double(leverage):
    """Far from the origin, as hosts' features are: centres are taken off before anything else."""
    x, species, heads = draw(200)
    leverage.centres.add_(50.0).copy_(leverage.centres.float())
    x, neighbours = (x + 50.0).float(), random_neighbours(200, 300)
    expected = leverage(x.double(), species, heads, neighbours)
    neighbours = neighbours._replace(lengths=neighbours.lengths.float(), envelope=neighbours.envelope.float())
    found = leverage.float()(x, species, heads, neighbours)
    for name in ("leverage", "distance"):
        single = getattr(found, name)
        assert single.dtype == torch.float32
        torch.testing.assert_close(single.double(), getattr(expected, name), rtol=2e-5, atol=1e-5)


# Saving, heads


def test_state_dict_comes_back_whatever_the_number_of_regions(leverage, fill_leverage):
    arguments = *draw(), random_neighbours()
    for before in (1, 3, 20):
        fresh = Leverage(SIZE, SPECIES, 2)
        fill_leverage(fresh, [before] + [1] * 5, seed=7)
        fresh.load_state_dict(leverage.state_dict())
        check_same(fresh(*arguments), leverage(*arguments))
        # A copy: what is fitted later leaves the other alone.
        fresh.growth.zero_()
        assert (leverage.growth > 0).all()


def test_state_dict_of_an_unfitted_leverage_leaves_it_unfitted(leverage):
    leverage.load_state_dict(Leverage(SIZE, SPECIES, 2).state_dict())
    assert not leverage.fitted and not leverage.regions().any()


def test_state_dict_of_another_network_is_refused_and_changes_no_shape(leverage):
    """MACE goes on with the model that it has built."""
    other = Leverage(SIZE + 2, SPECIES, 2)
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict(leverage.state_dict())
    assert other(torch.zeros(3, SIZE + 2), torch.zeros(3, dtype=torch.long)).leverage.shape == (3,)


def test_buffers_have_no_name_that_mace_slices():
    names = [name for name, _ in Leverage(SIZE, SPECIES, 2).named_buffers()]
    assert not [name for name in names for word in ("scale", "shift", "readouts", "atomic_energies") if word in name]
    assert not list(Leverage(SIZE, SPECIES).parameters())


@pytest.mark.parametrize("head", [0, 1])
def test_one_head_of_several(leverage, head):
    alone = Leverage(SIZE, SPECIES)
    alone.take_head(leverage, head)
    assert alone.regions().tolist() == REGIONS[3 * head : 3 * head + 3]
    assert alone.whitening.shape[1] == len(set(leverage.axes[3 * head : 3 * head + 3].tolist()))
    x, species, _ = draw(30)
    species = torch.arange(30) % 3
    neighbours = random_neighbours(30)
    for heads in (None, torch.zeros(30, dtype=torch.long)):
        found = alone(x, species, heads, neighbours)
        expected = leverage(x, species, torch.full((30,), head), neighbours)
    check_same(*([v if v.dim() == 2 else v.expand(30) for v in support[:-1]] for support in (found, expected)))
    alone.growth.zero_()
    assert (leverage.growth > 0).all()


def test_a_head_that_was_never_fitted(fill_leverage):
    leverage, alone = Leverage(SIZE, SPECIES, 2), Leverage(SIZE, SPECIES)
    fill_leverage(leverage, [1, 1, 1, 0, 0, 0])
    alone.take_head(leverage, 1)
    x, species, _ = draw()
    torch.testing.assert_close(alone(x, species).leverage, torch.full((12,), 1e6))
    alone.take_head(Leverage(SIZE, SPECIES, 2), 1)
    assert not alone.fitted


def test_heads_are_left_out_where_there_is_one(fill_leverage):
    leverage = Leverage(SIZE, SPECIES)
    fill_leverage(leverage)
    x, species, heads = draw()
    check_same(leverage(x, species, heads), leverage(x, species))


def test_resize_makes_room_and_forgets(leverage):
    leverage.resize(3, 4)
    assert not leverage.fitted and not leverage.regions().any()
    assert leverage.whitening.shape == (SIZE, 3, SIZE) and leverage.axes.tolist() == [0] * 6
    assert leverage.region_offsets.shape == leverage.region_stretch.shape == (6, 4, SIZE)
    assert leverage.region_norms.shape == (6, 4)
    leverage.fitted.fill_(True)
    torch.testing.assert_close(leverage(*draw()).leverage, torch.full((12,), 1e6))
