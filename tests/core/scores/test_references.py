"""What is strange about reference forces: units, signs, zeros; and what is not."""

import numpy as np
import pytest

from e2ip_plugins.scores.references import doubt

FORCES = np.random.default_rng(0).normal(size=(200, 3))
ERRORS = np.random.default_rng(1).normal(size=(200, 3))


@pytest.mark.parametrize(
    ("factor", "message"),
    [
        (23.0605, "23 times the predicted ones, which are in eV/Å: are they in kcal/mol/Å?"),
        (96.4853, "in kJ/mol/Å?"),
        (1000.0, "in meV/Å?"),
        (1 / 51.42207, "in Hartree/Bohr?"),
        (1 / 25.71103, "in Hartree/Å or Rydberg/Bohr?"),
        (5.0, "5 times the predicted ones, which are in eV/Å: are they in other units?"),
        (-1.0, "opposite sign"),
        (0.0, "all reference forces are zero"),
    ],
)
def test_doubts(factor, message):
    assert message in doubt(factor * FORCES, FORCES + 0.05 * ERRORS)


@pytest.mark.parametrize("error", [0.0, 0.1, 1.0, 30.0])
def test_models_of_any_quality_raise_none(error):
    assert doubt(FORCES, FORCES + error * ERRORS) is None
    # What a poor model learns first is to predict small forces.
    assert doubt(FORCES, (FORCES + error * ERRORS) / (1 + error**2)) is None
    assert doubt(FORCES, (FORCES + 0.5 * ERRORS) / 2.3) is None


def test_nothing_to_compare():
    assert doubt(FORCES, 0.0 * FORCES) is None and doubt(FORCES[:0], FORCES[:0]) is None
