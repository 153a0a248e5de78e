"""Frames in files: every key, named as the reader of predictions knows them, and no labels of another geometry."""

import ase.io
import numpy as np
import pytest
from ase import Atoms

from e2ip_plugins import families
from e2ip_plugins.md import with_results
from e2ip_plugins.predictions.columns import without_labels
from e2ip_plugins.predictions.prediction_files import read_predictions

KEYS = {key.name: key for key in families.get("e2ip").output_keys()}


def test_a_file_keeps_every_key(make_atoms, tmp_path):
    atoms = make_atoms(0.3, extra={"uq_calibration": "calibration.json", "descriptors": np.zeros((4, 7))})
    atoms.info["temperature"] = 300.0
    ase.io.write(tmp_path / "frame.xyz", with_results(atoms), format="extxyz")
    found = ase.io.read(tmp_path / "frame.xyz")
    assert found.get_potential_energy() == 1.0 and np.array_equal(found.get_forces(), np.zeros((4, 3)))
    for key in KEYS.values():
        expected = atoms.calc.results[key.name].reshape(found.arrays[key.name].shape)
        np.testing.assert_allclose(found.arrays[key.name], expected, atol=1e-8)
    assert found.arrays["forces_cov"].shape == (4, 9) and found.arrays["e2ip_leverage"].shape == (4,)
    assert (found.info["uq_family"], found.info["uq_calibration"]) == ("niw", "calibration.json")
    assert found.info["temperature"] == 300.0 and "descriptors" not in found.arrays
    np.testing.assert_allclose(found.get_momenta(), atoms.get_momenta())
    assert isinstance(atoms.calc.results["forces_cov"], np.ndarray) and "forces_cov" not in atoms.arrays


def test_the_reader_of_predictions_takes_it(make_atoms, tmp_path):
    atoms = make_atoms(0.3)
    atoms.arrays["REF_forces"] = np.ones((4, 3))
    assert "REF_forces" not in with_results(atoms).arrays  # of another geometry, in a run
    atoms.info.update(config_weight=0, config_forces_weight=0, note="kept")
    atoms.arrays["own"] = np.ones(len(atoms))
    frame = with_results(atoms)
    # The weights were those of the labels.
    assert not [name for name in frame.info if "weight" in name]
    assert frame.info["note"] == "kept" and "own" in frame.arrays
    for name in ("config_weight", "config_forces_weight"):
        del atoms.info[name]
    ase.io.write(tmp_path / "frame.xyz", [with_results(atoms, keep_labels=True)] * 2, format="extxyz")
    found = read_predictions(tmp_path / "frame.xyz")
    assert found.family.uq_family == "niw" and np.array_equal(found.reference_forces, np.ones((8, 3)))
    assert np.array_equal(found.energy, [1.0, 1.0]) and found.leverage[3] == pytest.approx(30.0)


def test_what_an_earlier_evaluation_left_is_replaced(make_atoms):
    atoms = make_atoms(0.3)
    again = with_results(atoms)
    again.info["uq_calibration"] = "old.json"
    again.calc = make_atoms(0.2, fitted=False).calc
    found = with_results(again)
    assert found.arrays["forces_epistemic_std"][-1] == pytest.approx(0.2)
    assert not {"e2ip_leverage", "uq_calibration"} & {*found.arrays, *found.info}
    again.calc = make_atoms(uncertain=False).calc
    assert not set(KEYS) & set(with_results(again).arrays)


def test_results_follow_the_atoms(make_atoms):
    atoms = make_atoms(0.1, 0.2)
    assert with_results(atoms).arrays["forces_epistemic_std"][-1] == pytest.approx(0.1)
    atoms.positions += 0.1
    assert with_results(atoms).arrays["forces_epistemic_std"][-1] == pytest.approx(0.2)


def test_only_a_periodic_structure_has_a_stress(make_atoms, refused):
    atoms = make_atoms()
    assert "stress" not in with_results(atoms).calc.results
    atoms.cell, atoms.pbc = 9.0 * np.eye(3), True
    assert np.array_equal(with_results(atoms).get_stress(), np.zeros(6))
    refused("has no calculator", with_results, Atoms("H"))


def test_labels_are_of_another_geometry():
    atoms = Atoms(
        "H2", np.eye(3)[:2], tags=[1, 2], info={"REF_energy": 1.0, "config_type": "md", "MACE_uq_family": "niw"}
    )
    atoms.set_initial_charges([0.1, -0.1])
    for name in ("REF_forces", "forces", "dft_forces", "MACE_forces_cov", "e2ip_leverage", "mace_virials"):
        atoms.arrays[name] = np.zeros((2, 3))
    frame = without_labels(atoms)
    assert set(frame.arrays) == {"numbers", "positions", "tags", "initial_charges"}
    assert frame.info == {"config_type": "md"} and "REF_forces" in atoms.arrays
