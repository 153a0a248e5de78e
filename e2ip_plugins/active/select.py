"""``e2ip select``: of many frames of runs, the few that are worth a label.

By leverage: the frame with the largest one is taken, its atoms enter the moments of the training set, and all others
are scored anew. Frames like it are no longer far then, so that copies drop out by themselves; what is taken next is far
from the training set and from all that has been taken.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from e2ip_plugins.active.validity import Parts, Validity
from e2ip_plugins.errors import InputError
from e2ip_plugins.fitting.features import Features, Passes, check, collect
from e2ip_plugins.fitting.moments import Moments, distances, norms_of
from e2ip_plugins.fitting.training_atoms import TrainingAtoms
from e2ip_plugins.leverage.form import FORM
from e2ip_plugins.predictions.fingerprints import fingerprint
from e2ip_plugins.predictions.labelled import Frame, bare

#: Mean leverage of a species in the training frames beyond which they are not those that the model was fitted to: of
#: these it is 1 but for rounding, of other frames of the same run some percent more.
STRANGE = 1.02


@dataclass(frozen=True)
class Candidate:
    """A frame of a run.

    Attributes
    ----------
    atoms : ase.Atoms
    source : str
        File.
    index : int
        Of the frame in it.
    """

    atoms: Any
    source: str
    index: int


@dataclass
class Selection:
    """What was taken.

    Attributes
    ----------
    frames : list of Candidate
        In the order in which they were taken.
    scores : list of float
        Of each when it was taken: leverage or, with ``farthest``, distance.
    rejected : Counter
        Frames that were no candidates, by reason.
    valid : int
        Frames that were.
    warnings : list of str
    """

    frames: List[Candidate] = field(default_factory=list)
    scores: List[float] = field(default_factory=list)
    rejected: Counter = field(default_factory=Counter)
    valid: int = 0
    warnings: List[str] = field(default_factory=list)


def select(
    model: Passes,
    training: Sequence[Frame],
    candidates: Sequence[Candidate],
    number: int,
    method: str = "leverage",
    validity: Optional[Validity] = None,
    weight: Optional[float] = None,
    seed: int = 0,
) -> Selection:
    """Take frames of runs to be labelled.

    Parameters
    ----------
    model : Passes
        With a fitted leverage.
    training : sequence of Frame
        What the model was trained on.
    candidates : sequence of Candidate
    number : int
        Frames wanted.
    method : str
        Of `METHODS`.
    validity : Validity, optional
        What a frame must not exceed.
    weight : float, optional
        See `by_leverage`.
    seed : int
        Of method ``random``.

    Raises
    ------
    InputError
        Leverage that was not fitted, no valid candidates, species that the model does not know.
    """
    if method not in METHODS:
        raise InputError(f"--method {method}: choose from {', '.join(METHODS)}")
    check(model)
    validity, found = validity or Validity(), Selection()
    possible = _possible(training, candidates, validity, found.rejected)
    if possible:
        frames = [
            Frame(bare(c.atoms), np.full((len(c.atoms), 3), np.nan), f"{c.source}, frame {c.index}") for c in possible
        ]
        features = collect(model, frames, forces=True)
        kept = []
        for i in range(features.count):
            own = features.frames == i
            problem = validity.of_prediction(features.leverage[own], features.forces[own])
            if problem is None:
                kept.append(i)
            else:
                found.rejected[problem] += 1
        possible, features = [possible[i] for i in kept], features.take(kept)
    found.valid = len(possible)
    if not possible:
        raise InputError(f"none of {len(candidates)} frames is a candidate: {told(found.rejected)}")
    if len(possible) < number:
        found.warnings.append(f"only {len(possible)} of {len(candidates)} frames are candidates: all of them are taken")
    known = collect(model, training)
    mean = _strangest_mean(known)
    if not 1.0 / STRANGE < mean < STRANGE:
        found.warnings.append(
            f"the mean leverage of a species in the training frames is {mean:.3f}, but 1 in those that the model was "
            "fitted to: give all of these and no others, or what is known already is selected again"
        )
    for index, score in METHODS[method](known, features, min(number, len(possible)), weight, seed):
        found.frames.append(possible[index])
        found.scores.append(score)
    return found


def _strangest_mean(known: Features) -> float:
    """The mean leverage of a species that is farthest from 1."""
    means = [known.leverage[known.kinds == kind].mean() for kind in np.unique(known.kinds)]
    # A species whose features are all the same has none.
    return float(max((mean for mean in means if mean > 1e-6), key=lambda mean: abs(np.log(mean)), default=1.0))


def told(rejected: Counter) -> str:
    """Reasons and numbers of frames in words."""
    return ", ".join(f"{count} {reason}" for reason, count in rejected.most_common()) or "none rejected"


def _possible(
    training: Sequence[Frame], candidates: Sequence[Candidate], validity: Validity, rejected: Counter
) -> List[Candidate]:
    """Candidates that may be shown to a model."""
    parts = Parts(frame.atoms for frame in training)
    known = {fingerprint(frame.atoms): "in the training set" for frame in training}
    possible = []
    for candidate in candidates:
        problem = validity.of_geometry(candidate.atoms, parts)
        mark = fingerprint(candidate.atoms) if problem is None else ""
        if mark in known:
            problem = known[mark]
        if problem is None:
            # Of a frame that a monitor has collected, a run has another.
            known[mark] = "copies of others"
            possible.append(candidate)
        else:
            rejected[problem] += 1
    return possible


def by_leverage(
    training: Features, candidates: Features, number: int, weight: Optional[float] = None, seed: int = 0
) -> Iterator[Tuple[int, float]]:
    """Frames with the largest mean leverage of their atoms, each of which enters the moments.

    Parameters
    ----------
    training, candidates : Features
    number : int
    weight : float, optional
        Training atoms that an atom of a frame that was taken counts for. Default: as many as there are per feature in
        the region that it is in, N/D, and 1 at least. A squared Mahalanobis distance of h, 1 for training atoms on
        average, becomes h / (1 + 1/D + h): a copy is about as near as a training atom, however many of those there
        are. With weight 1 the moments are those of a fit to training set and frames.

    Yields
    ------
    index : int
    score : float
        Mean leverage, all that was taken before counted in.
    """
    working = _Working(training, candidates, weight)
    free = np.ones(candidates.count, dtype=bool)
    for _ in range(number):
        score = np.where(free, working.scores(), -np.inf)
        best = int(np.argmax(score))
        yield best, float(score[best])
        free[best] = False
        working.take(best)


class _Working:
    """Moments of training atoms and of the frames that have been taken, and what candidates' leverage is with them."""

    def __init__(self, training: Features, candidates: Features, weight: Optional[float]) -> None:
        self.candidates, self.weight = candidates, weight
        self.own = {int(kind): np.flatnonzero(candidates.kinds == kind) for kind in np.unique(candidates.kinds)}
        self.atoms = np.bincount(candidates.frames, minlength=candidates.count)
        self.features = _kept(training)
        self.weights = {kind: np.ones(len(x)) for kind, x in self.features.items()}
        self.moments = Moments(self.features)
        self.usual = {kind: [part.count for part in self._parts(kind)] for kind in self.features}

    def scores(self) -> np.ndarray:
        """Mean leverage of every candidate (F,)."""
        found = {kind: self.moments.leverage_of(kind, x, self.weights[kind]) for kind, x in self.features.items()}
        norms = norms_of({kind: mean for kind, (_, mean) in found.items()}, self.candidates.scalars.shape[1])
        h = np.full(len(self.candidates.kinds), FORM.far)
        for kind, atoms in self.own.items():
            if kind in found:
                # Not above what the model says: its norm is within the limit.
                h[atoms] = np.minimum(
                    norms[kind] * distances(found[kind][0], self.candidates.scalars[atoms], 0), FORM.far
                )
        return np.bincount(self.candidates.frames, h, self.candidates.count) / self.atoms

    def take(self, frame: int) -> None:
        """A candidate's atoms enter the moments."""
        own = self.candidates.frames == frame
        for kind in np.unique(self.candidates.kinds[own]).tolist():
            x = self.candidates.scalars[own & (self.candidates.kinds == kind)]
            several = bool(self.moments.regions.get(kind))
            regions = self.moments.nearest(kind, x) if several else np.zeros(len(x), dtype=int)
            for region in np.unique(regions).tolist():
                part, usual = x[regions == region], self.usual.get(kind, [0.0])[region]
                weight = max(1.0, usual / x.shape[1]) if self.weight is None else self.weight
                self.moments.add(kind, part, weight, region if several else None)
                self.features[kind] = np.concatenate([self.features.get(kind, part[:0]), part])
                new = np.full(len(part), weight)
                self.weights[kind] = np.concatenate([self.weights.get(kind, new[:0]), new])

    def _parts(self, kind: int) -> Sequence[Any]:
        return self.moments.regions[kind] or [self.moments.total[kind]]


def _kept(training: Features) -> Dict[int, np.ndarray]:
    """Features by kind of as many atoms as a fit keeps, in its order."""
    import torch

    atoms = TrainingAtoms(int(training.kinds.max()) + 1)
    nothing = torch.zeros(len(training.kinds))
    atoms.add(torch.from_numpy(training.scalars), torch.from_numpy(training.kinds), nothing)
    return {kind: atoms.features(kind) for kind in np.flatnonzero(atoms.count).tolist()}


def at_random(
    training: Features, candidates: Features, number: int, weight: Optional[float] = None, seed: int = 0
) -> Iterator[Tuple[int, float]]:
    """Any frames; the score is their mean leverage."""
    for index in np.random.default_rng(seed).permutation(candidates.count)[:number].tolist():
        yield index, float(candidates.leverage[candidates.frames == index].mean())


def by_distance(
    training: Features, candidates: Features, number: int, weight: Optional[float] = None, seed: int = 0
) -> Iterator[Tuple[int, float]]:
    """Frames that are farthest from the nearest training frame and from the nearest one that was taken.

    A frame is where the means of its atoms' features are, of every species by itself, in the axes and units of the
    species' covariance over the training set. The score is the Euclidean distance. Of species that the training set
    lacks there are no such units: frames with them are at a distance of 1000 and more from those without.
    """
    moments = Moments(_kept(training))
    new = sorted(set(candidates.kinds.tolist()) - set(moments.total))
    known, points = (_descriptors(features, moments, new) for features in (training, candidates))
    nearest = np.full(len(points), np.inf)
    for point in known:
        nearest = np.minimum(nearest, np.linalg.norm(points - point, axis=1))
    for _ in range(number):
        best = int(np.argmax(nearest))
        yield best, float(nearest[best])
        nearest = np.minimum(nearest, np.linalg.norm(points - points[best], axis=1))
        nearest[best] = -np.inf


def _descriptors(features: Features, moments: Moments, new: Sequence[int]) -> np.ndarray:
    """(frames, new + species × D); zero, the mean of the training set, for species that a frame has not."""
    has = [np.isin(np.arange(features.count), features.frames[features.kinds == kind]) for kind in new]
    columns = [1e3 * column[:, None] for column in has]
    for kind in moments.total:
        own = features.kinds == kind
        white = moments.whiten(kind, features.scalars[own])
        which, count = features.frames[own], np.bincount(features.frames[own], minlength=features.count)
        sums = np.zeros((features.count, white.shape[1]))
        np.add.at(sums, which, white)
        columns.append(sums / np.maximum(count, 1)[:, None])
    return np.concatenate(columns, axis=1)


#: How frames are taken, by name.
METHODS: Dict[str, Callable[..., Iterator[Tuple[int, float]]]] = {
    "leverage": by_leverage,
    "random": at_random,
    "farthest": by_distance,
}

#: What their scores are.
SCORES = {
    "leverage": "mean leverage, with all before counted in",
    "random": "mean leverage",
    "farthest": "distance from the nearest",
}
