"""Energies and error vectors of prediction files: all writers' names, and what is refused."""

import subprocess
import sys

import numpy as np
import pytest
from ase.calculators.singlepoint import SinglePointCalculator

from e2ip_plugins.energies.frames import read_energies
from e2ip_plugins.errors import InputError, UncertaintyWarning


@pytest.mark.parametrize("prefix", ["", "MACE_"])
def test_files_keep_all_digits(write, random_frames, prefix):
    frames = random_frames(prefix=prefix)
    write("a.xyz", frames[:4])
    write("b.xyz", frames[4:])
    read = read_energies(["a.xyz", "b.xyz"])
    expected = read_energies(frames)
    np.testing.assert_array_equal(read.energies, expected.energies)
    np.testing.assert_array_equal(read.vectors, expected.vectors)
    assert read.places[4] == "b.xyz, frame 0" and read.uq_model == "e2ip-1"


def test_results_of_a_calculator(make_frame):
    atoms = make_frame(-1.0, [0.3, 0.4])
    results = {key: atoms.info.pop(key) for key in ("energy", "energy_error_vector", "energy_uncertainty")}
    atoms.calc = SinglePointCalculator(atoms)
    atoms.calc.results = results
    read = read_energies(atoms)
    assert read.energies == [-1.0] and np.array_equal(read.vectors, [[0.3, 0.4]])
    # A calculator that several frames share has the results of its last frame.
    atoms.positions += 0.1
    with pytest.raises(InputError, match="gone on to another frame"):
        read_energies(atoms)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("energy", None, r"frame 1: has no predicted energy \(energy\)"),
        ("energy", np.nan, "frame 1: energy is no finite number: nan"),
        ("energy", "low", "frame 1: energy is no finite number: low"),
        ("energy_error_vector", None, "frame 1: has no energy_error_vector: .* --no-energy-vectors"),
        ("energy_error_vector", np.full(64, np.nan), "not finite"),
        ("energy_error_vector", "none", "not finite"),
        ("energy_uncertainty", 1.0, "frame 1: energy_uncertainty is 1 eV, but the length of energy_error_vector is 0."),
        ("uq_model", "e2ip-2", "frame 1: its model .* is e2ip-2, that of frame 0 is e2ip-1"),
        ("uq_model", None, "frame 1: its model .* is not named, that of frame 0 is e2ip-1"),
        ("uq_calibration", "scale.json", "frame 1: its calibration .* is scale.json, that of frame 0 is none"),
        ("MACE_energy_error_vector", np.ones(64), "frame 1: several error vectors: .*MACE_energy_error_vector"),
    ],
)
def test_refused(random_frames, key, value, message):
    frames = random_frames(2)
    if value is None:
        del frames[1].info[key]
    else:
        frames[1].info[key] = value
    with pytest.raises(InputError, match=message):
        read_energies(frames)


def test_vectors_of_another_length_and_of_zeros(make_frame):
    with pytest.raises(InputError, match="frame 1: its energy_error_vector has 3 numbers, that of frame 0 2"):
        read_energies([make_frame(0.0, [1.0, 0.0]), make_frame(0.0, [1.0, 0.0, 0.0])])
    with pytest.raises(InputError, match="never fitted"):
        read_energies([make_frame(0.0, [0.0, 0.0])])
    with pytest.raises(InputError, match="no frames"):
        read_energies([])


def test_frames_without_the_name_of_a_model(random_frames):
    with pytest.warns(UncertaintyWarning, match="no frame names its model"):
        read_energies(random_frames(2, uq_model=None))


def test_the_room_needs_no_torch():
    code = "import sys, e2ip_plugins.energies; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
