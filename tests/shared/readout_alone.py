"""A model that is nothing but a readout: its features are the data, its errors made up."""

import copy
import itertools
from typing import NamedTuple

import numpy as np
import torch

from e2ip_plugins.families.e2ip import E2IP
from e2ip_plugins.families.laws import law_of
from e2ip_plugins.fitting.fit import fit_leverage
from e2ip_plugins.fitting.force_errors import ForceErrors
from e2ip_plugins.fitting.training_atoms import TrainingBatch
from e2ip_plugins.leverage.module import Neighbours
from e2ip_plugins.readout.layout import Layout
from e2ip_plugins.readout.readout import Readout
from e2ip_plugins.readout.settings import Settings

SIZE = 4
#: 0e, 1o and 2e channels of an atom's features
LAYOUT = Layout([(0, SIZE)], [(SIZE, 2)], [(SIZE + 6, 1)], num_species=2)
COLUMNS = SIZE + 11


class Frame(NamedTuple):
    """What the model makes of a configuration: features (n, 15), species (n,), force errors (n, 3), head."""

    x: torch.Tensor
    species: torch.Tensor
    residual: torch.Tensor
    head: int = 0


def make_readout(family="e2ip", num_heads=1, seed=1, constant=False, layout=LAYOUT):
    options = {"evidence": "leverage"} if family == "e2ip" else {}
    built = Readout(Settings.of(family, options, 0.05), layout, num_heads, seed)
    for trunk in built.trunks:
        if constant:
            trunk.make_constant()
        else:  # variances differ from atom to atom
            with torch.no_grad():
                trunk.out.weight.normal_(generator=torch.Generator().manual_seed(seed)).mul_(0.1)
    return built.requires_grad_(False)


def make_frames(count, atoms=5, seed=0, width=1.0, head=0, species=(0, 1)):
    """Gaussian features around another centre for each species; ``width`` may be one per frame."""
    rng = np.random.default_rng(seed)
    frames = []
    for factor in np.broadcast_to(width, count):
        kinds = np.resize(species, atoms)
        x = rng.normal(size=(atoms, COLUMNS)) * np.where(np.arange(COLUMNS) < SIZE, factor, 1.0)
        x[:, :SIZE] = x[:, :SIZE] * np.linspace(0.5, 2.0, SIZE) + 3.0 * kinds[:, None]
        frames.append(Frame(*map(torch.from_numpy, (x, kinds, rng.normal(scale=0.1, size=(atoms, 3)))), head))
    return frames


def run(readout, frames):
    """The model on a batch: atoms of a frame are all neighbours."""
    x, species = (torch.cat([getattr(frame, name) for frame in frames]) for name in ("x", "species"))
    number = torch.cat([torch.full((len(frame.x),), i) for i, frame in enumerate(frames)])
    heads = torch.cat([torch.full((len(frame.x),), frame.head) for frame in frames])
    pairs, start = [], 0
    for frame in frames:
        pairs += itertools.permutations(range(start, start + len(frame.x)), 2)
        start += len(frame.x)
    sender, receiver = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).t()
    ones = torch.ones(len(pairs))
    neighbours = Neighbours(ones, 0.5 * ones, sender, receiver)
    return readout(x, x, species, neighbours, None, heads), number


def batches(frames, size=7):
    return [frames[i : i + size] for i in range(0, len(frames), size)]


def training_of(readout, frames, size=7, counted=None, first=0):
    """A pass over training frames, the first of which has the number ``first`` in the training set."""
    for batch in batches(frames, size):
        _, number = run(readout, batch)
        mask = None if counted is None else torch.cat([torch.full((len(f.x),), counted(f)) for f in batch])
        yield TrainingBatch(first + number, mask)
        first += len(batch)


def validation_of(readout, frames, size=7, first=0):
    for batch in batches(frames, size):
        _, number = run(readout, batch)
        yield ForceErrors(torch.cat([frame.residual for frame in batch]), first + number)
        first += len(batch)


def fit_frames(readout, training, validation, size=7, **settings):
    """Fit, any number of frames in a batch."""
    return fit_leverage(
        readout, training_of(readout, training, size), validation_of(readout, validation, size), **settings
    )


def law_of_readout(readout, frames):
    """Law of the atoms of some frames, and the number of the frame of every atom."""
    outputs, number = run(readout, frames)
    return law_of(E2IP, {key.name: outputs[key.name].numpy() for key in E2IP.parameter_keys}), number


def with_constants(readout, growth, log_scale):
    """A copy of a fitted readout with other constants."""
    other = copy.deepcopy(readout)
    other.leverage.growth.fill_(growth)
    other.leverage.log_factor.fill_(log_scale)
    return other


def drawn(readout, frames, growth, log_scale, seed=0):
    """Frames whose errors follow the law of a fitted readout with other constants."""
    law, number = law_of_readout(with_constants(readout, growth, log_scale), frames)
    errors = torch.from_numpy(law.sample(np.random.default_rng(seed), 1)[0])
    return [frame._replace(residual=errors[number == i]) for i, frame in enumerate(frames)]


#: Widths of validation frames. Narrower and wider ones than the training set's say how errors grow: far out the
#: standard deviation goes like h whatever the growth is. So many that they outweigh the prior.
WIDTHS = np.geomspace(0.1, 3.0, 900)


def leverages(readout, frames):
    outputs, _ = run(readout, frames)
    return outputs["e2ip_leverage"]


def buffers_of(readout):
    return {name: value for name, value in readout.leverage.named_buffers()}


def check_same(result, expected, rtol=1e-6):
    """Moments to rounding; what the search for constants finds to its tolerance."""
    for name, value in buffers_of(expected).items():
        loose = name in ("growth", "log_factor")
        torch.testing.assert_close(
            buffers_of(result)[name], value, rtol=1e-3 if loose else rtol, atol=1e-3 if loose else 1e-9, msg=name
        )
