"""``e2ip select``: the few frames of runs that are worth a label."""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import List, Optional, Sequence

import numpy as np
from ase import Atoms

from e2ip_plugins.active.features import FeatureModel, Features, check, collect
from e2ip_plugins.active.scoring import SELECTION_METHODS
from e2ip_plugins.active.validity import Parts, Validity
from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.columns import without_labels
from e2ip_plugins.predictions.fingerprints import fingerprint
from e2ip_plugins.predictions.labelled import LabelledFrame, bare

#: If the mean leverage of a species in the training frames is larger than this, or smaller than its inverse, they are
#: not those that the model was fitted to: with these it is 1 except for rounding, with other frames of the same run it
#: is larger by some percent.
_MEAN_LEVERAGE = 1.02


@dataclass(frozen=True)
class SelectOptions:
    """Options of ``e2ip select``.

    Attributes
    ----------
    number : int
        Number of frames to select.
    method : str
        Key of `SELECTION_METHODS`.
    validity : Validity
        Limits of valid frames.
    weight : float, optional
        Weight of `by_leverage`, only for method ``leverage``.
    seed : int
        Seed of method ``random``.

    Raises
    ------
    InputError
        Unknown methods, and weights that are not positive or have no effect.
    """

    number: int
    method: str = "leverage"
    validity: Validity = field(default_factory=Validity)
    weight: Optional[float] = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in SELECTION_METHODS:
            raise InputError(f"--method {self.method}: choose from {', '.join(SELECTION_METHODS)}")
        if self.weight is not None and self.method != "leverage":
            raise InputError(f"--weight is for --method leverage, not {self.method}")
        if self.weight is not None and not 0.0 < self.weight < math.inf:
            raise InputError(f"--weight {self.weight}: a number above 0")


@dataclass(frozen=True)
class Candidate:
    """A frame of a run: atoms, file, and number in the file."""

    atoms: Atoms
    source: str
    index: int


@dataclass
class Selection:
    """Frames that were selected.

    Attributes
    ----------
    method : str
    frames : list of Candidate
        Frames in the order in which they were taken.
    scores : list of float
        Score of each frame when it was taken: leverage; with ``farthest`` distance, with ``energy`` eV per atom.
    rejected : Counter
        Number of invalid frames, by reason.
    valid : int
        Number of valid frames.
    warnings : list of str
        What the user should know.
    """

    method: str = "leverage"
    frames: List[Candidate] = field(default_factory=list)
    scores: List[float] = field(default_factory=list)
    rejected: Counter = field(default_factory=Counter)
    valid: int = 0
    warnings: List[str] = field(default_factory=list)

    def reasons(self) -> str:
        """Return in words why frames were rejected."""
        return ", ".join(f"{count} {reason}" for reason, count in self.rejected.most_common()) or "none rejected"

    def lines(self) -> List[str]:
        """Return the result in words."""
        total = self.valid + sum(self.rejected.values())
        score = f"{self.scores[0]:.3g} of the first, {self.scores[-1]:.3g} of the last"
        return [
            f"{total} frames, {self.valid} candidates ({self.reasons()}); {len(self.frames)} taken",
            f"{SELECTION_METHODS[self.method].score}: {score}",
        ]

    def marked_frames(self) -> List[Atoms]:
        """Return copies of the selected frames without labels, with rank, score and origin in their info."""
        frames = [without_labels(candidate.atoms) for candidate in self.frames]
        for rank, (frame, candidate, score) in enumerate(zip(frames, self.frames, self.scores, strict=True)):
            frame.info.update(select_rank=rank, select_score=score, select_method=self.method)
            frame.info.update(select_source=candidate.source, select_index=candidate.index)
        return frames


def select(
    model: FeatureModel, training: Sequence[LabelledFrame], candidates: Sequence[Candidate], options: SelectOptions
) -> Selection:
    """Select frames of runs for labelling.

    Parameters
    ----------
    model : FeatureModel
        Model with a fitted leverage.
    training : sequence of LabelledFrame
        Frames that the model was trained on.
    candidates : sequence of Candidate
    options : SelectOptions

    Raises
    ------
    InputError
        A leverage that was not fitted, no valid candidates, species that the model does not know.
    """
    check(model)
    selection = Selection(options.method)
    geometric = _valid_geometries(training, candidates, options.validity, selection.rejected)
    valid, features = _valid_predictions(model, geometric, options.validity, selection.rejected)
    selection.valid = len(valid)
    if not valid or features is None:
        raise InputError(f"none of {len(candidates)} frames is a candidate: {selection.reasons()}")
    if len(valid) < options.number:
        selection.warnings.append(
            f"only {len(valid)} of {len(candidates)} frames are candidates: all of them are taken"
        )
    known = collect(model, training)
    mean = _extreme_mean(known)
    if not 1.0 / _MEAN_LEVERAGE < mean < _MEAN_LEVERAGE:
        selection.warnings.append(
            f"the mean leverage of a species in the training frames is {mean:.3f}, but 1 in those that the model was "
            "fitted to: give all of these and no others, or what is known already is selected again"
        )
    take = SELECTION_METHODS[options.method].take
    for index, score in take(known, features, min(options.number, len(valid)), options.weight, options.seed):
        selection.frames.append(valid[index])
        selection.scores.append(score)
    return selection


def _valid_geometries(
    training: Sequence[LabelledFrame], candidates: Sequence[Candidate], validity: Validity, rejected: Counter
) -> List[Candidate]:
    """Return the candidates that may be shown to a model, and count the others."""
    parts = Parts(frame.atoms for frame in training)
    known = {fingerprint(frame.atoms): "in the training set" for frame in training}
    valid = []
    for candidate in candidates:
        problem = validity.of_geometry(candidate.atoms, parts)
        mark = fingerprint(candidate.atoms) if problem is None else ""
        problem = known.get(mark, problem)
        if problem is None:
            # A frame that a monitor has collected may be in its run, too.
            known[mark] = "copies of others"
            valid.append(candidate)
        else:
            rejected[problem] += 1
    return valid


def _valid_predictions(
    model: FeatureModel, candidates: List[Candidate], validity: Validity, rejected: Counter
) -> "tuple[List[Candidate], Optional[Features]]":
    """Return the candidates whose predictions are within the limits, with their features, and count the others."""
    if not candidates:
        return [], None
    frames = [LabelledFrame(bare(c.atoms), f"{c.source}, frame {c.index}") for c in candidates]
    features, kept = collect(model, frames, forces=True), []
    for i in range(features.count):
        atoms = features.frames == i
        problem = validity.of_prediction(features.leverage[atoms], features.forces[atoms])
        if problem is None:
            kept.append(i)
        else:
            rejected[problem] += 1
    return [candidates[i] for i in kept], features.take(kept)


def _extreme_mean(known: Features) -> float:
    """Return the mean leverage of the species for which it is farthest from 1."""
    means = [known.leverage[known.kinds == kind].mean() for kind in np.unique(known.kinds)]
    # A species whose features are all the same has a mean of 0.
    return float(max((mean for mean in means if mean > 1e-6), key=lambda mean: abs(np.log(mean)), default=1.0))
