"""Batches of one pass over data: in order, this process's share of them, with a line about the progress."""

import sys
import time
from typing import Any, Callable, Iterable, Iterator, List, Sequence, Sized, Type, TypeVar

import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset

from e2ip_plugins.fitting.training_atoms import distributed

#: Seconds between two lines about a pass.
SECONDS_BETWEEN_LINES = 30.0

#: Takes a line about the progress.
OnProgress = Callable[[str], None]

Batch = TypeVar("Batch")


def in_order(
    datasets: Sequence[Dataset], batch_size: int, loader: Type[DataLoader] = DataLoader, **options: Any
) -> DataLoader:
    """Return a loader that takes every sample once, in order, whatever the seed; no batch is of two data sets.

    Parameters
    ----------
    datasets : sequence of Dataset
        In a distributed training each process takes its share of every one.
    batch_size : int
    loader : subclass of DataLoader
    **options
        Of the loader.
    """
    first, step = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if distributed() else (0, 1)
    batches: List[range] = []
    begin = 0
    for dataset in datasets:
        end = begin + len(dataset)  # type: ignore[arg-type]
        share = range(begin + first, end, step)
        batches += [share[i : i + batch_size] for i in range(0, len(share), batch_size)]
        begin = end
    # One data set may have a faster way to a batch than sample by sample.
    samples = datasets[0] if len(datasets) == 1 else ConcatDataset(datasets)
    # With a generator of its own it draws no numbers from torch's.
    return loader(samples, batch_sampler=batches, generator=torch.Generator(), **options)


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
