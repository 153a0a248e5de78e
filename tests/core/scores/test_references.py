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
        (
            5.0,
            "are they in other units, or is the model barely trained?",
        ),
        (-1.0, "opposite sign"),
        (0.0, "all reference forces are zero"),
    ],
)
def test_doubts(factor, message):
    assert message in doubt(factor * FORCES, FORCES + 0.05 * ERRORS)


@pytest.mark.parametrize("error", [0.01, 0.1, 1.0, 30.0])
def test_models_of_any_quality_raise_none(error):
    assert doubt(FORCES, FORCES + error * ERRORS) is None
    # What a poor model learns first is to predict small forces.
    assert doubt(FORCES, (FORCES + error * ERRORS) / (1 + error**2)) is None
    assert doubt(FORCES, (FORCES + 0.5 * ERRORS) / 2.3) is None


def test_a_model_that_is_barely_trained():
    """Its forces are small, and correlate with the references: that it is in other units is not what comes first."""
    assert doubt(FORCES, (FORCES + 0.4 * ERRORS) / 5.0).endswith("eV/Å: is the model barely trained?")
    text = doubt(FORCES, (FORCES + 0.4 * ERRORS) / 23.0)
    assert text.endswith("eV/Å: is the model barely trained, or are they in kcal/mol/Å?")


def test_predictions_in_place_of_references():
    """As they come back from a file, from another device and from another precision."""
    for change in (0.0, 1e-8, 1e-5):
        assert "are they predictions of this model?" in doubt(FORCES + change * ERRORS, FORCES)
    assert doubt(FORCES + 1e-3 * ERRORS, FORCES) is None
    some = np.where(np.arange(200)[:, None] < 30, FORCES, FORCES + 0.1 * ERRORS)
    assert "forces of 30 of 200 atoms are the predicted ones" in doubt(some, FORCES)


def test_nothing_to_compare():
    assert doubt(FORCES, 0.0 * FORCES) is None and doubt(FORCES[:0], FORCES[:0]) is None
