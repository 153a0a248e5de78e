"""Features of training atoms, gathered batch by batch; `e2ip_plugins.fitting.moments` has what is made of them.

Of many atoms a sample is kept, whose size is bounded in bytes.
"""

from typing import Dict, Iterator, List, Mapping, NamedTuple, Optional

import numpy as np
from torch import Tensor

from e2ip_plugins.errors import InputError
from e2ip_plugins.fitting.moments import Moments
from e2ip_plugins.fitting.sample import hashes_of_atoms, smallest
from e2ip_plugins.leverage.form import FORM, LeverageForm
from e2ip_plugins.leverage.module import Leverage
from e2ip_plugins.processes import distributed, gather_objects

#: Atoms of a kind that are kept at most. More change moments of a few hundred features little.
MAX_ATOMS = 32768

#: Bytes of all features that are kept, at most: every kind has an equal share of them.
MAX_BYTES = 2**29

#: So many times what is kept may wait until it is thinned.
_SLACK = 1.25

#: Arrays by name: what is made of a batch.
Record = Dict[str, np.ndarray]


class TrainingBatch(NamedTuple):
    """A batch of training atoms, which the model has just been run on.

    Attributes
    ----------
    frames : (N,) int
        Number, in the training set, of the frame of every atom; atoms of a frame follow each other.
    counted : (N,) bool or None
        Atoms that count; None for all.
    """

    frames: Tensor
    counted: Optional[Tensor] = None


class TrainingAtoms(Mapping[int, np.ndarray]):
    """Features (n, D) of training atoms, by kind (head and species).

    They are put together when they are asked for, in an order that does not depend on that of the data. Of every kind
    the atoms with the smallest hashes (`e2ip_plugins.fitting.sample`) are kept, as many as have room: whatever their
    order, and whatever batches, processes and parts there are.
    """

    def __init__(self, kinds: int) -> None:
        self.broken = 0
        self.row_bytes = 0
        self.count = np.zeros(kinds, dtype=np.int64)
        self.log_own_sum = np.zeros(kinds)
        self.highest = np.full(kinds, np.iinfo(np.uint64).max, dtype=np.uint64)
        self.kept_hashes: List[List[np.ndarray]] = [[] for _ in range(kinds)]
        self.kept: List[List[np.ndarray]] = [[] for _ in range(kinds)]

    @property
    def room(self) -> int:
        """Number of atoms of a kind that are kept."""
        share = max(1, len(self)) * max(1, self.row_bytes)
        return max(1, min(MAX_ATOMS, MAX_BYTES // share))

    def record(self, scalars: Tensor, kinds: Tensor, log_own: Tensor, batch: TrainingBatch) -> Record:
        """Return what `take` needs of the atoms of a batch; ``log_own`` is ln v (N,), `Family.log_variance`."""
        frames = batch.frames.cpu().numpy()
        counted = np.ones(len(frames), dtype=bool) if batch.counted is None else batch.counted.cpu().numpy()
        hashes = hashes_of_atoms(frames)[counted]
        features, of_kind = scalars.cpu().numpy()[counted], kinds.cpu().numpy()[counted]
        values = log_own.cpu().double().numpy()[counted]
        counts, sums = np.zeros_like(self.count), np.zeros_like(self.log_own_sum)
        for kind in np.unique(of_kind):
            mask = of_kind == kind
            counts[kind], sums[kind] = int(mask.sum()), values[mask].sum()
        wanted = hashes <= self.highest[of_kind]
        return {
            "broken": np.array(int((~np.isfinite(features)).any(-1).sum())),
            "count": counts,
            "log_variance": sums,  # the name in files of fits
            "keys": hashes[wanted],  # likewise
            "kinds": of_kind[wanted],
            "features": features[wanted],
        }

    def take(self, record: Record) -> None:
        """Take in the atoms of a batch."""
        before = self.room
        self.broken += int(record["broken"])
        self.count += record["count"]
        self.log_own_sum += record["log_variance"]
        features, kinds = record["features"], record["kinds"]
        self.row_bytes = features.itemsize * features.shape[1]
        present = np.unique(kinds)
        for kind in present:
            mask = kinds == kind
            self.kept_hashes[kind].append(record["keys"][mask])
            self.kept[kind].append(features[mask])
        # A kind that is new takes room from all others.
        for kind in present if self.room == before else np.flatnonzero(self.count):
            if sum(map(len, self.kept_hashes[kind])) > _SLACK * self.room:
                self._thin(int(kind))

    def add(self, scalars: Tensor, kinds: Tensor, log_own: Tensor, batch: TrainingBatch) -> None:
        """Take in the atoms of a batch: features (N, D), kinds (N,) and ln v (N,)."""
        self.take(self.record(scalars, kinds, log_own, batch))

    def _thin(self, kind: int) -> None:
        hashes = np.concatenate(self.kept_hashes[kind])
        if len(hashes) > self.room:
            chosen = smallest(hashes, self.room)
            self.kept[kind], self.kept_hashes[kind] = [np.concatenate(self.kept[kind])[chosen]], [hashes[chosen]]
            self.highest[kind] = hashes[chosen].max()

    def gather(self) -> None:
        """Take in the atoms of all processes of a distributed training, and thin them for the last time.

        Raises
        ------
        InputError
            Features that are not finite, in all processes.
        """
        if distributed():
            self._gather_processes()
        for kind in self:
            self._thin(kind)
        if self.broken:
            raise InputError(
                f"the model's features of {self.broken} training atoms are not finite: the training has diverged, or "
                "two atoms of a frame are at the same place"
            )

    def _gather_processes(self) -> None:
        mine = self.broken, self.row_bytes, self.count, self.log_own_sum
        brokens, sizes, counts, log_own_sums = zip(*gather_objects(mine), strict=True)
        self.broken, self.row_bytes = sum(brokens), max(map(int, sizes))
        self.count, self.log_own_sum = sum(counts), sum(log_own_sums)
        for kind in self:
            # Hashes first: no process sends features that are not going to be kept.
            hashes = np.concatenate([np.empty(0, np.uint64), *self.kept_hashes[kind]])
            of_all = np.concatenate(gather_objects(hashes))
            highest = of_all[smallest(of_all, self.room)].max()
            kept = np.concatenate(self.kept[kind])[hashes <= highest] if len(hashes) else None
            parts = gather_objects((hashes[hashes <= highest], kept))
            self.kept_hashes[kind] = [part for part, _ in parts]
            self.kept[kind] = [part for _, part in parts if part is not None]

    def __getitem__(self, kind: int) -> np.ndarray:
        features = np.concatenate(self.kept[kind]).astype(np.float64)
        return features[np.lexsort(features.T[:2])]

    def __iter__(self) -> Iterator[int]:
        return iter(np.flatnonzero(self.count).tolist())

    def __len__(self) -> int:
        return int(np.count_nonzero(self.count))

    def store(self, leverage: Leverage, form: LeverageForm = FORM) -> Dict[int, float]:
        """Put the moments into the leverage's buffers; return `Moments.weight` of every kind."""
        moments = Moments(self, form, leverage.species_per_head())
        # Of kinds without atoms what is typical of all others: a variance has a unit, and 1 of it is no guess.
        leverage.log_variance.fill_(float(self.log_own_sum.sum() / self.count.sum()))
        for kind in self:
            leverage.log_variance[kind] = self.log_own_sum[kind] / self.count[kind]
        moments.store(leverage, self)
        return {kind: moments.weight(kind) for kind in self}
