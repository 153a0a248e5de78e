"""Scores by which ``e2ip select`` takes frames, one after another: leverage, chance, distance, energy.

By leverage: the frame with the largest one is taken, its atoms enter the moments of the training set, and all other
frames are scored anew. Frames like it are no longer far then, so that copies drop out. The next frame is therefore far
from the training set and from all frames that were taken.
"""

from typing import Callable, Dict, Iterator, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch

from e2ip_plugins.active.features import Features
from e2ip_plugins.errors import InputError
from e2ip_plugins.fitting.moments import Moments, leverages, norms_of
from e2ip_plugins.fitting.training_atoms import TrainingAtoms, TrainingBatch
from e2ip_plugins.leverage.form import FORM


def by_leverage(
    training: Features, candidates: Features, number: int, weight: Optional[float] = None, seed: int = 0
) -> Iterator[Tuple[int, float]]:
    """Take the frames with the largest mean leverage of their atoms, each of which enters the moments.

    Parameters
    ----------
    training, candidates : Features
    number : int
        Number of frames.
    weight : float, optional
        Number of training atoms that an atom of a frame that was taken counts for. Default: N/D, the number of training
        atoms per feature in its region, and 1 at least. A squared Mahalanobis distance of h, 1 for training atoms on
        average, then becomes h / (1 + 1/D + h): a copy is about as near as a training atom, whatever their number.
        With weight 1 the moments are those of a fit to training set and frames.

    Yields
    ------
    index : int
        Number of a candidate.
    score : float
        Its mean leverage, with all frames taken before counted in.
    """
    working = _WorkingMoments(training, candidates, weight)
    free = np.ones(candidates.count, dtype=bool)
    for _ in range(number):
        score = np.where(free, working.scores(), -np.inf)
        best = int(np.argmax(score))
        yield best, float(score[best])
        free[best] = False
        working.take(best)


class _WorkingMoments:
    """Moments of training atoms and of the frames that were taken, and the leverage of candidates with them."""

    def __init__(self, training: Features, candidates: Features, weight: Optional[float]) -> None:
        self.candidates, self.weight = candidates, weight
        self.atoms = np.bincount(candidates.frames, minlength=candidates.count)
        self.features = _features_of_fit(training)
        self.weights = {kind: np.ones(len(x)) for kind, x in self.features.items()}
        self.moments = moments = Moments(self.features)
        # Training atoms by kind and region.
        self.counts = {k: [p.count for p in moments.regions[k] or [moments.total[k]]] for k in self.features}

    def scores(self) -> np.ndarray:
        """Return the mean leverage of every candidate (F,)."""
        forms = {kind: self.moments.leverage_of(kind, x, self.weights[kind]) for kind, x in self.features.items()}
        norms = norms_of({kind: mean for kind, (_, mean) in forms.items()}, self.candidates.scalars.shape[1])
        h = np.full(len(self.candidates.kinds), FORM.max_leverage)
        for kind, (form, _) in forms.items():
            atoms = np.flatnonzero(self.candidates.kinds == kind)
            if len(atoms):
                # The model's leverage has the same upper limit.
                h[atoms] = np.minimum(
                    norms[kind] * leverages(form, self.candidates.scalars[atoms], 0), FORM.max_leverage
                )
        return np.bincount(self.candidates.frames, h, self.candidates.count) / self.atoms

    def take(self, frame: int) -> None:
        """Add a candidate's atoms to the moments."""
        of_frame = self.candidates.frames == frame
        for kind in np.unique(self.candidates.kinds[of_frame]).tolist():
            x = self.candidates.scalars[of_frame & (self.candidates.kinds == kind)]
            several = bool(self.moments.regions.get(kind))
            regions = self.moments.nearest(kind, x) if several else np.zeros(len(x), dtype=int)
            for region in np.unique(regions).tolist():
                part, count = x[regions == region], self.counts.get(kind, [0.0])[region]
                weight = max(1.0, count / x.shape[1]) if self.weight is None else self.weight
                self.moments.add(kind, part, weight, region if several else None)
                self.features[kind] = np.concatenate([self.features.get(kind, part[:0]), part])
                self.weights[kind] = np.append(self.weights.get(kind, ()), np.full(len(part), weight))


def _features_of_fit(training: Features) -> Dict[int, np.ndarray]:
    """Return the features by kind of as many atoms as a fit keeps, in its order."""
    atoms = TrainingAtoms(int(training.kinds.max()) + 1)
    scalars, kinds, frames = map(torch.from_numpy, (training.scalars, training.kinds, training.frames))
    atoms.add(scalars, kinds, torch.zeros(len(kinds)), TrainingBatch(frames))
    atoms.gather()
    return dict(atoms)


def at_random(
    training: Features, candidates: Features, number: int, weight: Optional[float] = None, seed: int = 0
) -> Iterator[Tuple[int, float]]:
    """Take frames at random; the score is their mean leverage."""
    for index in np.random.default_rng(seed).permutation(candidates.count)[:number].tolist():
        yield index, float(candidates.leverage[candidates.frames == index].mean())


def by_distance(
    training: Features, candidates: Features, number: int, weight: Optional[float] = None, seed: int = 0
) -> Iterator[Tuple[int, float]]:
    """Take the frames that are farthest from the nearest frame of the training set or of those taken.

    The place of a frame are the means of its atoms' features, for every species by itself, in the axes and units of
    the species' covariance over the training set. The score is the Euclidean distance. There are no such units for a
    species that the training set lacks: frames with it are at a distance of 1000 and more from those without.
    """
    moments = Moments(_features_of_fit(training))
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


def by_energy(
    training: Features, candidates: Features, number: int, weight: Optional[float] = None, seed: int = 0
) -> Iterator[Tuple[int, float]]:
    """Take the frames with the largest standard deviation of the energy per atom, each of which is known afterwards.

    Energies err as u · r with one unknown r ~ N(0, 1) (`e2ip_plugins.leverage.energies`). The energy of a frame that
    was taken tells the part of r along its u: what is left of the other vectors is orthogonal to it. A copy of a frame
    has nothing left.

    Yields
    ------
    index : int
        Number of a candidate.
    score : float
        |u| / number of atoms in eV, with the energies of all frames taken before known.

    Raises
    ------
    InputError
        The model has no uncertainties of energies.
    """
    if candidates.vectors is None:
        raise InputError(
            "--method energy: the model has no uncertainties of energies, which are fitted to validation energies at "
            "the end of a training and by e2ip fit"
        )
    left = candidates.vectors / np.bincount(candidates.frames, minlength=candidates.count)[:, None]
    free = np.ones(candidates.count, dtype=bool)
    for _ in range(number):
        score = np.linalg.norm(left, axis=1)
        best = int(np.argmax(np.where(free, score, -np.inf)))
        yield best, float(score[best])
        free[best] = False
        if score[best] > 0.0:
            known = left[best] / score[best]
            left = left - np.outer(left @ known, known)


def _descriptors(features: Features, moments: Moments, new: Sequence[int]) -> np.ndarray:
    """Return (frames, new + species × D); a species that a frame lacks is at 0, the mean of the training set."""
    columns = [1e3 * np.isin(np.arange(features.count), features.frames[features.kinds == k])[:, None] for k in new]
    for kind in moments.total:
        atoms = features.kinds == kind
        white, frames = moments.whiten(kind, features.scalars[atoms]), features.frames[atoms]
        sums = np.zeros((features.count, white.shape[1]))
        np.add.at(sums, frames, white)
        columns.append(sums / np.maximum(np.bincount(frames, minlength=features.count), 1)[:, None])
    return np.concatenate(columns, axis=1)


class Method(NamedTuple):
    """A method of selection: function, and what its scores are."""

    take: Callable[..., Iterator[Tuple[int, float]]]
    score: str


#: Methods of ``e2ip select`` by name.
SELECTION_METHODS = {
    "leverage": Method(by_leverage, "mean leverage, with all before counted in"),
    "random": Method(at_random, "mean leverage"),
    "farthest": Method(by_distance, "distance from the nearest"),
    "energy": Method(by_energy, "energy uncertainty per atom in eV, with all before known"),
}
