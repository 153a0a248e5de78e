"""Features of atoms in a model of NequIP or MACE, for ``e2ip select``.

The fit itself uses `e2ip_plugins.fitting.training_atoms`. The adapters open the model (entry points
``e2ip_plugins.passes``) and run it; the calls of its readout are recorded here.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Iterator, List, Optional, Sequence, Union

import numpy as np
from torch import Tensor

from e2ip_plugins.errors import InputError
from e2ip_plugins.fitting.force_errors import last_call_of
from e2ip_plugins.keys import ENERGY_ERROR_VECTOR, LEVERAGE
from e2ip_plugins.predictions.labelled import LabelledFrame
from e2ip_plugins.readout.readout import Readout


@dataclass(frozen=True)
class FeatureModel:
    """A model that can be run over frames; ``open_passes`` of an adapter gives it.

    Attributes
    ----------
    name : str
        Name of the file.
    readout : Readout
    run : callable
        Takes frames and whether forces are wanted. Taking the next item runs the model on the next batch; the item is
        the batch's forces (N, 3) in eV/Å, or None. `InputError` before the first for species that it does not know.
    """

    name: str
    readout: Readout
    run: Callable[[Sequence[LabelledFrame], bool], Iterator[Optional[Tensor]]]


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
    vectors : (count, M) or None
        Error vectors of the frames' energies in eV; None for models without uncertainties of energies.
    """

    scalars: np.ndarray
    kinds: np.ndarray
    frames: np.ndarray
    leverage: np.ndarray
    forces: np.ndarray
    count: int
    vectors: Optional[np.ndarray] = None

    def take(self, chosen: Sequence[int]) -> "Features":
        """Return the features of some frames, in this order."""
        bounds = np.searchsorted(self.frames, np.arange(self.count + 1))
        atoms = [np.arange(bounds[i], bounds[i + 1]) for i in chosen]
        which = np.concatenate([np.empty(0, int), *atoms]).astype(int)
        frames = np.repeat(np.arange(len(atoms)), [len(part) for part in atoms]).astype(int)
        scalars, kinds = self.scalars[which], self.kinds[which]
        vectors = None if self.vectors is None else self.vectors[np.array(chosen, dtype=int)]
        return Features(scalars, kinds, frames, self.leverage[which], self.forces[which], len(atoms), vectors)


def collect(model: FeatureModel, frames: Sequence[LabelledFrame], forces: bool = False) -> Features:
    """Run a model over frames.

    Parameters
    ----------
    model : FeatureModel
    frames : sequence of LabelledFrame
        At least one.
    forces : bool
        Whether forces are wanted, which takes about three times as long.

    Raises
    ------
    InputError
        Species that the model does not know.
    """
    parts: List[List[np.ndarray]] = []
    vectors: List[np.ndarray] = []
    with last_call_of(model.readout) as call:
        for predicted in model.run(frames, forces):
            scalars, outputs = call["scalars"], call["outputs"]
            on_atoms = scalars.new_full((len(scalars), 3), np.nan) if predicted is None else predicted.detach()
            of_batch = (scalars, call["kinds"], outputs[LEVERAGE.name], on_atoms)
            parts.append([values.cpu().numpy() for values in of_batch])
            if ENERGY_ERROR_VECTOR.name in outputs:
                vectors.append(outputs[ENERGY_ERROR_VECTOR.name].cpu().double().numpy())
    features, kinds, *others = map(np.concatenate, zip(*parts, strict=True))
    leverage, predicted_forces = (values.astype(np.float64) for values in others)
    index = np.repeat(np.arange(len(frames)), [len(frame.atoms) for frame in frames])
    # They are zero where they were never fitted.
    have_vectors = sum(map(len, vectors)) == len(frames) and any(part.any() for part in vectors)
    known = np.concatenate(vectors) if have_vectors else None
    return Features(features.astype(np.float64), kinds, index, leverage, predicted_forces, len(frames), known)


def check(model: FeatureModel) -> None:
    """Raise `InputError` where a model's leverage was not fitted."""
    if not bool(model.readout.leverage.fitted):
        raise InputError(f"{model.name}: the leverage of its readout has not been fitted; see e2ip fit")
