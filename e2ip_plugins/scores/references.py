"""Doubts about reference forces beside predicted ones: units, signs, zeros."""

from typing import Optional

import numpy as np
from ase import units

from e2ip_plugins.keys import KCAL_PER_MOL

#: One eV/Å in other units of forces.
_FORCE_UNITS = {
    "kcal/mol/Å": 1.0 / KCAL_PER_MOL,
    "kJ/mol/Å": units.mol / units.kJ,
    "meV/Å": 1e3,
    "Hartree/Å": 1.0 / units.Hartree,
    "Hartree/Bohr": units.Bohr / units.Hartree,
    "Rydberg/Bohr": units.Bohr / units.Rydberg,
}

#: A common factor means something from this correlation on; poor models may have factors up to the second number.
_MIN_CORRELATION, _MAX_POOR_FACTOR = 0.8, 3.0

#: From this correlation on a model is no longer barely trained.
_TRAINED_CORRELATION = 0.98

#: Forces of an atom that differ less, relative to their size, are predictions: the precision of a network. Those of a
#: share of the atoms up to the second number may agree by chance.
_SAME, _SHARE_SAME = 1e-4, 0.05

#: The factor of a unit may be off by this ratio.
_UNIT_TOLERANCE = 0.8


def doubt(reference: np.ndarray, predicted: np.ndarray) -> Optional[str]:
    """Return a warning about reference forces that do not fit the predicted ones; None where they do.

    Parameters
    ----------
    reference, predicted : (N, 3)
        Finite, in eV/Å.
    """
    size, predicted_size = (
        float(np.sqrt(np.mean(np.square(forces)))) if forces.size else 0.0 for forces in (reference, predicted)
    )
    if not predicted_size:
        return None
    if not size:
        return "all reference forces are zero, the predicted ones are not: was their column written without values?"
    same = np.linalg.norm(reference - predicted, axis=-1) < _SAME * np.linalg.norm(predicted, axis=-1)
    if same.mean() > _SHARE_SAME:
        return (
            f"the reference forces of {int(same.sum())} of {len(same)} atoms are the predicted ones: are they "
            "predictions of this model? Error bars fitted to them mean nothing"
        )
    correlation, factor = float(np.mean(reference * predicted)) / (size * predicted_size), size / predicted_size
    if abs(correlation) < _MIN_CORRELATION:
        return None
    if correlation < 0.0:
        return "the reference forces have the opposite sign of the predicted ones: are they gradients of the energy?"
    if 1.0 / _MAX_POOR_FACTOR < factor < _MAX_POOR_FACTOR:
        return None
    near = [name for name, value in _FORCE_UNITS.items() if 1.0 / _UNIT_TOLERANCE > factor / value > _UNIT_TOLERANCE]
    questions = [f"are they in {' or '.join(near)}"] if near else []
    if correlation < _TRAINED_CORRELATION:
        questions.insert(0, "is the model barely trained")
    questions = questions or ["are they in other units", "is the model barely trained"]
    asked = ", or ".join(questions)
    return f"the reference forces are {factor:.3g} times the predicted ones, which are in eV/Å: {asked}?"
