"""Whether reference forces are what they are taken for, and tell something."""

from typing import Optional

import numpy as np
from ase import units

from e2ip_plugins.keys import KCAL_PER_MOL

#: What one eV/Å is in other units of forces.
_UNITS = {
    "kcal/mol/Å": 1.0 / KCAL_PER_MOL,
    "kJ/mol/Å": units.mol / units.kJ,
    "meV/Å": 1e3,
    "Hartree/Å": 1.0 / units.Hartree,
    "Hartree/Bohr": units.Bohr / units.Hartree,
    "Rydberg/Bohr": units.Bohr / units.Rydberg,
}

#: From this correlation on a common factor means something; factors within the second are those of a poor model.
_ALIKE, _USUAL = 0.8, 3.0

#: Rounding of predicted forces that vanish by symmetry, and noise of their references, in eV/Å.
ROUNDING, NOISE = 1e-5, 1e-3


def doubt(reference: np.ndarray, predicted: np.ndarray) -> Optional[str]:
    """What is strange about reference forces beside a model's, for the user; None: nothing.

    Parameters
    ----------
    reference, predicted : (N, 3)
        Finite, in eV/Å.
    """
    sizes = [float(np.sqrt(np.mean(np.square(forces)))) if forces.size else 0.0 for forces in (reference, predicted)]
    if not sizes[1]:
        return None
    if not sizes[0]:
        return "all reference forces are zero, the predicted ones are not: was their column written without values?"
    correlation, factor = float(np.mean(reference * predicted)) / (sizes[0] * sizes[1]), sizes[0] / sizes[1]
    if abs(correlation) < _ALIKE:
        return None
    if correlation < 0.0:
        return "the reference forces have the opposite sign of the predicted ones: are they gradients of the energy?"
    if 1.0 / _USUAL < factor < _USUAL:
        return None
    near = [name for name, value in _UNITS.items() if 1.0 / _ALIKE > factor / value > _ALIKE]
    named = f"in {' or '.join(near)}" if near else "in other units"
    return f"the reference forces are {factor:.3g} times the predicted ones, which are in eV/Å: are they {named}?"


def vanishing(forces: np.ndarray, residual: np.ndarray) -> np.ndarray:
    """Atoms (N,) whose force is zero by symmetry: isolated ones, single ones in a cell, sites of a perfect crystal.

    So is the error, whatever the error bar: such atoms tell nothing of errors.

    Parameters
    ----------
    forces, residual : (N, 3)
        Predicted, and reference minus predicted, in eV/Å.
    """
    return (np.abs(forces).max(-1) < ROUNDING) & (np.abs(residual).max(-1) < NOISE)
