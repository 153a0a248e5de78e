"""The fit of MACE models, what their leverage is like, and every place where fitted models go."""

import copy

import ase.io
import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule

from e2ip_plugins import families
from e2ip_plugins.errors import InputError, UncertaintyWarning
from e2ip_plugins.predictions.labelled import Label
from mace_ext.fitting.passes import Graphs

IRREPS = ["8x0e", "8x0e+8x1o", "8x0e+8x1o+8x2e"]
LEVERAGE = (("evidence", "leverage"),)
NAMES = [key.name for key in families.get("e2ip").output_keys()] + ["e2ip_leverage"]


# The fit itself


def test_the_fit_depends_on_no_batch_size_and_touches_nothing_else(make_model, fit, make_batch, frames):
    first, second = make_model(options=LEVERAGE), make_model(options=LEVERAGE)
    weights = [parameter.detach().clone() for parameter in first.parameters()]
    first.products[0].linear.weight.requires_grad_(False)
    learning = [parameter.requires_grad for parameter in first.parameters()]
    second.eval()
    state = torch.random.get_rng_state()
    fit(first, batch_size=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    fit(second, batch_size=7)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), weights, strict=True))
    assert [parameter.requires_grad for parameter in first.parameters()] == learning
    assert first.training and not second.training
    found, expected = first(make_batch(frames)), second(make_batch(frames))
    for name in NAMES:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-9)
    torch.testing.assert_close(found["e2ip_leverage"], expected["e2ip_leverage"], rtol=1e-9, atol=1e-9)


def test_the_leverage_reads_every_layers_scalars_of_a_species(make_fitted, make_batch, frames):
    """8x0e+8x1o in the first layer, 8x0e in the last; what it makes of them is tested with the core."""
    model, seen = make_fitted(), {}

    def keep(_, inputs, __):
        seen.update(zip(("scalars", "species", "heads", "neighbours"), inputs, strict=True))

    model.e2ip_readout.leverage.register_forward_hook(keep)
    batch = make_batch(frames)
    features = model(batch)["node_feats"].detach()
    assert torch.equal(seen["scalars"], torch.cat([features[:, :8], features[:, 32:]], dim=1))
    numbers = np.concatenate([atoms.numbers for atoms in frames])
    assert model.atomic_numbers[seen["species"]].tolist() == numbers.tolist()
    index = batch["edge_index"]
    lengths = (batch["positions"][index[1]] - batch["positions"][index[0]] + batch["shifts"]).norm(dim=-1).detach()
    torch.testing.assert_close(seen["neighbours"].lengths, lengths)
    # A polynomial cutoff: 1 at 0, falling, 0 from 4 Å on.
    envelope = seen["neighbours"].envelope[lengths.argsort()]
    assert (envelope.diff() <= 1e-12).all() and 0 < envelope[0] < 1 and envelope[-1] < 0.05


def test_configurations_without_weight_or_finite_forces_do_not_count(
    make_model, fit, fit_sets, labelled, training_frames, validation_frames
):
    class Weighted(Graphs):
        """Graphs of which only the first have a weight."""

        def __init__(self, frames, name, count):
            super().__init__(frames, second, "Default")
            self.name, self.count = name, count

        def __getitem__(self, index):
            graph = super().__getitem__(index)
            setattr(graph, self.name, getattr(graph, self.name) * (index < self.count))
            return graph

    first, second = make_model(options=LEVERAGE), make_model(options=LEVERAGE)
    lost = [frame._replace(forces=Label(np.full_like(frame.counted_forces, 1e3))) for frame in validation_frames]
    partly = [frame._replace(forces=None) for frame in lost]
    expected = fit(first)
    training = Weighted([*training_frames, *labelled("CH3CH2OH", 3, 2, width=0.4)], "weight", 16)
    found = fit_sets(second, training, Weighted([*validation_frames, *lost, *partly], "forces_weight", 8))
    assert found.constants[0].atoms == expected.constants[0].atoms == 72
    assert found.constants[0].configurations == 8
    assert found.constants[0].growth == pytest.approx(expected.constants[0].growth, rel=1e-3)
    assert found.atoms == expected.atoms


def test_features_that_are_not_finite_are_an_error(make_model, fit):
    model = make_model(options=LEVERAGE)
    with torch.no_grad():
        model.node_embedding.linear.weight.fill_(float("nan"))
    with pytest.raises(InputError, match="features of 120 training atoms are not finite"):
        fit(model)


# What the leverage is like


@pytest.mark.parametrize("irreps", IRREPS)
def test_invariances(make_fitted, make_batch, irreps):
    from scipy.spatial.transform import Rotation

    model, rng = make_fitted(irreps), np.random.default_rng(0)
    atoms = molecule("CH3CH2OH")
    atoms.rattle(0.15, seed=7)
    order = rng.permutation(len(atoms))
    others = [atoms.copy() for _ in range(4)]
    others[0].positions = atoms.positions @ Rotation.random(rng=rng).as_matrix().T
    others[1].positions = -atoms.positions
    others[2].positions += [3.0, -20.0, 7.0]
    others[3] = atoms[order]
    expected = model(make_batch([atoms]))
    # One batch: what else is in it does not matter.
    found = model(make_batch([*others, molecule("H2O")]))
    for name in ("e2ip_leverage", "forces_epistemic_std", "e2ip_kappa"):
        rows = found[name].detach()[: 4 * len(atoms)].reshape(4, len(atoms))
        for i, own in enumerate(rows):
            reference = expected[name].detach()[torch.from_numpy(order)] if i == 3 else expected[name].detach()
            assert ((own - reference).abs() / reference.abs()).max() < 1e-10, (name, i)


def test_a_supercell_has_the_leverage_of_its_cell(make_fitted, make_batch):
    model = make_fitted()
    for cell in (bulk("C", a=3.6), Atoms("C", cell=[2.5] * 3, pbc=True)):
        small, large = (model(make_batch([atoms])) for atoms in (cell, cell.repeat((2, 3, 1))))
        for name in ("e2ip_leverage", "forces_epistemic_std"):
            expected = small[name].detach().repeat(6)
            assert ((large[name].detach() - expected).abs() / expected).max() < 1e-10


def test_nonsense_is_less_certain_than_training_atoms(make_fitted, make_batch, training_frames):
    model = make_fitted()
    of_training = model(make_batch([frame.atoms for frame in training_frames]))
    nonsense = [Atoms("C"), Atoms("CH", [[0, 0, 0], [0, 0, 0.3]]), Atoms("C", cell=[2.5] * 3, pbc=True)]
    found = model(make_batch(nonsense))
    for name in ("e2ip_leverage", "forces_epistemic_std"):
        assert found[name].min() > torch.quantile(of_training[name], 0.99), name


def test_atoms_at_the_same_place_have_infinite_leverage_or_none(make_fitted, make_batch):
    found = make_fitted()(make_batch([Atoms("CHO", [[0, 0, 0], [0, 0, 0], [1.5, 0, 0]])]))["e2ip_leverage"]
    assert not torch.isfinite(found[:2]).any()


@pytest.mark.parametrize("irreps", IRREPS[:2])
def test_smooth_where_an_atom_leaves_the_cutoff(make_fitted, make_batch, irreps):
    from mace_ext import uncertainty_gradient

    model, cutoff = make_fitted(irreps), 4.0

    def at(distance):
        atoms = Atoms("CHHO", [[0, 0, 0], [-0.6, 0.8, 0.1], [-0.6, -0.3, 0.8], [distance, 0, 0]])
        value, slope = uncertainty_gradient(model, make_batch([atoms]), lambda o: o["e2ip_kappa"].log().sum())
        return value.item(), slope[3, 0].item()

    outside, slope_outside = at(cutoff + 1e-4)
    inside, slope_inside = at(cutoff - 1e-4)
    within, slope_within = at(0.75 * cutoff)
    assert slope_outside == 0.0 and abs(within - outside) > 1e-4 * abs(outside)
    assert abs(inside - outside) < 1e-6 * abs(within - outside)
    assert abs(slope_inside) < 1e-4 * abs(slope_within)


@pytest.mark.parametrize("name", ["forces_epistemic_std", "e2ip_leverage"])
def test_uncertainty_gradient_agrees_with_finite_differences(make_fitted, frames, name):
    from mace.calculators import MACECalculator

    calc, step = MACECalculator(models=[make_fitted()], device="cpu", default_dtype="float64"), 1e-5
    for seed, atoms in enumerate(frames):
        direction = np.random.default_rng(seed).normal(size=atoms.positions.shape)
        _, gradient = calc.uncertainty_gradient(atoms, name)
        sums = []
        for sign in (1, -1):
            moved = atoms.copy()
            moved.positions += sign * step * direction
            calc.calculate(moved)
            sums.append(calc.results[name].sum())
        assert (gradient * direction).sum() == pytest.approx((sums[0] - sums[1]) / (2 * step), rel=1e-6)


# Where fitted models go


@pytest.mark.parametrize("irreps", IRREPS[:2])
def test_torchscript_equals_eager(make_fitted, make_batch, frames, tmp_path, irreps):
    from e3nn.util import jit

    model = make_fitted(irreps)
    torch.jit.save(jit.compile(copy.deepcopy(model)), tmp_path / "compiled.model")
    compiled, expected = torch.jit.load(tmp_path / "compiled.model"), model(make_batch(frames))
    for _ in range(2):
        output = compiled(make_batch(frames))
        for name in NAMES:
            torch.testing.assert_close(output[name], expected[name], rtol=1e-9, atol=1e-12)


def test_a_rebuilt_model_takes_the_leverage_over(make_fitted, make_model, make_batch, frames):
    """As MACE's conversions do it: tensors of the same name and shape are copied, the others forgotten."""
    from mace.tools.scripts_utils import extract_config_mace_model

    model = make_fitted()
    rebuilt = type(model)(**extract_config_mace_model(model))
    state, own = model.state_dict(), rebuilt.state_dict()
    rebuilt.load_state_dict({key: state[key] if state[key].shape == own[key].shape else own[key] for key in own})
    expected, found = model(make_batch(frames)), rebuilt(make_batch(frames))
    assert all(torch.equal(found[name], expected[name]) for name in NAMES)
    # Fitted weights into an unfitted model, and back.
    fresh = make_model(options=LEVERAGE)
    unfitted = copy.deepcopy(fresh.state_dict())
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(make_batch(frames))["e2ip_kappa"], expected["e2ip_kappa"])
    fresh.load_state_dict(unfitted)
    assert (fresh(make_batch(frames))["e2ip_leverage"] == -1).all()


@pytest.mark.parametrize("kept", ["one", "two"])
def test_the_kept_head_keeps_its_leverage(make_model, make_batch, frames, labelled, fit_sets, kept):
    from mace.tools.scripts_utils import remove_pt_head

    heads = ["one", "two"]
    model = make_model(heads=tuple(heads), options=LEVERAGE)
    data = {
        "one": (labelled("CH3CH2OH", 8, 0), labelled("CH3CH2OH", 4, 1)),
        "two": (labelled("CH3OH", 8, 2, 0.2), labelled("CH3OH", 4, 3, 0.2)),
    }
    sets = [torch.utils.data.ConcatDataset([Graphs(data[h][i], model, h) for h in heads]) for i in (0, 1)]
    report = fit_sets(model, *sets, batch_size=4)
    assert set(report.constants) == {0, 1}
    expected = model(make_batch(frames, heads=heads, head=kept))
    other = model(make_batch(frames, heads=heads, head=heads[kept == "one"]))
    assert not torch.allclose(expected["e2ip_leverage"], other["e2ip_leverage"])
    single = remove_pt_head(model, kept)
    found = single(make_batch(frames, heads=[kept], head=kept))
    for name in NAMES:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-13)
    assert single.e2ip_readout.leverage.growth.shape == (1,)


def test_in_results_committees_and_padding(make_fitted, make_batch, frames, recwarn):
    from mace.calculators import MACECalculator

    fitted, other = make_fitted(), make_fitted("8x0e")
    expected = [model(make_batch(frames[:1]))["e2ip_leverage"].detach().numpy() for model in (fitted, other)]

    def results(*models, **settings):
        calc = MACECalculator(models=list(models), device="cpu", default_dtype="float64", **settings)
        assert "e2ip_leverage" in calc.implemented_properties
        calc.calculate(frames[0])
        return calc.results["e2ip_leverage"]

    np.testing.assert_allclose(results(fitted), expected[0], rtol=1e-10)
    np.testing.assert_allclose(results(fitted, energy_units_to_eV=2.0), expected[0], rtol=1e-10)
    np.testing.assert_allclose(results(fitted, pad_num_atoms=16, pad_num_edges=256), expected[0], rtol=1e-10)
    np.testing.assert_allclose(results(fitted, other), np.mean(expected, axis=0), rtol=1e-10)
    assert not [warning for warning in recwarn if "never fitted" in str(warning.message)]


def test_an_unfitted_model_says_so_and_gives_no_leverage(make_model, frames, predict, tmp_path, capsys):
    from mace.calculators import MACECalculator

    model, coupled = make_model(options=LEVERAGE), make_model(options=(("evidence", "coupled"),))
    with pytest.warns(UncertaintyWarning, match="was never fitted.*`e2ip fit`"):
        calc = MACECalculator(models=[model], device="cpu", default_dtype="float64")
    calc.calculate(frames[0])
    assert "e2ip_leverage" not in calc.results and "e2ip_leverage" not in calc.implemented_properties
    expected = MACECalculator(models=[coupled], device="cpu", default_dtype="float64")
    expected.calculate(frames[0])
    np.testing.assert_array_equal(calc.results["forces_cov"], expected.results["forces_cov"])
    with pytest.raises(InputError, match="unknown uncertainty 'e2ip_leverage'"):
        calc.uncertainty_gradient(frames[0], "e2ip_leverage")
    torch.save(model, tmp_path / "unfitted.model")
    ase.io.write(tmp_path / "in.xyz", frames)
    written = predict(tmp_path / "unfitted.model", tmp_path / "in.xyz", tmp_path / "out.xyz", batch_size=1)
    assert "MACE_e2ip_leverage" not in written[0].arrays
    assert capsys.readouterr().err.count("was never fitted") == 1
