"""The committed demo data: complete, in eV and Å, small."""

from pathlib import Path

import numpy as np
import pytest
from ase.io import read

DATA = Path(__file__).resolve().parents[2] / "demo" / "data"
FRAMES = {"train": 300, "valid": 50, "test": 150, "ood": 100}


@pytest.fixture(scope="module")
def frames():
    return {name: read(DATA / f"{name}.extxyz", ":") for name in FRAMES}


def forces_of(frames):
    return np.array([atoms.arrays["REF_forces"] for atoms in frames])


def energies_of(frames):
    return np.array([atoms.info["REF_energy"] for atoms in frames])


def test_size():
    assert sum(path.stat().st_size for path in DATA.iterdir()) < 1.5e6


@pytest.mark.parametrize("name", FRAMES)
def test_complete(frames, name):
    assert len(frames[name]) == FRAMES[name]
    assert {str(atoms.symbols) for atoms in frames[name]} == {"COC2NOH7"}
    assert np.isfinite(forces_of(frames[name])).all()
    assert np.isfinite(energies_of(frames[name])).all()


@pytest.mark.parametrize("name", FRAMES)
def test_forces_and_torques_vanish(frames, name):
    forces = forces_of(frames[name])
    positions = np.array([atoms.positions for atoms in frames[name]])
    assert np.abs(forces.sum(axis=1)).max() < 1e-6
    assert np.abs(np.cross(positions, forces).sum(axis=1)).max() < 1e-5


@pytest.mark.parametrize("name", FRAMES)
def test_potential_energy_of_the_temperature(frames, name):
    """A harmonic molecule at T has <V> - V_min = (3N - 6) kT / 2: energies in eV, temperature as named."""
    kelvin = 900 if name == "ood" else 300
    lowest = -572.48  # eV, of the relaxed molecule
    expected = (3 * 13 - 6) / 2 * 8.617333e-5 * kelvin
    assert energies_of(frames[name]).mean() - lowest == pytest.approx(expected, rel=0.2)


def test_forces_are_minus_the_energy_slope(frames):
    """Nearby frames of a dense set: dE is not -F·dx there, so fit a line through many pairs and look at its slope."""
    train = frames["train"]
    energies, forces = energies_of(train), forces_of(train)
    positions = np.array([atoms.positions for atoms in train])
    predicted, actual = [], []
    for i in range(len(train)):
        for j in range(i):
            # Trapezoidal rule for the work along the straight line between two frames, after superposition.
            a = positions[i] - positions[i].mean(0)
            b = positions[j] - positions[j].mean(0)
            u, _, vt = np.linalg.svd(b.T @ a)
            turn = u @ np.diag([1, 1, np.sign(np.linalg.det(u @ vt))]) @ vt
            step = a - b @ turn
            if np.linalg.norm(step) < 0.9:
                predicted.append(-0.5 * np.sum((forces[i] + forces[j] @ turn) * step))
                actual.append(energies[i] - energies[j])
    assert len(actual) > 50
    slope = np.dot(predicted, actual) / np.dot(predicted, predicted)
    assert slope == pytest.approx(1.0, abs=0.1)


def test_no_frame_twice(frames):
    energies = np.concatenate([energies_of(frames[name]) for name in FRAMES])
    assert len(np.unique(energies)) == len(energies)
