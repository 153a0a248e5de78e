"""Features of training atoms, and the moments that the leverage is made of."""

import warnings
from typing import Any, Dict, Iterator, List, Tuple

import numpy as np
import torch
from scipy.cluster.vq import kmeans2
from torch import Tensor

from e2ip_plugins.errors import InputError
from e2ip_plugins.readout.leverage import Leverage

#: ρ of (C + ρ)⁻¹ in units of the mean variance of a feature.
RIDGE = 1e-5

#: A species has a region for every so many atoms per feature, at most so many; `MAX_REGIONS` for all species together.
ATOMS_PER_FEATURE, MAX_REGIONS_OF_SPECIES, MAX_REGIONS = 8, 16, 64

#: How much of its species' covariance enters that of a region: between two regions is not outside.
SHARED = 0.3

#: Atoms whose distance, by feature, is smaller on average are alike: hosts' features have seven digits.
ALIKE = 1e-6

#: Atoms of a kind that are kept, of many evenly spaced ones. More change moments of a few hundred features little.
MAX_ATOMS = 32768


class TrainingAtoms:
    """Features of training atoms, per kind (head and species)."""

    def __init__(self, kinds: int) -> None:
        self.broken = 0
        self.count = np.zeros(kinds, dtype=np.int64)
        self.log_variance = np.zeros(kinds)
        self.stride = np.ones(kinds, dtype=np.int64)
        self.kept: List[List[np.ndarray]] = [[] for _ in range(kinds)]

    def add(self, scalars: Tensor, kinds: Tensor, log_variance: Tensor) -> None:
        """Atoms of a batch."""
        features, which = scalars.cpu().numpy(), kinds.cpu().numpy()
        variance = log_variance.cpu().double().numpy()
        self.broken += int((~np.isfinite(features)).any(-1).sum())
        for kind in np.unique(which):
            own = which == kind
            before, number = self.count[kind], int(own.sum())
            self.count[kind] += number
            self.log_variance[kind] += variance[own].sum()
            # Every stride-th atom; once there are too many, every second one of those.
            self.kept[kind].append(features[own][(before + np.arange(number)) % self.stride[kind] == 0])
            self._thin(kind)

    def _thin(self, kind: int) -> None:
        while sum(map(len, self.kept[kind])) > MAX_ATOMS:
            self.kept[kind] = [np.concatenate(self.kept[kind])[::2]]
            self.stride[kind] *= 2

    def gather(self) -> None:
        """Atoms of all processes of a distributed training; `InputError`, in all of them, for features not finite."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            gathered: List[Any] = [None] * torch.distributed.get_world_size()
            mine = self.broken, self.count, self.log_variance, self.stride, self.kept
            torch.distributed.all_gather_object(gathered, mine)
            brokens, counts, variances, strides, kepts = zip(*gathered, strict=True)
            self.broken, self.count, self.log_variance = sum(brokens), sum(counts), sum(variances)
            # An atom counts as much whichever process has it.
            self.stride = np.max(strides, axis=0)
            for kind, stride in enumerate(self.stride.tolist()):
                steps = [stride // int(own[kind]) for own in strides]
                parts = zip((part[kind] for part in kepts), steps, strict=True)
                self.kept[kind] = [np.concatenate(part)[::step] for part, step in parts if part]
                self._thin(kind)
        if self.broken:
            raise InputError(
                f"the model's features of {self.broken} training atoms are not finite: the training has diverged, or "
                "two atoms of a frame are at the same place"
            )

    def features(self, kind: int) -> np.ndarray:
        """Kept atoms of a kind (n, D), in an order that does not depend on that of the data."""
        features = np.concatenate(self.kept[kind]).astype(np.float64)
        return features[np.lexsort(features.T[:2])]

    def store(self, leverage: Leverage, ridge: float = RIDGE) -> Dict[int, float]:
        """Moments into the leverage's buffers; gives the weight of the pool in those of every kind.

        A species with few atoms has too flat a covariance: it is shrunk towards the one within all species, as if that
        had been seen on as many atoms as there are features.
        """
        seen = np.flatnonzero(self.count).tolist()
        features = {kind: self.features(kind) for kind in seen}
        own = {kind: np.cov(x.T, bias=True).reshape(x.shape[1], -1) for kind, x in features.items()}
        pooled = sum(len(features[kind]) * own[kind] for kind in seen) / sum(map(len, features.values()))
        most = max(1, min(MAX_REGIONS_OF_SPECIES, MAX_REGIONS // len(seen)))
        regions: List[Tuple[int, np.ndarray, np.ndarray]] = []
        weights = {}
        for kind in seen:
            x = features[kind]
            weights[kind] = x.shape[1] / (x.shape[1] + len(x))
            shrunk = (1.0 - weights[kind]) * own[kind] + weights[kind] * pooled
            centre = x.mean(0)
            leverage.centres[kind] = torch.from_numpy(centre).to(leverage.centres)
            leverage.log_variance[kind] = self.log_variance[kind] / self.count[kind]
            regions += [(kind, *region) for region in _regions(x - centre, shrunk, most, ridge)]
        leverage.resize(len(regions))
        for row, (kind, offset, whitening) in enumerate(regions):
            leverage.region_kinds[row] = kind
            leverage.region_offsets[row] = torch.from_numpy(offset @ whitening).to(leverage.centres)
            leverage.region_whitening[:, row] = torch.from_numpy(whitening).to(leverage.centres)
        # So that the mean over the training atoms of a kind is 1, whatever shrinks it. A single atom is where its own
        # moments are, as are atoms that are all alike: how far others are is then a matter of the pool.
        means = {kind: float(_distance(leverage, features[kind], kind).mean()) for kind in seen}
        least = ALIKE * leverage.centres.shape[1]
        usual = np.mean([mean for mean in means.values() if mean > least] or [1.0])
        for kind, mean in means.items():
            leverage.region_norms[leverage.region_kinds == kind] = 1.0 / (mean if mean > least else float(usual))
        return weights


def _regions(x: np.ndarray, covariance: np.ndarray, most: int, ridge: float) -> Iterator[Tuple[np.ndarray, np.ndarray]]:
    """Centre (D,) and whitening matrix (D, D) of every region of a kind, from its centred features (n, D)."""
    count, size = x.shape
    number = min(count // (ATOMS_PER_FEATURE * size), most)
    if number < 2:
        yield np.zeros(size), _whitening(covariance, ridge)
        return
    # The directions that vary most are those in which phases and sites differ.
    _, axes = np.linalg.eigh(covariance)
    projected = x @ axes[:, -16:]
    starts = projected[np.argsort(projected[:, -1])[(np.arange(number) * 2 + 1) * count // (2 * number)]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of regions that stay empty
        _, label = kmeans2(projected, starts, iter=30, minit="matrix")
    parts = [part for part in (x[label == i] for i in range(number)) if len(part) > 1]
    within = sum(len(part) * np.cov(part.T, bias=True) for part in parts) / count
    for part in parts:
        weight = size / (size + len(part))
        local = (1.0 - weight) * np.cov(part.T, bias=True) + weight * within
        yield part.mean(0), _whitening((1.0 - SHARED) * local + SHARED * covariance, ridge)


def _whitening(covariance: np.ndarray, ridge: float) -> np.ndarray:
    values, vectors = np.linalg.eigh(covariance)
    values = values.clip(min=0.0)
    # A species with a single atom, or all of them alike, has no variance at all.
    return vectors / np.sqrt(values + max(ridge * values.mean(), 1e-12))


def _distance(leverage: Leverage, features: np.ndarray, kind: int) -> np.ndarray:
    """The leverage's own distance of training atoms, in its precision."""
    scalars = torch.from_numpy(features).to(leverage.centres)
    with torch.no_grad():
        parts = [leverage._distance(x, torch.full((len(x),), kind, device=x.device)) for x in scalars.split(4096)]
    return torch.cat(parts).double().cpu().numpy()
