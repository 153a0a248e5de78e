"""Features of training atoms, gathered batch by batch; `e2ip_plugins.fitting.moments` has what is made of them."""

from typing import Any, Dict, List

import numpy as np
import torch
from torch import Tensor

from e2ip_plugins.errors import InputError
from e2ip_plugins.fitting.moments import Moments
from e2ip_plugins.leverage.form import FORM, LeverageForm
from e2ip_plugins.leverage.module import Leverage

#: Atoms of a kind that are kept, of many evenly spaced ones. More change moments of a few hundred features little.
MAX_ATOMS = 32768


def distributed() -> bool:
    """Return whether this is one of the processes of a distributed training."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def gather_objects(mine: Any) -> List[Any]:
    """Return the objects that all processes of a distributed training pass, in the order of their ranks."""
    gathered = [mine]
    if distributed():
        gathered *= torch.distributed.get_world_size()
        torch.distributed.all_gather_object(gathered, mine)
    return gathered


class TrainingAtoms:
    """Features of training atoms, per kind (head and species)."""

    def __init__(self, kinds: int) -> None:
        self.broken = 0
        self.count = np.zeros(kinds, dtype=np.int64)
        self.log_variance = np.zeros(kinds)
        self.stride = np.ones(kinds, dtype=np.int64)
        self.kept: List[List[np.ndarray]] = [[] for _ in range(kinds)]

    def add(self, scalars: Tensor, kinds: Tensor, log_variance: Tensor) -> None:
        """Take in the atoms of a batch."""
        features, kinds_of_atoms = scalars.cpu().numpy(), kinds.cpu().numpy()
        variance = log_variance.cpu().double().numpy()
        self.broken += int((~np.isfinite(features)).any(-1).sum())
        for kind in np.unique(kinds_of_atoms):
            mask = kinds_of_atoms == kind
            before, number = self.count[kind], int(mask.sum())
            self.count[kind] += number
            self.log_variance[kind] += variance[mask].sum()
            # Every stride-th atom; once there are too many, every second one of those.
            self.kept[kind].append(features[mask][(before + np.arange(number)) % self.stride[kind] == 0])
            self._thin(kind)

    def _thin(self, kind: int) -> None:
        while sum(map(len, self.kept[kind])) > MAX_ATOMS:
            self.kept[kind] = [np.concatenate(self.kept[kind])[::2]]
            self.stride[kind] *= 2

    def gather(self) -> None:
        """Take in the atoms of all processes of a distributed training.

        Raises
        ------
        InputError
            Features that are not finite, in all processes.
        """
        if distributed():
            mine = self.broken, self.count, self.log_variance, self.stride, self.kept
            brokens, counts, variances, strides, kepts = zip(*gather_objects(mine), strict=True)
            self.broken, self.count, self.log_variance = sum(brokens), sum(counts), sum(variances)
            # An atom counts as much whichever process has it.
            self.stride = np.max(strides, axis=0)
            for kind, stride in enumerate(self.stride.tolist()):
                steps = [stride // int(of_process[kind]) for of_process in strides]
                parts = zip((part[kind] for part in kepts), steps, strict=True)
                self.kept[kind] = [np.concatenate(part)[::step] for part, step in parts if part]
                self._thin(kind)
        if self.broken:
            raise InputError(
                f"the model's features of {self.broken} training atoms are not finite: the training has diverged, or "
                "two atoms of a frame are at the same place"
            )

    def features(self, kind: int) -> np.ndarray:
        """Return the kept atoms of a kind (n, D), in an order that does not depend on that of the data."""
        features = np.concatenate(self.kept[kind]).astype(np.float64)
        return features[np.lexsort(features.T[:2])]

    def store(self, leverage: Leverage, form: LeverageForm = FORM) -> Dict[int, float]:
        """Put the moments into the leverage's buffers; return `Moments.weight` of every kind."""
        kinds = np.flatnonzero(self.count).tolist()
        features = {kind: self.features(kind) for kind in kinds}
        moments = Moments(features, form, leverage.species_per_head())
        # Of kinds without atoms what is typical of all others: a variance has a unit, and 1 of it is no guess.
        leverage.log_variance.fill_(float(self.log_variance.sum() / self.count.sum()))
        for kind in kinds:
            leverage.log_variance[kind] = self.log_variance[kind] / self.count[kind]
        moments.store(leverage, features)
        return {kind: moments.weight(kind) for kind in kinds}
