"""How far a model reaches: what an atom's uncertainty depends on, measured on chains of atoms."""

from typing import NamedTuple, Sequence

import numpy as np
from ase import Atoms

from e2ip_plugins.errors import InputError
from e2ip_plugins.evaluation.options import BatchModel

#: Atoms of a chain: a model may pass messages along one fewer.
_LENGTH = 16


class Reach(NamedTuple):
    """Distances in Å within which atoms have an influence on an atom.

    Attributes
    ----------
    energies : float
        On its energy: the cutoff times the number of times that messages are passed.
    uncertainties : float
        On its uncertainty: once more the cutoff where an atom's leverage counts that of its neighbours.
    forces : float
        On its force: twice that of energies, since the energies of atoms as far away depend on its position.
    """

    energies: float
    uncertainties: float
    forces: float


def reach(model: BatchModel, species: Sequence[str]) -> Reach:
    """Return the reach of a model.

    The number of times that messages are passed is measured, since models do not tell it: of a chain in which only next
    neighbours are within the cutoff, the farthest atom on which the features of the first one depend.

    Parameters
    ----------
    model : BatchModel
        With a readout.
    species : sequence of str
        Species for which it is measured.

    Raises
    ------
    InputError
        The features depend on nothing, or on more than fifteen neighbours in a row.
    """
    energies = model.cutoff * max(_passed(model, symbol) for symbol in dict.fromkeys(species))
    return Reach(energies, energies + (0.0 if model.strictly_local else model.cutoff), 2.0 * energies)


def _passed(model: BatchModel, symbol: str) -> int:
    """Return how many neighbours in a row of one species pass something on."""
    away = 0.05 * model.cutoff * np.random.default_rng(0).normal(size=(_LENGTH, 3))
    spacing = 0.85 * model.cutoff
    while spacing > 0.1 * model.cutoff:
        # Off the line, where symmetry would make some features vanish.
        line = np.arange(_LENGTH)[:, None] * [spacing, 0.0, 0.0]
        graph, edges = model.graph(Atoms([symbol] * _LENGTH, line + (spacing / model.cutoff) * away))
        if edges >= 2 * (_LENGTH - 1):
            break
        # Types of atoms may have shorter cutoffs of their own.
        spacing *= 0.75
    changes = model.feature_gradient(graph).abs().sum(1).cpu().numpy()
    passed = int(np.flatnonzero(changes).max(initial=0))
    if not 0 < passed < _LENGTH - 1:
        raise InputError(
            f"the reach of the model was not found: features of {symbol} depend on {passed} atoms in a row"
        )
    return passed
