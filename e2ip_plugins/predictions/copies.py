"""Frames that a file of predictions has more than once: they count once."""

from dataclasses import replace
from typing import Any, Dict, List, Tuple

import numpy as np

from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.prediction_files import Predictions

#: Predictions of one model in other batches or on other machines differ by less.
_TOLERANCES: Dict[str, Any] = {"rtol": 1e-3, "atol": 1e-4, "equal_nan": True}


#: Two frames of one structure, and in what they differ.
_Conflict = Tuple[int, int, str]


def distinct(p: Predictions, strict: bool = True) -> Predictions:
    """Return the predictions without further copies of a frame; ``remarks`` tells what was left out.

    Of copies with and without references those with references are kept.

    Raises
    ------
    InputError
        With ``strict``, for copies of a frame with different predictions or references; otherwise ``remarks`` tells it.
    """
    chosen, conflicts = _without_copies(p)
    texts = []
    if conflicts:
        texts.append(_conflict_text(p, conflicts))
        if strict:
            raise InputError(f"{p.path}: {texts[0]}")
    copies = len(p.sizes) - len(chosen)
    if copies:
        texts.append(f"{copies} frame{'s are' if copies > 1 else ' is'} there more than once, and count once")
    return replace(p.only(chosen), remarks=(*p.remarks, *texts))


def _without_copies(p: Predictions) -> Tuple[np.ndarray, List[_Conflict]]:
    """Return the frames to keep, and pairs of kept frames of one structure."""
    kept: Dict[str, List[int]] = {}
    conflicts: List[_Conflict] = []
    unlabelled = np.bincount(p.frame_of_atom, np.isnan(p.reference_forces).sum(-1), len(p.sizes))
    for i in np.argsort(unlabelled, kind="stable").tolist():
        known = kept.setdefault(p.frames[i], [])
        differences = [_difference(p, j, i) for j in known]
        if all(differences):
            conflicts += [(known[0], i, differences[0])] if known else []
            known.append(i)
    return np.array(sorted(i for known in kept.values() for i in known), dtype=int), conflicts


def _difference(p: Predictions, i: int, j: int) -> str:
    """Return in what two frames of one structure differ, or an empty string.

    Reference forces are compared where both frames have them.
    """
    a, b = p.atoms_of[i], p.atoms_of[j]
    if not all(np.allclose(values[a], values[b], **_TOLERANCES) for values in (p.forces, *p.parameters.values())):
        return "predictions"
    both = np.isfinite(p.reference_forces[a]) & np.isfinite(p.reference_forces[b])
    same = np.allclose(p.reference_forces[a][both], p.reference_forces[b][both], **_TOLERANCES)
    return "" if same else "reference forces"


def _conflict_text(p: Predictions, conflicts: List[_Conflict]) -> str:
    first, second, what = conflicts[0]
    i, j = sorted(p.index[[first, second]])
    more = f" ({len(conflicts)} such frames)" if len(conflicts) > 1 else ""
    models = "models? (NequIP's xyz writer appends to a file that is already there)"
    source = models if what == "predictions" else "methods?"
    return f"frames {i} and {j} are the same structure with different {what}{more}: of two {source}"
