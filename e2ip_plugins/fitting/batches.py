"""Batches of one pass over data: in order, this process's share of them, with a line about the progress."""

import sys
import time
from typing import Any, Callable, Iterable, Iterator, List, NamedTuple, Sequence, Sized, Tuple, TypeVar

import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from e2ip_plugins.fitting.fit import training_subset
from e2ip_plugins.fitting.training_atoms import distributed

#: Seconds between two lines about a pass.
SECONDS_BETWEEN_LINES = 30.0

#: Takes a line about the progress.
OnProgress = Callable[[str], None]

Batch = TypeVar("Batch")


class Batching(NamedTuple):
    """How samples become batches."""

    batch_size: int
    collate_fn: Callable[[List[Any]], Any]

    @classmethod
    def of(cls, loader: DataLoader) -> "Batching":
        """Return how a loader does it, one by one where it has no batch size."""
        return cls(loader.batch_size or 1, loader.collate_fn)


def in_order(datasets: Sequence[Dataset], batching: Batching) -> DataLoader:
    """Return a loader that takes every sample once, in order, whatever the seed; no batch is of two data sets.

    In a distributed training each process takes its share of every data set.
    """
    first, step = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if distributed() else (0, 1)
    batches: List[Sequence[int]] = []
    begin = 0
    for dataset in datasets:
        end = begin + len(dataset)  # type: ignore[arg-type]
        share = range(begin + first, end, step)
        batches += [share[i : i + batching.batch_size] for i in range(0, len(share), batching.batch_size)]
        begin = end
    # One data set may have a faster way to a batch than sample by sample.
    samples = datasets[0] if len(datasets) == 1 else ConcatDataset(datasets)
    # With a generator of its own the loader draws no numbers from torch's.
    return DataLoader(
        samples,
        batch_sampler=batches,  # type: ignore[arg-type]
        collate_fn=batching.collate_fn,
        generator=torch.Generator(),
    )


def fit_loaders(
    training: Dataset, validation: Sequence[Dataset], of_training: Batching, of_validation: Batching
) -> Tuple[DataLoader, DataLoader, DataLoader]:
    """Return the loaders of a fit: training and validation set, and those training samples whose errors it needs."""
    count = len(training)  # type: ignore[arg-type]
    subset = Subset(training, training_subset(count, sum(map(len, validation))))  # type: ignore[arg-type]
    return in_order([training], of_training), in_order(validation, of_validation), in_order([subset], of_training)


def with_progress(batches: Iterable[Batch], name: str, on_progress: OnProgress) -> Iterator[Batch]:
    """Yield the batches of a pass; report now and then how many are done. ``name`` says what they are of."""
    last, total = time.monotonic(), f" of {len(batches)}" if isinstance(batches, Sized) else ""
    for number, batch in enumerate(batches):
        if time.monotonic() - last > SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            on_progress(f"leverage: {name}, {number}{total} batches")
        yield batch


def to_standard_error(line: str) -> None:
    """Print a line about the progress of a command."""
    print(line, file=sys.stderr)
