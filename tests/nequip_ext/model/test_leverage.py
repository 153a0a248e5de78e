"""The leverage of NequIP models: physics, atoms where it must not be small, gradients, locality."""

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import molecule
from nequip.data import AtomicDataDict

from e2ip_plugins.fitting.batches import in_order
from nequip_ext import uncertainty_gradient
from nequip_ext.fitting.passes import batching, fit_model
from nequip_ext.model.readout import find_readout

NAMES = ("e2ip_leverage", "forces_epistemic_std", "e2ip_kappa")


@pytest.fixture(scope="module")
def labelled(to_data):
    """Function from a seed to frames with reference forces: a molecule, a crystal, a smaller molecule, rattled."""

    def make(seed):
        frames = [molecule("CH3CH2OH"), molecule("CH3OH", cell=[4.5, 5.0, 5.5], pbc=True), molecule("H2O")]
        found = []
        for number, atoms in enumerate(frames):
            atoms.rattle(0.1, seed=10 * seed + number)
            data = to_data(atoms)
            generator = torch.Generator().manual_seed(10 * seed + number)
            found.append({**data, "forces": 0.1 * torch.randn(data["pos"].shape, generator=generator)})
        return found

    return make


@pytest.fixture(scope="module")
def fit(labelled):
    """Function that fits a model to 12 batches of three frames, 9 for its moments and 3 for its constants."""

    def run(model):
        model.eval()
        data = [frame for seed in range(12) for frame in labelled(seed)]
        return fit_model(model, *(in_order([part], batching(3)) for part in (data[:27], data[27:])))

    return run


@pytest.fixture(scope="module")
def fitted(make_model, fit):
    """A model with readout, fitted."""
    _, model = make_model(evidence="leverage")
    fit(model)
    return model


@pytest.fixture(scope="module")
def predict(to_data):
    def run(model, atoms):
        return {name: value.detach() for name, value in model(to_data(atoms)).items()}

    return run


def close(got, expected, rtol=1e-10):
    for name in NAMES:
        torch.testing.assert_close(got[name], expected[name], rtol=rtol, atol=1e-12, msg=name)


def test_a_fit_says_what_it_found(make_model, fit):
    _, model = make_model(evidence="leverage")
    report = fit(model)
    assert report.atoms == {(0, 0): 9 * (6 + 4 + 2), (0, 1): 9 * 3, (0, 2): 9 * 3}
    constants = report.constants[0]
    assert constants.configurations == 9 and constants.atoms == 3 * (9 + 6 + 3)
    assert constants.nll[1] < constants.nll[0]
    assert bool(find_readout(model).leverage.fitted)


def test_mean_over_the_training_atoms_is_one(fitted, labelled):
    found, kinds = [], []
    for seed in range(9):
        data = AtomicDataDict.batched_from_list(labelled(seed))
        found.append(fitted(dict(data))["e2ip_leverage"].flatten())
        kinds.append(data["atom_types"])
    found, kinds = torch.cat(found), torch.cat(kinds)
    for kind in range(3):
        assert found[kinds == kind].mean().item() == pytest.approx(1.0, rel=1e-6)


def test_moves_and_order(fitted, predict, frames):
    """Rotations with reflections, translations, and permutations."""
    atoms = frames[1]
    expected = predict(fitted, atoms)
    move = -np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0]
    turned = atoms.copy()
    turned.set_cell(atoms.cell @ move.T)
    turned.positions = atoms.positions @ move.T + [0.3, -1.0, 2.0]
    close(predict(fitted, turned), expected)
    order = np.random.default_rng(1).permutation(len(atoms))
    close(predict(fitted, atoms[order]), {name: expected[name][order] for name in NAMES})


def test_batches_and_supercells(fitted, predict, frames, to_data):
    together = fitted(AtomicDataDict.batched_from_list([to_data(atoms) for atoms in frames]))
    alone = [predict(fitted, atoms) for atoms in frames]
    close(together, {name: torch.cat([part[name] for part in alone]) for name in NAMES}, rtol=1e-9)
    large = predict(fitted, frames[1] * (2, 1, 2))
    close(large, {name: alone[1][name].repeat(4, 1) for name in NAMES}, rtol=1e-9)


def test_smooth_at_the_cutoff(fitted, predict):
    """An atom that comes into the range of another one (4 Å) changes nothing at first."""
    water = molecule("H2O")

    def at(distance):
        neighbour = Atoms("O", [water.positions[0] + [0.0, 0.0, distance]])
        return predict(fitted, water + neighbour)["e2ip_leverage"][:3]

    inside, outside = at(4.0 - 1e-5), at(4.0 + 1e-5)
    assert (inside - outside).abs().max() < 1e-9 * outside.abs().max()
    assert (at(3.0) - outside).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["e2ip_leverage", "forces_epistemic_std"])
def test_gradient(fitted, frames, to_data, name):
    """Against finite differences."""
    data = to_data(frames[1])
    value, gradient = uncertainty_gradient(fitted, data, name)
    direction = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(0))

    def at(step):
        return fitted({**data, "pos": data["pos"] + step * direction})[name].sum().item()

    h = 1e-4
    slope = (8.0 * (at(h) - at(-h)) - (at(2.0 * h) - at(-2.0 * h))) / (12.0 * h)
    assert (gradient * direction).sum().item() == pytest.approx(slope, rel=1e-6)
    assert value.shape == (len(frames[1]),)


def test_what_was_never_seen(fitted, predict, frames):
    """An isolated atom, a collapsed pair and a dense crystal lie outside of what any known atom has."""
    usual = torch.cat([predict(fitted, atoms)["e2ip_leverage"] for atoms in frames]).max()
    strange = [Atoms("C"), Atoms("CH", [[0, 0, 0], [0, 0, 0.3]]), Atoms("C", cell=[2.5] * 3, pbc=True)]
    for atoms in strange:
        assert predict(fitted, atoms)["e2ip_leverage"].min() > 2.0 * usual


def test_atoms_at_the_same_place(fitted, predict):
    """No number that one could believe."""
    atoms = molecule("CH3OH") + Atoms("H", [molecule("CH3OH").positions[3]])
    found = predict(fitted, atoms)["e2ip_leverage"].flatten()
    assert torch.isinf(found[[3, 6]]).all() and not torch.isnan(found).any()


def test_a_species_without_training_atoms(make_model, labelled, predict):
    _, model = make_model(evidence="leverage")
    model.eval()
    water = in_order([[labelled(seed)[2] for seed in range(16)]], batching(2))
    report = fit_model(model, water, water)
    assert any("no training atoms of C" in warning for warning in report.warnings)
    output = predict(model, molecule("CH4"))
    assert output["e2ip_leverage"][0] >= 1e5 and torch.isfinite(output["forces_cov"]).all()


def test_before_the_fit_it_is_unknown(make_model, predict, frames):
    """And a model in mode ``leverage`` is one in mode ``coupled``."""
    _, model = make_model(evidence="leverage")
    _, coupled = make_model(evidence="coupled")
    got, expected = predict(model.eval(), frames[0]), predict(coupled.eval(), frames[0])
    assert (got["e2ip_leverage"] == -1).all() and torch.equal(got["forces_cov"], expected["forces_cov"])


def test_other_modes_have_a_leverage_and_stay_as_they_are(make_model, fit, predict, frames):
    _, model = make_model(evidence="independent")
    before = predict(model.eval(), frames[0])
    assert fit(model).constants == {}
    after = predict(model, frames[0])
    assert torch.equal(before["forces_cov"], after["forces_cov"])
    assert after["e2ip_leverage"].min() > 0


def test_lammps_ml_iap_gives_no_neighbours(fitted, to_data, frames):
    """The leverage of ghost atoms is not known there: own leverage alone, through the same module."""
    readout = next(module for module in fitted.modules() if type(module).__name__ == "GraphReadout")
    data = to_data(frames[0])
    assert readout._neighbours({**data, AtomicDataDict.LMP_MLIAP_DATA_KEY: torch.zeros(1)}) is None


def test_backbones_without_an_envelope(fitted, to_data, frames):
    """Nothing to average with; atoms at the same place are still noticed."""
    readout = next(module for module in fitted.modules() if type(module).__name__ == "GraphReadout")
    found = readout._neighbours(to_data(frames[0]))
    assert found.lengths.min() > 0.5 and not found.envelope.any()
