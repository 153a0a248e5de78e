"""Allegro: edge features only, through E2IPModel, stock ``nequip-train`` and export."""

import importlib.util

import numpy as np
import pytest
import torch

from e2ip_plugins import families
from e2ip_plugins.keys import LEVERAGE
from nequip_ext import E2IPCalculator
from nequip_ext.model.readout import find_readout

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("allegro") is None, reason="Allegro is not installed (pip install nequip-allegro)"
)


def test_energies_and_physics(make_model, allegro_config, frames, to_data, anisotropy, turning_error):
    """Stock energies and forces; covariances that turn with the frame and are smooth at the cutoff."""
    baseline, model = make_model(allegro_config)
    readout = find_readout(model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in readout.parameters():
            parameter.copy_(2.0 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    data = to_data(frames[1])
    expected, output = baseline(dict(data)), model(dict(data))
    for key in ("total_energy", "atomic_energy", "forces", "stress"):
        assert torch.equal(expected[key], output[key]), key
    assert readout.has_pool and output["forces_cov"].shape == (len(frames[1]), 3, 3)
    assert anisotropy(output["forces_cov"]) > 0.05, "isotropic: nothing is tested"
    assert turning_error(model, data) < 1e-9


def as_in_lammps(data):
    """What pair_allegro gives a model: neighbours beyond the box as ghost atoms, no cell."""
    from allegro._compile import allegro_data_settings

    return allegro_data_settings({name: value.clone() for name, value in data.items()})


def test_ghost_atoms(make_model, allegro_config, frames, to_data):
    """Uncertainties of LAMMPS's local atoms are those of the periodic structure."""
    _, model = make_model(allegro_config)
    with torch.no_grad():
        for parameter in find_readout(model).parameters():
            parameter.normal_()
    data = to_data(frames[1])
    ghosted = as_in_lammps(data)
    count, total = len(data["pos"]), len(ghosted["pos"])
    assert total > count and "cell" not in ghosted
    expected, found = model(dict(data)), model(ghosted)
    for key in (*families.get("e2ip").output_keys(), LEVERAGE):
        assert len(found[key.name]) == total, "as many rows as pair_allegro reads"
        assert torch.allclose(found[key.name][:count], expected[key.name], rtol=1e-9, atol=1e-12), key.name
    # Ghost atoms have no neighbours of their own: their forces are parts that LAMMPS adds.
    assert torch.allclose(found["forces"].sum(0), expected["forces"].sum(0), atol=1e-10)


@pytest.mark.nightly
def test_from_training_to_compiled_models(
    tmp_path, allegro_training, train, train_files, compile_for, check_results, frames, run_compiled
):
    """Stock ``nequip-train`` and ``nequip-compile --target e2ip_ase`` and ``e2ip_pair_allegro``."""
    checkpoint = train(allegro_training, tmp_path / "run", train_files, "max_epochs=1") / "last.ckpt"
    compiled, in_lammps = (compile_for(checkpoint, f"e2ip_{target}") for target in ("ase", "pair_allegro"))
    with pytest.warns(UserWarning, match="never fitted"):  # the last checkpoint is not
        reference = E2IPCalculator.from_saved_model(checkpoint)
    calculator = E2IPCalculator.from_compiled_model(compiled, chemical_species_to_atom_type_map=True)
    check_results(calculator, reference, frames, ("energy", "forces", "forces_cov", "e2ip_nu"))
    ghosted = [as_in_lammps(reference.atoms_to_data(atoms)) for atoms in frames]
    for atoms, outputs in zip(frames, run_compiled(in_lammps, ghosted), strict=True):
        reference.calculate(atoms)
        for name in ("forces_cov", "e2ip_nu"):
            expected = reference.results[name]
            assert outputs[name].dtype == np.float64
            found = outputs[name][: len(atoms)].reshape(expected.shape)
            assert np.allclose(found, expected, rtol=1e-4, atol=1e-5), name


def test_leverage_stays_strictly_local(make_model, allegro_config, frames, to_data):
    """An atom's leverage does not depend on what is beyond its cutoff, here 4 Å."""
    from ase import Atoms

    from e2ip_plugins.fitting.batches import in_order
    from nequip_ext.fitting.passes import batching, fit_model

    _, model = make_model(allegro_config, evidence="leverage")
    model.eval()
    data = []
    for number, atoms in enumerate(6 * frames):
        moved = atoms.copy()
        moved.rattle(0.05, seed=number)
        data.append({**to_data(moved), "forces": 0.1 * torch.ones(len(moved), 3, dtype=torch.float64)})
    first = 4 * len(frames)
    fit_model(model, *(in_order([part], batching(len(frames))) for part in (data[:first], data[first:])))
    assert find_readout(model).leverage.strictly_local
    water = frames[2]
    chain = [water + Atoms("OH", [[0.0, 3.5, z], [0.0, 6.5, z]]) for z in (0.0, 0.4)]
    near = [model(to_data(atoms)) for atoms in (chain[0], chain[0][:4])]
    for name in ("e2ip_leverage", "forces_cov"):
        assert torch.allclose(near[0][name][:3], near[1][name][:3], rtol=1e-10), name
    far = model(to_data(chain[1]))["e2ip_leverage"][:3]
    assert not torch.allclose(far, near[0]["e2ip_leverage"][:3], rtol=1e-6), "the neighbour is out of range"
