"""Moments of features of training atoms, and the buffers of the leverage from them; further atoms can be added."""

import warnings
from typing import Dict, Iterator, List, Mapping, Optional, Tuple

import numpy as np
import torch
from scipy.cluster.vq import kmeans2

from e2ip_plugins.leverage.form import FORM, LeverageForm, softened
from e2ip_plugins.leverage.module import Leverage

#: Atoms of a kind are all identical if their mean h before norming, per feature, is smaller: features have seven
#: digits.
ALIKE = 5e-7


class Scatter:
    """Number, mean (D,) and sum of outer products of the deviations from it (D, D) of some atoms.

    Parameters
    ----------
    x : (n, D)
    """

    def __init__(self, x: np.ndarray) -> None:
        size = x.shape[1]
        self.count, self.mean, self.sum = 0.0, np.zeros(size), np.zeros((size, size))
        self.add(x)

    @property
    def covariance(self) -> np.ndarray:
        """(D, D); zero for a single atom."""
        return self.sum / self.count

    def add(self, x: np.ndarray, weight: float = 1.0) -> None:
        """Add atoms (n, D), each as if there were ``weight`` of them."""
        if not len(x):
            return
        count, mean = weight * len(x), x.mean(0)
        inner, apart = x - mean, mean - self.mean
        total = self.count + count
        self.sum = self.sum + weight * inner.T @ inner + self.count * count / total * np.outer(apart, apart)
        self.mean, self.count = self.mean + count / total * apart, total


class Moments:
    """Moments of every kind (head and species) of atoms, and of its regions.

    Parameters
    ----------
    features : mapping of (n, D) arrays
        Atoms by kind; one at least.
    form : LeverageForm
    per_head : int, optional
        Kinds that a head has, of which the first are 0 to that, and so on. Heads know nothing of each other: what
        supports one's predictions says nothing of another's. None: there is one.

    Attributes
    ----------
    total : dict of Scatter
        By kind.
    regions : dict of list of Scatter
        Empty where a kind has a single region, which is the kind itself.
    """

    def __init__(
        self, features: Mapping[int, np.ndarray], form: LeverageForm = FORM, per_head: Optional[int] = None
    ) -> None:
        self.form, self.per_head = form, per_head
        self.total = {kind: Scatter(x) for kind, x in features.items()}
        self.regions: Dict[int, List[Scatter]] = {}
        for kind, x in features.items():
            number = number_of_regions(len(x), x.shape[1], len(self._of_head(kind)), form)
            self.regions[kind] = _regions(x, self._shrunk(kind), number)

    def weight(self, kind: int) -> float:
        """Return the share of the covariance within all kinds of the head in that of a kind.

        A species with few atoms has too flat a covariance: it is shrunk towards the one within all species, as if that
        had been seen on as many atoms as there are features.
        """
        total = self.total[kind]
        return len(total.mean) / (len(total.mean) + total.count)

    def add(self, kind: int, x: np.ndarray, weight: float = 1.0, region: Optional[int] = None) -> None:
        """Add atoms (n, D) of a kind, each as if there were ``weight`` of them: moments as if they had been there.

        Parameters
        ----------
        region : int, optional
            That they belong to, of a kind that has several.
        """
        if kind not in self.total:
            self.total[kind], self.regions[kind] = Scatter(x[:0]), []
        self.total[kind].add(x, weight)
        if self.regions[kind]:
            assert region is not None
            self.regions[kind][region].add(x, weight)

    def leverage_of(self, kind: int, features: np.ndarray, weights: np.ndarray) -> Tuple[Leverage, float]:
        """Return a leverage that knows this kind alone, as its kind 0, and the mean of h before norming.

        The leverage is in double precision.

        Parameters
        ----------
        features : (n, D)
        weights : (n,)
        """
        leverage = Leverage(features.shape[1], 1).double()
        self._fill(leverage, {0: kind})
        return leverage, float(np.average(leverages(leverage, features, 0, self.form), weights=weights))

    def store(self, leverage: Leverage, features: Mapping[int, np.ndarray]) -> None:
        """Fill the buffers of a leverage.

        Parameters
        ----------
        features : mapping of (n, D) arrays
            Atoms by kind, over which the mean leverage is to be 1.
        """
        self._fill(leverage, {kind: kind for kind in self.total})
        means = {kind: float(leverages(leverage, x, kind, self.form).mean()) for kind, x in features.items()}
        for kind in means:
            norms = norms_of({other: means[other] for other in self._of_head(kind)}, leverage.centres.shape[1])
            leverage.region_norms[kind] = norms[kind]

    def whiten(self, kind: int, x: np.ndarray) -> np.ndarray:
        """Return atoms (n, D) of a kind in the axes and units of its covariance, regardless of regions."""
        axes, std = self._axes(kind)
        return (x - self.total[kind].mean) @ (axes / std)

    def nearest(self, kind: int, x: np.ndarray) -> np.ndarray:
        """Return the region of a kind that atoms (n, D) are in (n,) int."""
        white = self.whiten(kind, x) / np.sqrt(self.form.soft)
        parts = [torch.from_numpy(white * stretch - offset) for stretch, offset in self._places(kind)]
        return np.argmin([softened(z).sum(-1).numpy() for z in parts], axis=0)

    def _of_head(self, kind: int) -> List[int]:
        """Return the kinds of the same head."""
        if self.per_head is None:
            return list(self.total)
        return [other for other in self.total if other // self.per_head == kind // self.per_head]

    def _shrunk(self, kind: int) -> np.ndarray:
        """Return the covariance of a kind (D, D), shrunk towards that within all kinds of its head."""
        totals = [self.total[other] for other in self._of_head(kind)]
        pooled = np.sum([total.sum for total in totals], axis=0) / sum(total.count for total in totals)
        weight = self.weight(kind)
        return (1.0 - weight) * self.total[kind].covariance + weight * pooled

    def _axes(self, kind: int) -> Tuple[np.ndarray, np.ndarray]:
        """Return the axes of a kind's covariance as columns (D, D), and the standard deviation along each (D,)."""
        values, axes = np.linalg.eigh(self._shrunk(kind))
        return axes, self._std(values)

    def _std(self, variances: np.ndarray) -> np.ndarray:
        variances = variances.clip(min=0.0)
        # A species with a single atom, or all of them alike, has no variance at all.
        return np.sqrt(variances + max(self.form.ridge * variances.mean(), 1e-12))

    def _places(self, kind: int) -> Iterator[Tuple[np.ndarray, np.ndarray]]:
        """Yield the rows (D,) of ``region_stretch`` and ``region_offsets`` of every region of a kind.

        These are how many times narrower than the kind the region is along the kind's axes, and its middle.

        Regions have the axes of their kind: in a covariance of fewer atoms, the directions of least variance are partly
        chance.
        """
        total, parts, covariance = self.total[kind], self.regions[kind], self._shrunk(kind)
        size = len(total.mean)
        if not parts:
            yield np.ones(size), np.zeros(size)
            return
        axes, std = self._axes(kind)
        within = sum(part.sum for part in parts) / total.count
        for part in parts:
            weight = size / (size + part.count)
            local = (1.0 - weight) * part.covariance + weight * within
            mixed = (1.0 - self.form.shared) * local + self.form.shared * covariance
            stretch = std / self._std((axes * (mixed @ axes)).sum(0))
            yield stretch, (part.mean - total.mean) @ (axes / std) * stretch / np.sqrt(self.form.soft)

    def _fill(self, leverage: Leverage, kinds: Dict[int, int]) -> None:
        """Fill buffers with the moments of kinds, which the leverage knows by the keys of ``kinds``."""
        places = {known_as: list(self._places(kind)) for known_as, kind in kinds.items()}
        leverage.resize(len(kinds), max(map(len, places.values())))
        for row, (known_as, kind) in enumerate(kinds.items()):
            axes, std = self._axes(kind)
            leverage.axes[known_as] = row
            leverage.centres[known_as] = torch.from_numpy(self.total[kind].mean).to(leverage.centres)
            leverage.whitening[:, row] = torch.from_numpy(axes / (std * np.sqrt(self.form.soft))).to(leverage.centres)
            for region, (stretch, offset) in enumerate(places[known_as]):
                leverage.region_stretch[known_as, region] = torch.from_numpy(stretch).to(leverage.centres)
                leverage.region_offsets[known_as, region] = torch.from_numpy(offset).to(leverage.centres)


def norms_of(means: Dict[int, float], size: int) -> Dict[int, float]:
    """Return the factors that make the mean of h over the training atoms of a kind 1, whatever shrinks it.

    A kind whose atoms are all identical, or that has one atom, has a mean h near 0, which cannot be normalised: it
    takes the mean factor of the head's other kinds.

    Parameters
    ----------
    means : dict
        Mean of h before norming, by kind.
    size : int
        Features D.
    """
    least = ALIKE * size
    usual = float(np.mean([mean for mean in means.values() if mean > least] or [1.0]))
    return {kind: 1.0 / (mean if mean > least else usual) for kind, mean in means.items()}


def leverages(leverage: Leverage, features: np.ndarray, kind: int, form: LeverageForm = FORM) -> np.ndarray:
    """Return h (n,) of atoms (n, D) of a kind, computed in the precision of the leverage."""
    scalars = torch.from_numpy(features).to(leverage.centres)
    with torch.no_grad():
        parts = [leverage.distances(x, torch.full((len(x),), kind, device=x.device), form) for x in scalars.split(4096)]
    return torch.cat(parts).double().cpu().numpy()


def number_of_regions(count: int, size: int, kinds: int, form: LeverageForm = FORM) -> int:
    """Return how many regions ``count`` atoms of one of ``kinds`` kinds are divided into by ``size`` features."""
    return max(1, min(count // (form.atoms_per_feature * size), form.max_regions_of_kind, form.max_regions // kinds))


def _regions(x: np.ndarray, covariance: np.ndarray, number: int) -> List[Scatter]:
    """Return the regions of a kind, from its features (n, D); an empty list for a single one."""
    if number < 2:
        return []
    count = len(x)
    # The directions that vary most are those in which phases and sites differ.
    _, axes = np.linalg.eigh(covariance)
    projected = (x - x.mean(0)) @ axes[:, -16:]
    starts = projected[np.argsort(projected[:, -1])[(np.arange(number) * 2 + 1) * count // (2 * number)]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of regions that stay empty
        _, label = kmeans2(projected, starts, iter=30, minit="matrix")
    return [Scatter(part) for part in (x[label == i] for i in range(number)) if len(part) > 1]
