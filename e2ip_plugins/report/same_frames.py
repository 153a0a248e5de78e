"""Predictions of several models, which must be for the same frames."""

import functools
from pathlib import Path
from typing import Dict, List, Optional, Sequence

import numpy as np

from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.copies import distinct
from e2ip_plugins.predictions.prediction_files import Predictions, read_predictions

#: References may differ by what eight decimals and a passage through float32 do to them.
REFERENCE_ATOL, REFERENCE_RTOL = 1e-5, 1e-6


def read_same_frames(
    files: Sequence[Path],
    ref_forces: Optional[str] = None,
    ref_energy: Optional[str] = None,
    required: bool = True,
    copies: bool = False,
) -> List[Predictions]:
    """Return predictions of several models; `InputError` unless they are for the same frames in the same order.

    With ``required`` every file needs a reference force; without ``copies`` a frame counts once.
    """
    # A file may be given twice, as it is and to be calibrated.
    read = {path: read_predictions(path, ref_forces, ref_energy, required) for path in files}
    read = _with_common_weights(read)
    if not copies:
        read = {path: distinct(predictions, strict=False) for path, predictions in read.items()}
    predictions = [read[path] for path in files]
    for p in predictions:
        if required and not p.labelled:
            raise InputError(f"{p.path}: no atom has a finite reference force whose weight is not zero")
        if problem := difference(predictions[0], p):
            raise InputError(problem)
    return predictions


def _with_common_weights(read: Dict[Path, Predictions]) -> Dict[Path, Predictions]:
    """Leave out of files of equally many frames what has weight zero in one of them: not every writer keeps weights."""
    if len({p.total for p in read.values()}) > 1:
        return read
    common = functools.reduce(np.intersect1d, [p.index for p in read.values()])
    chosen = {path: p.only(np.flatnonzero(np.isin(p.index, common))) for path, p in read.items()}
    counted = np.logical_and.reduce([p.counted for p in chosen.values()])
    return {path: p.with_forces_of(counted) for path, p in chosen.items()}


def difference(a: Predictions, b: Predictions) -> Optional[str]:
    """Return where two files differ in number of frames, species or reference forces, for the user; None: nowhere.

    Without references the positions must agree except for the origin.
    """
    if len(a.sizes) != len(b.sizes):
        return (
            f"{b.path}: has {len(b.sizes)} frames, but {a.path} has {len(a.sizes)}; compare predictions for the same "
            "frames, those of another set behind --ood (NequIP's xyz writer appends to an existing file)"
        )
    if a.labelled != b.labelled:
        labelled, unlabelled = (a, b) if a.labelled else (b, a)
        return f"{unlabelled.path}: has no reference forces, but {labelled.path} has; give both with them, or neither"
    for number, atoms, other_atoms in zip(b.index, a.atoms_of, b.atoms_of, strict=True):
        if not np.array_equal(a.species[atoms], b.species[other_atoms]):
            return f"{b.path}: the species of frame {number} differ from those in {a.path}"
        x, y = (p.reference_forces[atoms] if p.labelled else _centred(p.positions[atoms]) for p in (a, b))
        if not np.allclose(x, y, rtol=REFERENCE_RTOL, atol=REFERENCE_ATOL, equal_nan=True):
            return (
                f"{b.path}: the {'reference forces' if a.labelled else 'positions'} of frame {number} differ from "
                f"those in {a.path}; compare predictions for the same frames in the same order; those of another set "
                "go behind --ood"
            )
    return None


def _centred(positions: np.ndarray) -> np.ndarray:
    return positions - positions.mean(0)
