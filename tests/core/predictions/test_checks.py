"""Structures that no model can predict are refused, with the frame and the atoms named."""

from unittest import mock

import ase
import numpy as np
import pytest

from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.checks import StructureCheck, check_apart, check_finite, check_structure

CELL = np.array([[9.0, 0.0, 0.0], [4.0, 8.0, 0.0], [-3.0, 2.0, 7.0]])


@pytest.fixture
def water():
    return ase.Atoms("OH2", np.random.default_rng(0).normal(size=(3, 3)), cell=CELL, pbc=True)


def without_atoms(atoms):
    del atoms[:]


def without_position(atoms):
    atoms.positions[1, 0] = np.nan


def without_cell(atoms):
    atoms.cell = None


def with_tiny_cell(atoms):
    atoms.cell *= 1e-3


REFUSALS = [
    (without_atoms, "has no atoms"),
    (without_position, r"the position of atom 1 is not finite \(1 such atoms\)"),
    (without_cell, "is periodic in 3 directions, and its cell is not"),
    (with_tiny_cell, r"its cell repeats after 5.0e-07 Å\^3; is it in Å\?"),
]


@pytest.mark.parametrize(("spoil", "message"), REFUSALS)
def test_structures_that_no_model_predicts(water, spoil, message):
    check_structure(water, "a.xyz, frame 1", ["O", "H"])
    with pytest.raises(InputError, match=r"a\.xyz, frame 1: has O, which the model does not know; it knows H, C"):
        check_structure(water, "a.xyz, frame 1", ["H", "C"])
    spoil(water)
    with pytest.raises(InputError, match=rf"a\.xyz, frame 1: {message}"):
        check_structure(water, "a.xyz, frame 1")


def with_nitrogen(atoms):
    atoms.numbers[1] = 7


def with_periods(atoms):
    atoms.cell, atoms.pbc = np.diag([9.0, 0.0, 0.0]), [True, False, True]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        *REFUSALS,
        (with_nitrogen, "has N, which the model does not know; it knows H, O"),
        (with_periods, "is periodic in 2 directions, and its cell is not"),
    ],
)
def test_what_changes_during_a_run_is_refused(water, spoil, message):
    """Arrays are changed in place; what was refused stays refused while positions change."""
    check, known = StructureCheck(), mock.Mock(return_value=["H", "O"])
    water.rattle(0.1), check(water, known)
    water.rattle(0.1), check(water, known)
    assert known.call_count == 1
    intact = water.copy()
    spoil(water)
    for _ in range(2):
        with pytest.raises(InputError, match=f"the structure: {message}"):
            check(water, known)
        water.positions += 0.1
        check(intact, known)


@pytest.mark.parametrize("periodic", [False, True, (True, False, True)])
def test_atoms_at_the_same_place(water, periodic):
    """Also across the faces of a skewed cell."""

    def check():
        check_apart(water.positions, water.cell.array, water.pbc, "frame 1")

    water.pbc = periodic
    check()
    water.positions[2] = water.positions[0] + [1e-3, -1e-4, 0.0]
    with pytest.raises(InputError, match="frame 1: atoms 0 and 2 are at the same place"):
        check()
    water.positions[2] += CELL[2] - 2 * CELL[0]
    if periodic:
        with pytest.raises(InputError, match="frame 1: atoms 0 and 2"):
            check()
    else:
        check()


def test_no_crystal_has_atoms_at_the_same_place():
    """Nor has one whose atoms lie on the faces of the cell within rounding."""
    positions = np.array([[0.0, 0.0, 0.0], [-1e-17, 1.8, 1.8], [1.8, 3.6 - 1e-12, 1.8], [1.8, 1.8, 0.0]])
    for cell, periodic in ((np.eye(3) * 3.6, (True,) * 3), (None, None), (np.zeros((3, 3)), (False,) * 3)):
        check_apart(positions, cell, periodic, "x")
    # MACE takes a cell of one ångström where there is none.
    with pytest.raises(InputError, match="x: is periodic in 3 directions, and its cell is not"):
        check_apart(positions, np.zeros((3, 3)), (True,) * 3, "x")
    with pytest.raises(InputError, match="x: atoms 0 and 1"):
        check_apart(np.array([[-1e-17, 0.0, 0.0], [3.6, 0.0, 3.6]]), np.eye(3) * 3.6, (True,) * 3, "x")


def test_energies_must_be_finite():
    check_finite([1.0, 2.0], "a.xyz")
    with pytest.raises(InputError, match=r"a\.xyz: the reference stress is not finite"):
        check_finite([1.0, np.nan], "a.xyz", "stress")
