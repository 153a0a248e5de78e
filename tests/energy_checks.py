"""What holds of energies' error bars in both hosts, in double precision."""

import numpy as np
import pytest
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from scipy.spatial.transform import Rotation

from e2ip_plugins.predictions.labelled import Label, LabelledFrame

VOIGT = ((0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1))


def labelled_frames(atoms, count, seed, stress=False, spread=3.0):
    """Return rattled copies of a structure with made-up labels, energies with a ``spread`` in eV."""
    rng, frames = np.random.default_rng(seed), []
    for i in range(count):
        frame = atoms.copy()
        frame.rattle(0.05, rng=rng)
        energy = Label(np.array(rng.normal(scale=spread)))
        forces = Label(rng.normal(scale=0.3, size=(len(frame), 3)))
        tensor = rng.normal(scale=0.01, size=(3, 3))
        frames.append(LabelledFrame(frame, f"{i}", forces, energy, Label(tensor + tensor.T) if stress else None))
    return frames


def results(calculator, atoms):
    """Return the calculator's results of a frame."""
    frame = atoms.copy()
    frame.calc = calculator
    frame.get_forces()
    return dict(calculator.results)


def vector(calculator, atoms):
    """Return u."""
    return results(calculator, atoms)["energy_error_vector"]


def moved(atoms, rotation):
    """Return a frame turned, cell and all, by a matrix (3, 3)."""
    turned = Atoms(atoms.numbers, atoms.positions @ rotation.T, cell=atoms.cell @ rotation.T, pbc=atoms.pbc)
    return turned


def check_molecule(calculator, atoms, unlike, rtol=1e-10):
    """Check a molecule's error bar: norm, symmetries, copies, another molecule far away, a path, and a gradient.

    ``unlike`` is a molecule without a species of ``atoms``.
    """
    found = results(calculator, atoms)
    u, std = found["energy_error_vector"], found["energy_uncertainty"]
    assert isinstance(std, float) and std == pytest.approx(np.linalg.norm(u), rel=1e-12) and std > 0
    rotation = -Rotation.from_rotvec([0.3, -1.0, 0.5]).as_matrix()
    order = np.random.default_rng(0).permutation(len(atoms))
    shifted = atoms.copy()
    shifted.positions += [3.0, -7.0, 11.0]
    for other in (moved(atoms, rotation), shifted, atoms[order]):
        np.testing.assert_allclose(vector(calculator, other), u, rtol=0, atol=rtol * std)
    copies = atoms.copy()
    for i in range(1, 3):
        copy = atoms.copy()
        copy.positions += [0.0, 60.0 * i, 0.0]
        copies += copy
    np.testing.assert_allclose(vector(calculator, copies), 3 * u, rtol=0, atol=1e-9 * std)
    far = unlike.copy()
    far.positions += [0.0, 0.0, 80.0]
    alone = results(calculator, unlike)["energy_uncertainty"]
    assert results(calculator, atoms + far)["energy_uncertainty"] == pytest.approx(np.hypot(std, alone), rel=1e-9)
    direction = np.random.default_rng(1).normal(size=atoms.positions.shape)

    def along(step):
        other = atoms.copy()
        other.positions += step * direction
        return vector(calculator, other)

    steps = [np.linalg.norm(along(step) - u) / step for step in (1e-4, 1e-5, 1e-6)]
    np.testing.assert_allclose(steps, steps[-1], rtol=1e-2)
    weights = np.random.default_rng(2).normal(size=len(u))
    _, gradient = calculator.uncertainty_gradient(atoms, lambda outputs: _product(outputs, weights))
    slope = (along(1e-5) - along(-1e-5)) @ weights / 2e-5
    assert (gradient * direction).sum() == pytest.approx(slope, rel=1e-5)


def _product(outputs, weights):
    u = outputs["energy_error_vector"]
    return u @ u.new_tensor(weights)


def check_crystal(calculator, atoms, rtol=1e-9):
    """Check that a supercell has as many times the energy's error bar, and the stress's, which turns with the cell."""
    one, eight = results(calculator, atoms), results(calculator, atoms.repeat(2))
    np.testing.assert_allclose(eight["energy_error_vector"], 8 * one["energy_error_vector"], atol=rtol, rtol=rtol)
    np.testing.assert_allclose(eight["stress_cov"], one["stress_cov"], rtol=1e-6)
    np.testing.assert_allclose(one["stress_uncertainty"], np.diag(one["stress_cov"]) ** 0.5, rtol=1e-12)
    rotation = -Rotation.from_rotvec([0.3, -1.0, 0.5]).as_matrix()
    transform = np.array(
        [
            [rotation[a, c] * rotation[b, d] + (rotation[a, d] * rotation[b, c] if c != d else 0.0) for c, d in VOIGT]
            for a, b in VOIGT
        ]
    )
    turned = results(calculator, moved(atoms, rotation))["stress_cov"]
    np.testing.assert_allclose(turned, transform @ one["stress_cov"] @ transform.T, rtol=1e-6, atol=1e-9)


def check_accepted_by_ase(calculator, atoms):
    """Check that ASE takes a frame's energy, forces and error bars together."""
    found = results(calculator, atoms)
    kept = {name: found[name] for name in ("energy", "forces", "energy_uncertainty", "energy_error_vector")}
    frame = atoms.copy()
    frame.calc = SinglePointCalculator(frame, **kept)
    assert frame.calc.results["energy_uncertainty"] == found["energy_uncertainty"]
