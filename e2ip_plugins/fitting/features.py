"""Features of frames' atoms in a model of either host: what its leverage is made of.

The hosts' adapters open the model (entry points ``e2ip_plugins.passes``) and run it; what its readout sees on the way
is collected here.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Optional, Sequence, Union

import numpy as np
from torch import Tensor

from e2ip_plugins.errors import InputError
from e2ip_plugins.fitting.fit import seen_by
from e2ip_plugins.keys import LEVERAGE
from e2ip_plugins.predictions.labelled import Frame
from e2ip_plugins.readout.readout import Readout


@dataclass(frozen=True)
class Passes:
    """A model that can be run over frames; what an adapter's ``open_passes`` gives.

    Attributes
    ----------
    name : str
        Path of the file.
    readout : Readout
    run : callable
        Takes frames and whether forces are wanted. Runs the model on one batch for every item that is taken, which is
        the batch's forces (N, 3) in eV/Å, or None. `InputError` before the first for species that it does not know.
    """

    name: str
    readout: Readout
    run: Callable[[Sequence[Frame], bool], Iterator[Optional[Tensor]]]


def required_readout(readout: Optional[Readout], name: Union[str, Path]) -> Readout:
    """Return the readout of a model; `InputError` that names its file where it has none."""
    if readout is None:
        raise InputError(f"{name}: has no readout of e2ip-plugins; e2ip fit gives it one")
    return readout


@dataclass(frozen=True)
class Features:
    """Atoms of some frames.

    Attributes
    ----------
    scalars : (A, D)
        0e features in double precision.
    kinds : (A,) int
        Species, counted head by head.
    frames : (A,) int
        Which frame an atom is of.
    leverage : (A,)
        ``e2ip_leverage`` of the model.
    forces : (A, 3)
        In eV/Å; NaN where they were not wanted.
    count : int
        Frames.
    """

    scalars: np.ndarray
    kinds: np.ndarray
    frames: np.ndarray
    leverage: np.ndarray
    forces: np.ndarray
    count: int

    def take(self, chosen: Sequence[int]) -> "Features":
        """Some of the frames, in this order."""
        bounds = np.searchsorted(self.frames, np.arange(self.count + 1))
        atoms = [np.arange(bounds[i], bounds[i + 1]) for i in chosen]
        which = np.concatenate([np.empty(0, int), *atoms]).astype(int)
        frames = np.repeat(np.arange(len(atoms)), [len(part) for part in atoms]).astype(int)
        scalars, kinds = self.scalars[which], self.kinds[which]
        return Features(scalars, kinds, frames, self.leverage[which], self.forces[which], len(atoms))


def collect(model: Passes, frames: Sequence[Frame], forces: bool = False) -> Features:
    """Run a model over frames.

    Parameters
    ----------
    model : Passes
    frames : sequence of Frame
        At least one.
    forces : bool
        Whether forces are wanted, which takes about three times as long.

    Raises
    ------
    InputError
        Species that the model does not know.
    """
    parts: Dict[str, List[np.ndarray]] = {"scalars": [], "kinds": [], "leverage": [], "forces": []}
    with seen_by(model.readout) as seen:
        for found in model.run(frames, forces):
            outputs = {"scalars": seen["scalars"], "kinds": seen["kinds"], "leverage": seen["outputs"][LEVERAGE.name]}
            for name, value in outputs.items():
                parts[name].append(value.cpu().numpy())
            missing = np.full((len(seen["kinds"]), 3), np.nan)
            parts["forces"].append(missing if found is None else found.detach().cpu().double().numpy())
    table = {name: np.concatenate(values) for name, values in parts.items()}
    of_atoms = np.repeat(np.arange(len(frames)), [len(frame.atoms) for frame in frames])
    return Features(
        table["scalars"].astype(np.float64),
        table["kinds"],
        of_atoms,
        table["leverage"].astype(np.float64),
        table["forces"],
        len(frames),
    )


def check(model: Passes) -> None:
    """`InputError` where a model's leverage was not fitted."""
    if not bool(model.readout.leverage.fitted):
        raise InputError(f"{model.name}: the leverage of its readout has not been fitted; see e2ip fit")
