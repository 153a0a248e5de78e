"""Uncertainties and error vectors of energies in prediction files, and the values that are refused."""

import ase
import ase.io
import numpy as np
import pytest

from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.copies import distinct
from e2ip_plugins.predictions.prediction_files import read_predictions

STD, VECTOR = "energy_uncertainty", "energy_error_vector"


@pytest.fixture
def frames():
    """Four frames as ``mace_eval_configs`` writes them; vectors of nine numbers, which ASE reads as 3 × 3."""
    rng, made = np.random.default_rng(0), []
    for n in (3, 1, 4, 2):
        atoms = ase.Atoms("H" * n, rng.normal(size=(n, 3)), info={"REF_energy": 1.0, "MACE_energy": 1.1})
        atoms.arrays |= {"REF_forces": rng.normal(size=(n, 3)), "MACE_forces": rng.normal(size=(n, 3))}
        atoms.info[f"MACE_{VECTOR}"] = rng.normal(size=9)
        atoms.info[f"MACE_{STD}"] = float(np.linalg.norm(atoms.info[f"MACE_{VECTOR}"]))
        made.append(atoms)
    return made


@pytest.fixture
def read(tmp_path):
    def from_file(frames, prefix="MACE_"):
        for atoms in frames:
            for name in [name for name in atoms.info if name.startswith("MACE_")]:
                atoms.info[prefix + name.removeprefix("MACE_")] = atoms.info.pop(name)
            atoms.arrays[prefix + "forces"] = atoms.arrays.pop("MACE_forces")
        ase.io.write(tmp_path / "p.xyz", frames, format="extxyz")
        return read_predictions(tmp_path / "p.xyz")

    return from_file


@pytest.mark.parametrize("prefix", ["MACE_", "my_", ""])
def test_read_with_the_prefix_of_the_forces(read, frames, prefix):
    vectors = np.stack([atoms.info[f"MACE_{VECTOR}"] for atoms in frames])
    p = read(frames, prefix)
    np.testing.assert_allclose(p.energy_error_vector, vectors, rtol=1e-7)
    np.testing.assert_allclose(p.energy_uncertainty, np.linalg.norm(vectors, axis=1), rtol=1e-7)
    assert p.has_energy_uncertainties


def test_files_without_them(read, frames):
    for atoms in frames:
        del atoms.info[f"MACE_{STD}"], atoms.info[f"MACE_{VECTOR}"]
    p = read(frames)
    assert np.isnan(p.energy_uncertainty).all() and p.energy_uncertainty.shape == (4,)
    assert p.energy_error_vector is None and not p.has_energy_uncertainties


def test_frames_without_them_and_frames_chosen(read, frames):
    del frames[1].info[f"MACE_{STD}"], frames[1].info[f"MACE_{VECTOR}"]
    frames[3].info["config_weight"] = 0.0
    p = read(frames)
    assert np.isnan(p.energy_uncertainty).tolist() == [False, True, False]
    assert np.isnan(p.energy_error_vector).all(-1).tolist() == [False, True, False]
    part = p.only(np.array([1, 2]))
    np.testing.assert_array_equal(part.energy_uncertainty, p.energy_uncertainty[1:])
    np.testing.assert_array_equal(part.energy_error_vector, p.energy_error_vector[1:])


def test_copies_are_left_out(read, frames):
    p = distinct(read([*frames, frames[2].copy()]))
    assert len(p.energy_uncertainty) == len(p.energy_error_vector) == 4


def test_zero_everywhere_is_a_model_that_was_not_fitted(read, frames):
    for atoms in frames:
        atoms.info[f"MACE_{STD}"], atoms.info[f"MACE_{VECTOR}"] = 0.0, np.zeros(9)
    p = read(frames)
    assert not p.has_energy_uncertainties and p.energy_error_vector is None


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (STD, 0.0, "of frame 2 is 0, and a standard deviation is a positive finite number"),
        (STD, -0.1, "of frame 2 is -0.1, and"),
        (STD, np.nan, "of frame 2 is nan, and"),
        (STD, np.inf, "of frame 2 is inf, and"),
        (STD, "much", "of frame 2 is not a number"),
        (VECTOR, np.zeros(9), "of frame 2 is zero"),
        (VECTOR, np.full(9, np.nan), "of frame 2 has numbers that are not finite"),
        (VECTOR, np.ones(8), "has 8 numbers in frame 2 and 9 in frame 0"),
        (VECTOR, "none", "of frame 2 is no list of numbers"),
    ],
)
def test_refused(read, frames, name, value, message):
    frames[2].info[f"MACE_{name}"] = value
    with pytest.raises(InputError, match=rf"p\.xyz: 'MACE_{name}' {message}"):
        read(frames)
