"""Forces made of several atoms' forces: bounds that hold whatever the errors do, and what cannot be asked."""

import ase.io
import numpy as np
import pytest
from ase.constraints import FixAtoms

from e2ip_plugins.md import combined_force, mean_force, with_results


@pytest.fixture
def frame(make_atoms):
    """Four atoms with forces and covariances of no symmetry."""
    rng = np.random.default_rng(0)
    factors = rng.normal(size=(4, 3, 3))
    return make_atoms(0.3, spring=1.0, extra={"forces_cov": factors @ factors.transpose(0, 2, 1)})


def drawn(covariances, correlation, draws=200_000):
    """Errors (draws, 4, 3) with these covariances of atoms: the first and last are those of one vector, or not."""
    rng = np.random.default_rng(1)
    own, shared = rng.normal(size=(draws, 4, 3)), rng.normal(size=(draws, 1, 3))
    normal = np.sqrt(1 - correlation**2) * own + correlation * shared
    values, axes = np.linalg.eigh(covariances)
    roots = (axes * np.sqrt(values)[:, None]) @ axes.transpose(0, 2, 1)
    return np.einsum("iab,nib->nia", roots, normal)


def test_independent_errors(frame):
    weights = np.random.default_rng(2).normal(size=(4, 3))
    found, group = combined_force(frame, weights), mean_force(frame, [0, 3])
    covariances = frame.calc.extra["forces_cov"]
    errors = drawn(covariances, 0.0)
    assert np.std(np.einsum("nia,ia->n", errors, weights)) == pytest.approx(found.independent, rel=0.01)
    expected = np.cov(errors[:, [0, 3]].mean(1).T)
    np.testing.assert_allclose(group.independent, expected, atol=0.02 * np.abs(expected).max())
    assert found.value == pytest.approx(np.sum(weights * frame.get_forces()))
    np.testing.assert_allclose(group.force, frame.get_forces()[[0, 3]].mean(0))


@pytest.mark.parametrize("correlation", [0.0, 0.7, 1.0])
def test_bounds_hold_whatever_errors_do(frame, correlation):
    weights = np.random.default_rng(2).normal(size=(4, 3))
    errors = drawn(frame.calc.extra["forces_cov"], correlation)
    assert np.std(np.einsum("nia,ia->n", errors, weights)) <= 1.01 * combined_force(frame, weights).bound
    left = mean_force(frame, range(4)).bound - np.cov(errors.mean(1).T)
    assert np.linalg.eigvalsh(left).min() > -0.02 * np.abs(left).max()


def test_bounds_are_reached(make_atoms):
    """By errors in phase."""
    atoms = make_atoms(extra={"forces_cov": np.stack([np.eye(3)] * 4)})
    group, weights = mean_force(atoms, range(4)), np.full((4, 3), [0.25, 0.0, 0.0])
    np.testing.assert_allclose(group.bound, np.eye(3))
    np.testing.assert_allclose(group.independent, np.eye(3) / 4)
    assert combined_force(atoms, weights)[1:] == (pytest.approx(1.0), pytest.approx(0.5))


def test_from_files_and_with_constraints(frame, tmp_path):
    group = mean_force(frame, [1, 2])
    frame.set_constraint(FixAtoms([1]))
    np.testing.assert_allclose(mean_force(frame, [1, 2]).force, group.force)
    ase.io.write(tmp_path / "frame.xyz", with_results(frame), format="extxyz")
    read = mean_force(ase.io.read(tmp_path / "frame.xyz"), np.array([False, True, True, False]))
    for found, expected in zip(read, group, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-7)


def test_covariances_of_a_file_are_not_those_of_another_calculator(frame, make_atoms, tmp_path, refused):
    ase.io.write(tmp_path / "frame.xyz", with_results(frame), format="extxyz")
    read = ase.io.read(tmp_path / "frame.xyz")
    read.calc = make_atoms(uncertain=False).calc
    refused("no forces_cov: the calculator's model has no readout", mean_force, read, [1, 2])


def test_a_bias_has_no_part_in_it(frame):
    group = mean_force(frame, [0, 1])
    frame.calc.extra |= {"forces_unbiased": frame.get_forces().copy(), "forces": np.ones((4, 3))}
    frame.calc.reset()
    np.testing.assert_allclose(mean_force(frame, [0, 1]).force, group.force)


def test_bad_input(frame, make_atoms, refused):
    for group, text in (([], "at least one"), ([4], "atoms 0 to 3"), ([0, -4], "twice"), ([0.5], "indices")):
        refused(text, mean_force, frame, group)
    wrong = ((np.zeros((3, 3)), r"not \(3, 3\)"), (np.full((4, 3), np.nan), "not some that are not finite"))
    for weights, text in wrong:
        refused(f"one vector for every atom, {text}", combined_force, frame, weights)
    for atoms in (make_atoms(uncertain=False), make_atoms()):
        if atoms.calc.uncertain:
            atoms.calc = None
        refused(r"neither a calculator|no forces_cov", mean_force, atoms, [0])
