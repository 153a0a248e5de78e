"""Batches of a pass over data: in order, this process's share of them, with lines about the progress."""

import sys
import time
from dataclasses import dataclass
from typing import Any, Callable, Generic, Iterator, List, NamedTuple, Sequence, Tuple, TypeVar

import numpy as np
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from e2ip_plugins.errors import ResumableError
from e2ip_plugins.fitting.sample import hashes_of, smallest, training_subset
from e2ip_plugins.processes import distributed

#: Seconds between two lines about a pass.
SECONDS_BETWEEN_LINES = 30.0

#: Validation configurations of a data set, at most, that constants are fitted to. The standard error of a factor on the
#: variance is then two hundredths or less (docs/howto/calibrate.md).
MAX_CONFIGURATIONS = 2048

#: Takes a line about the progress.
OnProgress = Callable[[str], None]

Item = TypeVar("Item")


class Batching(NamedTuple):
    """How samples become batches."""

    batch_size: int
    collate_fn: Callable[[List[Any]], Any]

    @classmethod
    def of(cls, loader: DataLoader) -> "Batching":
        """Return how a loader does it, one by one where it has no batch size."""
        return cls(loader.batch_size or 1, loader.collate_fn)


@dataclass(frozen=True)
class _Numbers:
    """Numbers of the samples of every batch, without the first ``done`` samples."""

    shares: Sequence[range]
    batch_size: int
    done: int = 0

    def __iter__(self) -> Iterator[range]:
        left = self.done
        for share in self.shares:
            first, left = min(left, len(share)), max(0, left - len(share))
            for begin in range(first, len(share), self.batch_size):
                yield share[begin : begin + self.batch_size]


class InOrder:
    """Batches that take every sample of some data sets once, in order, whatever the seed; none is of two data sets.

    In a distributed training each process takes its share of every data set.

    Parameters
    ----------
    datasets : sequence of Dataset
    batching : Batching
    part : (int, int)
        i of n: take the i-th of n equal pieces of every data set, from 1.
    """

    def __init__(self, datasets: Sequence[Dataset], batching: Batching, part: Tuple[int, int] = (1, 1)) -> None:
        first, step = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if distributed() else (0, 1)
        self.batching, (i, n) = batching, part
        # One data set may have a faster way to a batch than sample by sample.
        self.samples = datasets[0] if len(datasets) == 1 else ConcatDataset(datasets)
        self.shares: List[range] = []
        begin = 0
        for size in map(len, datasets):  # type: ignore[arg-type]
            self.shares.append(range(begin + size * (i - 1) // n + first, begin + size * i // n, step))
            begin += size

    @property
    def size(self) -> int:
        """Number of samples."""
        return sum(map(len, self.shares))

    def __len__(self) -> int:
        return sum(-(-len(share) // self.batching.batch_size) for share in self.shares)

    def __iter__(self) -> Iterator[Any]:
        return (batch for _, batch in self.numbered())

    def numbered(self, done: int = 0) -> Iterator[Tuple[range, Any]]:
        """Yield the numbers of the samples of a batch, and the batch; without the first ``done`` samples."""
        numbers = _Numbers(self.shares, self.batching.batch_size, done)
        # With a generator of its own the loader draws no numbers from torch's.
        loader = DataLoader(
            self.samples,
            batch_sampler=numbers,  # type: ignore[arg-type]
            collate_fn=self.batching.collate_fn,
            generator=torch.Generator(),
        )
        return zip(numbers, loader, strict=True)


def in_order(datasets: Sequence[Dataset], batching: Batching) -> InOrder:
    """Return batches of all samples of some data sets."""
    return InOrder(datasets, batching)


def fit_loaders(
    training: Dataset,
    validation: Sequence[Dataset],
    of_training: Batching,
    of_validation: Batching,
    part: Tuple[int, int] = (1, 1),
) -> Tuple[InOrder, InOrder, InOrder]:
    """Return the batches of a fit: training and validation set, and those training samples whose errors it needs.

    Of the training set it is part i of n. Of long validation sets a sample is taken.
    """
    sets = [_sample(dataset) for dataset in validation]
    count = len(training)  # type: ignore[arg-type]
    subset = Subset(training, training_subset(count, sum(map(len, sets))))  # type: ignore[arg-type]
    return InOrder([training], of_training, part), in_order(sets, of_validation), in_order([subset], of_training)


def _sample(dataset: Dataset) -> Dataset:
    """Return a data set of at most `MAX_CONFIGURATIONS` samples, of each of those that it is made of."""
    size = len(dataset)  # type: ignore[arg-type]
    if size <= MAX_CONFIGURATIONS:
        return dataset
    if isinstance(dataset, ConcatDataset):
        return ConcatDataset([_sample(part) for part in dataset.datasets])
    return Subset(dataset, smallest(hashes_of(np.arange(size)), MAX_CONFIGURATIONS).tolist())


class Pass(Generic[Item]):
    """A pass of a model over data: what it makes of every batch, when that is taken.

    Parameters
    ----------
    batches : InOrder
    run : callable
        Takes the numbers of the samples of a batch, int64, and the batch.
    name : str
        What the samples are, for lines and messages.
    on_progress : callable
        Takes lines about the progress.
    """

    def __init__(
        self, batches: InOrder, run: Callable[[torch.Tensor, Any], Item], name: str, on_progress: OnProgress
    ) -> None:
        self.batches, self.run, self.name, self.on_progress = batches, run, name, on_progress

    def __iter__(self) -> Iterator[Item]:
        return (item for _, item in self.after(0))

    def after(self, done: int) -> Iterator[Tuple[int, Item]]:
        """Yield how many samples are done then, and what is made of a batch; without the first ``done`` samples.

        Raises
        ------
        ResumableError
            A batch that is too large for the memory, except in a distributed training, where other processes wait.
        """
        if done:
            self.on_progress(f"leverage: {self.name}, goes on after {done} of {self.batches.size} frames")
        progress = Progress(self.name, self.batches.size, done, self.on_progress)
        for numbers, batch in self.batches.numbered(done):
            progress.tell(done)
            try:
                item = self.run(torch.as_tensor(numbers, dtype=torch.long), batch)
            except (MemoryError, RuntimeError) as error:
                if distributed() or not _out_of_memory(error):
                    raise
                raise ResumableError(_too_large(self.name, len(numbers))) from error
            done += len(numbers)
            yield done, item


class Progress:
    """Lines about a pass, now and then, with the time that is left.

    Parameters
    ----------
    name : str
        What the samples are.
    total, done : int
        Number of samples, and of those that are done at the beginning.
    on_progress : callable
        Takes the lines.
    """

    def __init__(self, name: str, total: int, done: int, on_progress: OnProgress) -> None:
        self.name, self.total, self.on_progress = name, total, on_progress
        self.began, self.first = time.monotonic(), done
        self.last = self.began

    def tell(self, done: int) -> None:
        """Say that so many samples are done, if the last line is old enough."""
        now = time.monotonic()
        if now - self.last > SECONDS_BETWEEN_LINES:
            self.last = now
            left = ""
            if done > self.first:
                seconds = (now - self.began) / (done - self.first) * (self.total - done)
                left = f", {in_words(seconds)} left"
            self.on_progress(f"leverage: {self.name}, {done} of {self.total} frames{left}")


def in_words(seconds: float) -> str:
    """Return a time in words.

    >>> in_words(20.0), in_words(200.0), in_words(20000.0)
    ('20 s', '3 min', '5.6 h')
    """
    if seconds < 90.0:
        return f"{seconds:.0f} s"
    return f"{seconds / 60.0:.0f} min" if seconds < 5400.0 else f"{seconds / 3600.0:.1f} h"


def _out_of_memory(error: BaseException) -> bool:
    # Of the CPU, torch has no class of its own for it.
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def _too_large(name: str, frames: int) -> str:
    if frames < 2:
        return f"{name}: a single frame is too large for the device's memory: leave it out, or take another --device"
    return (
        f"{name}: a batch of {frames} frames is too large for the device's memory: take e2ip fit with --batch-size "
        f"{frames // 2}; a command that is run again goes on where it stopped"
    )


def to_standard_error(line: str) -> None:
    """Print a line about the progress of a command."""
    print(line, file=sys.stderr)
