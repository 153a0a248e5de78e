"""Doubts about the data sets of a training: wrong units, shared frames, species that only the validation set has."""

from typing import Iterable, List, Set

import numpy as np

from e2ip_plugins.keys import KCAL_PER_MOL
from e2ip_plugins.predictions.labelled import LabelledFrame

#: Root mean square of force components in eV/Å that only data in other units reaches: hot molecules have 3.
LARGEST_FORCES_RMS = 12.0


def doubts(training: Iterable[LabelledFrame], validation: Iterable[LabelledFrame]) -> List[str]:
    """Return warnings about two data sets to which a leverage is to be fitted.

    Parameters
    ----------
    training, validation : iterable of LabelledFrame
        Read once, one after the other. Frames that do not count are passed over.
    """
    known: Set[int] = set()
    marks = set()
    squares, components = 0.0, 0
    for frame in (frame for frame in training if frame.counts):
        known.update(frame.atoms.numbers.tolist())
        marks.add(frame.mark)
        forces = frame.counted_forces
        squares += float(np.nansum(np.square(forces)))
        components += int(np.isfinite(forces).sum())
    total = shared = unknown = 0
    for frame in (frame for frame in validation if frame.counts):
        total += 1
        # Isolated atoms are all alike.
        shared += len(frame.atoms) > 1 and frame.mark in marks
        unknown += not known.issuperset(frame.atoms.numbers.tolist())
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
