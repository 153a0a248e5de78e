"""A fit without MACE or NequIP, whose records are kept; as a program it kills itself on the way.

python toy_fit.py OUT BATCHES
"""

import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from e2ip_plugins import unfinished
from e2ip_plugins.fitting.batches import Batching, Pass, fit_loaders
from e2ip_plugins.fitting.energies import EnergyResiduals
from e2ip_plugins.fitting.fit import fit_leverage
from e2ip_plugins.fitting.force_errors import ForceErrors
from e2ip_plugins.fitting.records import TRAINING, Work, records_of
from e2ip_plugins.fitting.training_atoms import TrainingBatch
from e2ip_plugins.leverage.module import Neighbours
from e2ip_plugins.readout.layout import Layout
from e2ip_plugins.readout.readout import Readout
from e2ip_plugins.readout.settings import Settings

SIZE, ATOMS = 4, 5


def data_set(frames, seed):
    """Frames of five atoms of two species: features and force errors."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(frames, ATOMS, SIZE)) * rng.uniform(0.5, 3.0, size=(frames, 1, 1))
    errors = rng.normal(scale=0.1, size=(frames, ATOMS, 3))
    return TensorDataset(torch.from_numpy(np.concatenate([x, errors], axis=2)))


def fit(
    output,
    settings=None,
    part=None,
    merge=None,
    batch_size=7,
    records=True,
    stop_after=-1,
    stop=None,
    on_progress=print,
):
    """Return a readout that is fitted to these, and the report; ``stop`` is called in place of a batch."""
    layout = Layout([(0, SIZE)], [], [(SIZE, 1)], num_species=2)
    readout = Readout(Settings.of("e2ip", {"evidence": "leverage"}, 0.05), layout)
    readout = readout.double().requires_grad_(False)
    batches = 0

    def run(numbers, batch):
        nonlocal batches
        if batches == stop_after:
            stop()
        batches += 1
        (rows,) = zip(*batch, strict=True)
        rows = torch.stack(rows).reshape(-1, SIZE + 3)
        x = torch.nn.functional.pad(rows[:, :SIZE], (0, 5), value=1.0)
        none = torch.zeros(0)
        of_frame = torch.arange(len(batch)).repeat_interleave(ATOMS)
        pairs = Neighbours(none, none, none.long(), none.long())
        species = torch.tensor([0, 0, 0, 1, 1]).repeat(len(batch))
        readout(x[:, :SIZE], x, species, pairs, frames=of_frame, num_frames=len(batch))
        return numbers[of_frame], of_frame, rows[:, SIZE:]

    def of_training(numbers, batch):
        return TrainingBatch(run(numbers, batch)[0])

    def of_forces(numbers, batch):
        frames, _, errors = run(numbers, batch)
        return ForceErrors(errors, frames)

    def of_energies(numbers, batch):
        _, of_frame, errors = run(numbers, batch)
        return EnergyResiduals(errors.sum(1).reshape(-1, ATOMS).sum(1), of_frame)

    work = Work(Path(output), settings or {"--train": "a"}, part, merge) if records else None
    with records_of(work) as kept:
        batching = Batching(batch_size, list)
        loaders = fit_loaders(data_set(60, 0), [data_set(20, 1)], batching, batching, part or (1, 1))
        passes = [
            Pass(loader, of, name, on_progress)
            for loader, of, name in zip(
                (*loaders, loaders[1]),
                (of_training, of_forces, of_forces, of_energies),
                (TRAINING, "validation set", "errors", "energies"),
                strict=True,
            )
        ]
        report = fit_leverage(
            readout, passes[0], passes[1], training_errors=passes[2], energies=passes[3], records=kept
        )
    return readout, report


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    unfinished.INTERVAL = -1.0
    fit(sys.argv[1], stop_after=int(sys.argv[2]), stop=lambda: os.kill(os.getpid(), signal.SIGKILL))
