"""Doubts about the data sets of a training: wrong units, shared frames, species that only the validation set has."""

from typing import Any, Iterable, List, NamedTuple, Optional, Set, Tuple

import numpy as np

from e2ip_plugins.keys import KCAL_PER_MOL
from e2ip_plugins.predictions.fingerprints import fingerprint_of

#: Root mean square of force components in eV/Å that only data in other units reaches: hot molecules have 3.
LARGEST_FORCES_RMS = 12.0


class Configuration(NamedTuple):
    """One frame of a data set, as MACE or NequIP holds it.

    Attributes
    ----------
    species : (N,)
        Numbers of any kind.
    positions : (N, 3)
        In Å.
    cell : (3, 3)
        In Å; 0 for none.
    state
        Whatever else tells frames apart, such as charge and spin.
    forces : (N, 3) or None
        Reference, in the units of the data set.
    """

    species: np.ndarray
    positions: np.ndarray
    cell: np.ndarray
    state: Any = None
    forces: Optional[np.ndarray] = None

    @property
    def mark(self) -> Tuple[str, Any]:
        """What two copies of a frame have in common."""
        return fingerprint_of(self.species, self.positions, self.cell), self.state


def doubts(training: Iterable[Configuration], validation: Iterable[Configuration]) -> List[str]:
    """Return warnings about two data sets to which a leverage is to be fitted.

    Parameters
    ----------
    training, validation : iterable of Configuration
        Read once, one after the other.
    """
    known: Set[int] = set()
    marks = set()
    squares, components = 0.0, 0
    for frame in training:
        known.update(frame.species.tolist())
        marks.add(frame.mark)
        if frame.forces is not None:
            finite = np.isfinite(frame.forces)
            squares += float(np.square(frame.forces, where=finite, out=np.zeros(finite.shape)).sum())
            components += int(finite.sum())
    total = shared = unknown = 0
    for frame in validation:
        total += 1
        # Isolated atoms are all alike.
        shared += len(frame.species) > 1 and frame.mark in marks
        unknown += not known.issuperset(frame.species.tolist())
    texts = []
    if squares > LARGEST_FORCES_RMS**2 * components:
        texts.append(
            f"the training forces have a root mean square of {np.sqrt(squares / components):.3g} per component: what "
            "is put out is taken for eV and Å. Are they in kcal/mol/Å? Multiply energies and forces by "
            f"{KCAL_PER_MOL:.6g}"
        )
    if shared:
        texts.append(
            f"{shared} of {total} validation frames are training frames: error bars come out too small; give frames "
            "that the model is not trained on"
        )
    if total and unknown == total:
        texts.append(
            "every validation frame has species that the training set lacks: the leverage cannot be fitted to them, "
            "and the model will predict as in evidence mode 'coupled'"
        )
    return texts
