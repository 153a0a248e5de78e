"""Which frames of a run are physically possible, and of use: the others are not worth a label."""

from dataclasses import dataclass
from typing import Any, Dict, Iterable, Optional

import numpy as np

#: Atoms within this many times the sum of their covalent radii hang together.
BONDED = 1.5


@dataclass(frozen=True)
class Validity:
    """Limits.

    Attributes
    ----------
    min_distance : float
        Of two atoms, in units of the sum of their covalent radii.
    max_force : float
        Largest predicted force on an atom, in eV/Å.
    max_leverage : float
        Largest leverage of an atom.
    whole : bool
        Whether a structure must not fall into more parts than those of the training set.
    """

    min_distance: float = 0.6
    max_force: float = 50.0
    max_leverage: float = float("inf")
    whole: bool = True

    def of_geometry(self, atoms: Any, parts: "Parts") -> Optional[str]:
        """What is wrong with a frame before a model has seen it, for tables; None if nothing is."""
        if not len(atoms):
            return "no atoms"
        if not (np.isfinite(atoms.positions).all() and np.isfinite(atoms.cell[:]).all()):
            return "positions not finite"
        closest, number = _bonds(atoms)
        if closest < self.min_distance:
            return "atoms too close"
        if self.whole and number > parts.most(atoms):
            return "torn apart"
        return None

    def of_prediction(self, leverage: np.ndarray, forces: np.ndarray) -> Optional[str]:
        """The same from a model's leverage (N,) and forces (N, 3)."""
        if not (np.isfinite(leverage).all() and np.isfinite(forces).all()):
            return "prediction not finite"
        if np.linalg.norm(forces, axis=1).max() > self.max_force:
            return "force too large"
        if leverage.max() > self.max_leverage:
            return "leverage too large"
        return None


class Parts:
    """Number of parts into which training structures fall.

    Parameters
    ----------
    frames : iterable of ase.Atoms
    """

    def __init__(self, frames: Iterable[Any]) -> None:
        self.of_formula: Dict[str, int] = {}
        for atoms in frames:
            formula = str(atoms.symbols.formula.format("hill"))
            self.of_formula[formula] = max(self.of_formula.get(formula, 1), _bonds(atoms)[1])

    def most(self, atoms: Any) -> float:
        """Of a formula that the training set lacks: one if all its structures are in one piece, else any number."""
        other = 1.0 if set(self.of_formula.values()) == {1} else float("inf")
        return self.of_formula.get(str(atoms.symbols.formula.format("hill")), other)


def _bonds(atoms: Any) -> "tuple[float, int]":
    """The smallest distance in units of the sum of covalent radii, and the number of parts."""
    from ase.neighborlist import natural_cutoffs, neighbor_list
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    radii = np.asarray(natural_cutoffs(atoms))
    first, second, distance = neighbor_list("ijd", atoms, list(BONDED * radii))
    pairs = coo_matrix((np.ones(len(first)), (first, second)), shape=(len(atoms), len(atoms)))
    number, _ = connected_components(pairs, directed=False)
    return float((distance / (radii[first] + radii[second])).min(initial=np.inf)), int(number)
