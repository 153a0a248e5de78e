"""Layout, trunk, leverage and family together: equivariance, pools, several data sets, scripting, old weights."""

import copy
import re

import pytest
import torch

from e2ip_plugins import __version__, families
from e2ip_plugins.errors import InputError
from e2ip_plugins.leverage.module import Neighbours
from e2ip_plugins.readout.layout import Edges, Layout
from e2ip_plugins.readout.readout import Readout, model_name
from e2ip_plugins.readout.settings import Settings

F64 = torch.float64

#: 6 scalars, 4 vectors, 3 tensors
FULL = Layout([(0, 6)], [(6, 4)], [(18, 3)], num_species=2)
#: the same without tensors: edges are pooled
POOLED = Layout([(0, 6)], [(6, 4)], [], num_radial=5, num_species=2)


def readout(layout=FULL, family=families.DEFAULT, num_heads=1, **options):
    built = Readout(Settings.of(family, options, 0.05), layout, num_heads, seed=1)
    with torch.no_grad():  # far from the nearly isotropic start
        for trunk in built.trunks:
            trunk.out.weight.normal_(generator=torch.Generator().manual_seed(2))
    return built


def features(count=10, edges=30):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 33, generator=generator)
    vectors, radial = torch.randn(edges, 3, generator=generator), torch.randn(edges, 5, generator=generator)
    return x, Edges(vectors, radial, *torch.randint(0, count, (2, edges), generator=generator))


def species_of(x):
    return torch.arange(x.shape[0]) % 2


def neighbours_of(edges):
    lengths = edges.vectors.norm(dim=1)
    return Neighbours(lengths, torch.exp(-lengths), edges.sender, edges.receiver)


def evaluate(built, x, edges=None, heads=None):
    """All outputs; edges, where there are some, are also what the leverage sees of neighbours."""
    return built(x, x, species_of(x), None if edges is None else neighbours_of(edges), edges, heads)


def rotate(x, edges, q, wigner2):
    vectors = (x[:, 6:18].view(-1, 4, 3) @ q.T).flatten(1)
    tensors = (x[:, 18:].view(-1, 3, 5) @ wigner2(q).T).flatten(1)
    return torch.cat([x[:, :6], vectors, tensors], dim=1), edges._replace(vectors=edges.vectors @ q.T)


@pytest.mark.parametrize("layout", [FULL, POOLED], ids=["tensors", "pool"])
@pytest.mark.parametrize("family", [name for name, kind in sorted(families.table().items()) if not kind.takes_forces])
def test_equivariant_with_reflections(family, layout, wigner2, fill_leverage):
    """A rival that is not must be seen not to be."""
    built = readout(layout, family, **({"evidence": "leverage"} if family == families.DEFAULT else {}))
    fill_leverage(built.leverage)
    x, edges = features()
    out = evaluate(built, x, edges)
    for seed in range(20):
        q, _ = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(seed)))
        q = -q if seed % 2 else q
        turned_x, turned_edges = rotate(x, edges, q, wigner2)
        turned = evaluate(built, turned_x, turned_edges)
        for key in ("forces_cov", "forces_aleatoric_cov", "forces_epistemic_cov"):
            expected = q @ out[key] @ q.T
            error = (turned[key] - expected).norm()
            if families.get(family).equivariant:
                assert error <= 1e-12 * expected.norm()
            elif key == "forces_cov":
                assert error > 1e-2 * expected.norm()
        for key in ("forces_epistemic_std", "e2ip_leverage"):
            torch.testing.assert_close(turned[key], out[key], rtol=1e-11, atol=0)


@pytest.mark.parametrize("layout", [FULL, POOLED], ids=["tensors", "pool"])
def test_default_family_is_anisotropic(layout):
    x, edges = features()
    eigenvalues = torch.linalg.eigvalsh(evaluate(readout(layout), x, edges)["forces_cov"])
    assert (eigenvalues[:, 2] > 1.5 * eigenvalues[:, 0]).all(), "isotropy would make the equivariance tests vacuous"


def test_a_family_without_tensors_has_no_pool(toy_family):
    built = readout(POOLED, toy_family.name)
    x, _ = features()
    out = evaluate(built, x)
    assert not built.has_pool and out["e2ip_coefficients"].shape == (10, 1)
    torch.testing.assert_close(out["forces_cov"], torch.exp(2 * out["isotropic_log_std"])[:, None, None] * torch.eye(3))


def test_every_atom_is_read_by_the_trunk_of_its_data_set():
    built = readout(num_heads=3)
    x, edges = features(9)
    with torch.no_grad():
        for i, trunk in enumerate(built.trunks):
            trunk.out.bias[0] = float(i)
    heads = torch.arange(9) % 3
    out = evaluate(built, x, edges, heads)
    for i, trunk in enumerate(built.trunks):
        alone = readout()
        alone.trunks[0].load_state_dict(trunk.state_dict())
        for key, value in evaluate(alone, x, edges).items():
            torch.testing.assert_close(out[key][heads == i], value[heads == i], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("layout", [FULL, POOLED], ids=["tensors", "pool"])
@pytest.mark.parametrize("num_heads", [1, 2])
@pytest.mark.parametrize("fitted", [False, True], ids=["unfitted", "fitted"])
def test_scripted_equals_eager_also_without_atoms(layout, num_heads, fitted, fill_leverage):
    built = readout(layout, num_heads=num_heads, evidence="leverage")
    if fitted:
        fill_leverage(built.leverage)
    scripted = torch.jit.script(built)
    for count in (0, 5):
        x, edges = features(max(count, 1))
        x, edges = (x, edges) if count else (x[:0], Edges(*(part[:0] for part in edges[:4])))
        heads = torch.arange(count) % num_heads
        found = evaluate(scripted, x, edges, heads)
        for key, value in evaluate(built, x, edges, heads).items():
            torch.testing.assert_close(found[key], value, equal_nan=True)
            assert value.shape[0] == count
            assert value.isfinite().all()


def test_name_of_a_readout(fill_leverage):
    built = readout(evidence="leverage")
    name = model_name(built)
    assert re.fullmatch("readout-[0-9a-f]{12}", name)
    assert name == model_name(readout(evidence="leverage")) == model_name(torch.jit.script(built))
    assert model_name(None) is None
    # In double precision, and as what was trained in it and is used in single.
    assert name == model_name(copy.deepcopy(built).double())
    trained = readout(evidence="leverage").double()
    with torch.no_grad():
        trained.trunks[0].out.bias += 0.1
    names = [name, model_name(trained)]
    assert names[1] == model_name(trained.float())
    fill_leverage(built.leverage)
    names += [model_name(built), model_name(readout(num_heads=2, evidence="leverage"))]
    names += [model_name(readout(family="mve"))]
    built.leverage.surplus.zero_()
    names += [model_name(built)]
    assert len(set(names)) == 6


def test_ghost_atoms_are_left_out():
    """Features of ghosts follow those of the local atoms; edges come from them."""
    built = readout(POOLED)
    x, edges = features()
    local = edges._replace(receiver=edges.receiver % 6, senders=torch.nn.functional.pad(x[:, :6], (0, 0, 0, 0)))
    out = built(x[:6], x, species_of(x[:6]), edges=local)
    assert out["forces_cov"].shape == (6, 3, 3) and out["e2ip_leverage"].shape == (6,)
    whole = evaluate(built, x, edges._replace(receiver=edges.receiver % 6))
    torch.testing.assert_close(out["forces_cov"], whole["forces_cov"][:6])


def test_double_outputs_of_a_single_precision_readout():
    settings = Settings.of(families.DEFAULT, {}, 0.05)
    built = Readout(settings, FULL, seed=1, double_outputs=True).float()
    x, _ = features()
    for key, value in evaluate(built, x.float()).items():
        assert value.dtype == F64, key


@pytest.mark.parametrize("layout", [FULL, POOLED, POOLED._replace(vectors=[])], ids=["all", "pool", "pool alone"])
@pytest.mark.parametrize("name", [families.DEFAULT, "isotropic"])
def test_every_parameter_gets_a_gradient_from_the_start(toy_family, name, layout):
    """Weights without one would end a training on several processes."""
    given = {"evidence": "independent"} if name == families.DEFAULT else {}
    built = Readout(Settings.of(name, given, 0.05), layout)
    x, edges = features()
    outputs = evaluate(built, x, edges)
    built.family.force_loss(torch.randn(10, 3), outputs).sum().backward()
    for name, parameter in built.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("name", [families.DEFAULT, "isotropic"])
def test_leverage_comes_with_every_family_once_it_is_fitted(toy_family, name, fill_leverage):
    built = readout(family=name)
    x, edges = features()
    before = evaluate(built, x, edges)["e2ip_leverage"]
    assert before.shape == (10,) and (before == -1).all()
    fill_leverage(built.leverage)
    after = evaluate(built, x, edges)["e2ip_leverage"]
    assert after.isfinite().all()
    alone = built.leverage(x[:, :6], species_of(x))
    assert torch.equal(after, alone.leverage), "neighbours matter for what grows, not for an atom's own leverage"


def test_leverage_reads_the_blocks_of_the_layout(fill_leverage):
    """Two layers' scalars, others' columns in between."""
    built = readout(Layout([(0, 6), (18, 2)], [(6, 4)], [], num_radial=5, num_species=2))
    fill_leverage(built.leverage)
    x, edges = features()
    found = evaluate(built, x, edges)["e2ip_leverage"]
    expected = built.leverage(torch.cat([x[:, :6], x[:, 18:20]], dim=1), species_of(x))
    assert torch.equal(found, expected.leverage)


def test_strictly_local_models_average_over_no_neighbours():
    assert readout(FULL._replace(strictly_local=True)).leverage.strictly_local
    assert not readout(FULL).leverage.strictly_local


def test_initial_weights_leave_the_global_stream_alone():
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    first, second = (Readout(Settings.of(families.DEFAULT, {}, 0.05), POOLED, seed=7) for _ in range(2))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_weights_in_another_format_are_refused_and_copies_of_todays_are_read():
    built = readout()
    state = built.state_dict()
    built.load_state_dict(dict(state))
    assert state._metadata[""]["release"] == __version__
    for saved, message in (
        ({"version": 2}, "this checkpoint was written before e2ip-plugins 0.2.0"),
        ({"version": 99}, "this checkpoint was written by a newer e2ip-plugins in format 99"),
        ({"version": 99, "release": "0.9.0"}, "this checkpoint was written by e2ip-plugins 0.9.0 in format 99"),
    ):
        state._metadata[""] = saved
        with pytest.raises(InputError, match=message):
            built.load_state_dict(state)
