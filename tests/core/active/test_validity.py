"""Which structures may be in one piece, and what is too close."""

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk, molecule

from e2ip_plugins.active.validity import Parts, Validity

NONE = Parts([])


def test_parts_are_counted_by_formula():
    water, pair, other = (molecule("H2O") for _ in range(3))
    other.translate([0, 0, 5.0])
    pair.extend(other)
    check = Validity().of_geometry
    whole, mixed = Parts([water, molecule("CH4")]), Parts([water, pair])
    assert check(pair, whole) == "torn apart" and check(pair, mixed) is None
    # Nothing is known of other formulas, but that all structures hang together.
    ions = Atoms("NaCl", [[0, 0, 0], [6, 0, 0]])
    assert check(ions, whole) == "torn apart" and check(ions, mixed) is None and check(ions, NONE) is None
    torn = water.copy()
    torn.positions[1] += [0, 5, 0]
    assert check(torn, mixed) == "torn apart" and Validity(one_piece=False).of_geometry(torn, mixed) is None


@pytest.mark.parametrize(("pbc", "problem"), [(True, "atoms too close"), (False, None)])
def test_distances_are_those_of_the_nearest_images(pbc, problem):
    atoms = Atoms("Cu2", [[0.1, 0, 0], [9.0, 0, 0]], cell=[10.0, 10.0, 10.0], pbc=pbc)
    assert Validity(one_piece=False).of_geometry(atoms, NONE) == problem
    assert Validity().of_geometry(bulk("Cu"), NONE) is None


def test_limits_of_predictions():
    fine, leverage = np.full((2, 3), 1.0), np.ones(2)
    assert Validity().of_prediction(leverage, fine) is None
    assert Validity(max_force=1.7).of_prediction(leverage, fine) == "force too large"
    assert Validity(max_leverage=0.9).of_prediction(leverage, fine) == "leverage too large"
    assert Validity().of_prediction(leverage, fine * np.nan) == "prediction not finite"
    assert Validity().of_prediction(leverage * np.inf, fine) == "prediction not finite"
