"""The committed demo data: complete, in eV and Å, small."""

from pathlib import Path

import numpy as np
import pytest
from ase.io import read

DATA = Path(__file__).resolve().parents[2] / "demo" / "data"
FRAMES = {"train": 300, "valid": 50, "test": 150, "ood": 100}
TEMPERATURE = {"train": 300, "valid": 300, "test": 300, "ood": 900}  # K
BOLTZMANN = 8.617333e-5  # eV/K


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
    lowest = -572.48  # eV, of the relaxed molecule
    expected = (3 * 13 - 6) / 2 * BOLTZMANN * TEMPERATURE[name]
    assert energies_of(frames[name]).mean() - lowest == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize("name", FRAMES)
def test_carbonyl_stretch_of_the_temperature(frames, name):
    """The C=O bond as an oscillator: force on O = -k (r - r0), and k <(r - r0)²> = kT ties eV/Å and Å to K."""
    bond = np.array([atoms.positions[5] - atoms.positions[3] for atoms in frames[name]])
    length = np.linalg.norm(bond, axis=1)
    along = np.sum(forces_of(frames[name])[:, 5] * bond, axis=1) / length
    k = -np.polyfit(length, along, 1)[0]
    assert k * length.var() == pytest.approx(BOLTZMANN * TEMPERATURE[name], rel=0.2)


def test_no_frame_twice(frames):
    energies = np.concatenate([energies_of(frames[name]) for name in FRAMES])
    assert len(np.unique(energies)) == len(energies)
