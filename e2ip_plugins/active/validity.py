"""Limits by which frames of a run are physically possible and of use: other frames are not worth a label."""

from dataclasses import dataclass
from typing import Dict, Iterable, Optional, Tuple

import numpy as np
from ase import Atoms
from ase.neighborlist import natural_cutoffs, neighbor_list
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from e2ip_plugins.errors import InputError

#: Atoms within this many times the sum of their covalent radii are in one part.
BONDED = 1.5


@dataclass(frozen=True)
class Validity:
    """Limits of valid frames.

    Attributes
    ----------
    min_distance : float
        Smallest distance of two atoms, in units of the sum of their covalent radii.
    max_force : float
        Largest predicted force on an atom, in eV/Å.
    max_leverage : float
        Largest leverage of an atom.
    one_piece : bool
        Whether a structure must not have more parts than those of the training set.

    Raises
    ------
    InputError
        A limit is negative or NaN.
    """

    min_distance: float = 0.6
    max_force: float = 50.0
    max_leverage: float = float("inf")
    one_piece: bool = True

    def __post_init__(self) -> None:
        for name in ("min_distance", "max_force", "max_leverage"):
            if not getattr(self, name) >= 0.0:
                raise InputError(f"--{name.replace('_', '-')} {getattr(self, name)}: a number of at least 0")

    def of_geometry(self, atoms: Atoms, parts: "Parts") -> Optional[str]:
        """Return what is wrong with a frame that no model has seen yet, in a few words; None if nothing is."""
        if not len(atoms):
            return "no atoms"
        if not (np.isfinite(atoms.positions).all() and np.isfinite(atoms.cell[:]).all()):
            return "positions not finite"
        closest, number = _bonds(atoms)
        if closest < self.min_distance:
            return "atoms too close"
        if self.one_piece and number > parts.most(atoms):
            return "torn apart"
        return None

    def of_prediction(self, leverage: np.ndarray, forces: np.ndarray) -> Optional[str]:
        """Return what is wrong with a model's leverage (N,) and forces (N, 3); None if nothing is."""
        if not (np.isfinite(leverage).all() and np.isfinite(forces).all()):
            return "prediction not finite"
        if np.linalg.norm(forces, axis=1).max() > self.max_force:
            return "force too large"
        if leverage.max() > self.max_leverage:
            return "leverage too large"
        return None


class Parts:
    """Largest number of parts of the training structures, by formula.

    Parameters
    ----------
    frames : iterable of ase.Atoms
    """

    def __init__(self, frames: Iterable[Atoms]) -> None:
        self.of_formula: Dict[str, int] = {}
        for atoms in frames:
            formula = atoms.get_chemical_formula()
            self.of_formula[formula] = max(self.of_formula.get(formula, 1), _bonds(atoms)[1])

    def most(self, atoms: Atoms) -> float:
        """Return the number of parts allowed; for an unknown formula 1 if all training structures have one part."""
        unknown = 1.0 if set(self.of_formula.values()) == {1} else float("inf")
        return self.of_formula.get(atoms.get_chemical_formula(), unknown)


def _bonds(atoms: Atoms) -> Tuple[float, int]:
    """Return the smallest distance in units of the sum of covalent radii, and the number of parts."""
    radii = np.asarray(natural_cutoffs(atoms))
    first, second, distance = neighbor_list("ijd", atoms, list(BONDED * radii))
    pairs = coo_matrix((np.ones(len(first)), (first, second)), shape=(len(atoms), len(atoms)))
    number, _ = connected_components(pairs, directed=False)
    return float((distance / (radii[first] + radii[second])).min(initial=np.inf)), int(number)
