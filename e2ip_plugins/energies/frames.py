"""Energies and error vectors of frames: of prediction files, or of ASE's Atoms."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np
from ase import Atoms

from e2ip_plugins.errors import InputError, UncertaintyWarning
from e2ip_plugins.keys import CALIBRATION_KEY, ENERGY_ERROR_VECTOR, ENERGY_UNCERTAINTY, MODEL_KEY

#: A prediction file, a frame, or several of them.
Source = Union[str, Path, Atoms, Sequence[Union[str, Path, Atoms]]]

#: Largest relative difference between ``energy_uncertainty`` and the length of the vector. Files of models in single
#: precision have differences of 1e-6.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class FrameEnergies:
    """Energies of F frames of one model, with their error vectors of M numbers.

    Attributes
    ----------
    atoms : list of ase.Atoms
    places : list of str
        File and number of every frame, for messages.
    energies : (F,)
        In eV.
    vectors : (F, M)
        In eV: errors of the energies are ``vectors @ r`` with one r ~ N(0, 1) for all frames.
    uq_model : str or None
        Name of the model; None where no frame has one.
    """

    atoms: List[Atoms]
    places: List[str]
    energies: np.ndarray
    vectors: np.ndarray
    uq_model: Optional[str]


def read_energies(source: Source) -> FrameEnergies:
    """Return energies and error vectors of all frames, those of several files one after another.

    Parameters
    ----------
    source : path, ase.Atoms, or sequence of them
        Files with predictions, of `e2ip evaluate`, `mace_eval_configs` or NequIP's writer; frames of them; or frames
        whose calculator has predicted their energy.

    Raises
    ------
    InputError
        Files that cannot be read, frames without an energy or an error vector, and frames of different models or
        calibrations.
    """
    atoms, places = _frames(source)
    energies = [_FrameEnergy.of(*frame) for frame in zip(atoms, places, strict=True)]
    first = energies[0]
    for frame, place in zip(energies, places, strict=True):
        if frame.uq_model != first.uq_model:
            raise InputError(
                f"{place}: its model (uq_model) is {frame.uq_model or 'not named'}, that of {places[0]} is "
                f"{first.uq_model or 'not named'}: errors of different models have nothing in common; predict all "
                "frames with one model"
            )
        if frame.calibration != first.calibration:
            raise InputError(
                f"{place}: its calibration ({CALIBRATION_KEY}) is {frame.calibration or 'none'}, that of {places[0]} "
                f"is {first.calibration or 'none'}: their errors have different sizes; predict all frames with one"
            )
        if len(frame.vector) != len(first.vector):
            raise InputError(
                f"{place}: its {ENERGY_ERROR_VECTOR.name} has {len(frame.vector)} numbers, that of {places[0]} "
                f"{len(first.vector)}: predict all frames with one model"
            )
    vectors = np.stack([frame.vector for frame in energies])
    if not vectors.any():
        raise InputError(
            f"{places[0]}: all numbers of {ENERGY_ERROR_VECTOR.name} are zero: the model was never fitted; run e2ip "
            "fit with energies in the validation set"
        )
    if first.uq_model is None:
        text = (
            f"{places[0]}: no frame names its model ({MODEL_KEY}); error vectors of different models must not be mixed"
        )
        warnings.warn(text, UncertaintyWarning, stacklevel=3)
    return FrameEnergies(atoms, places, np.array([frame.energy for frame in energies]), vectors, first.uq_model)


def _frames(source: Source) -> Tuple[List[Atoms], List[str]]:
    """Return all frames, with file and number of each; `InputError` if there is none."""
    sources: Sequence[Any] = [source] if isinstance(source, (str, Path, Atoms)) else source
    atoms: List[Atoms] = []
    places: List[str] = []
    for part in sources:
        if isinstance(part, Atoms):
            places.append(f"frame {len(atoms)}")
            atoms.append(part)
            continue
        # Late, because it imports torch.
        from e2ip_plugins.predictions.trajectories import read_all

        frames = read_all(Path(part))
        places += [f"{part}, frame {i}" for i in range(len(frames))]
        atoms += frames
    if not atoms:
        raise InputError("no frames: give a prediction file, or frames of one")
    return atoms, places


class _FrameEnergy(NamedTuple):
    energy: float
    vector: np.ndarray
    uq_model: Optional[str]
    calibration: Optional[str]

    @classmethod
    def of(cls, atoms: Atoms, place: str) -> "_FrameEnergy":
        values = _values(atoms)
        prefix = _prefix(values, place)
        name = prefix + ENERGY_ERROR_VECTOR.name
        vector = np.ravel(values[name])
        if vector.dtype.kind not in "iuf" or not np.isfinite(vector).all():
            raise InputError(f"{place}: {name} has entries that are not finite numbers")
        energy = _number(values, prefix + "energy", place)
        length = float(np.linalg.norm(vector))
        std = _number(values, prefix + ENERGY_UNCERTAINTY.name, place, default=length)
        if not abs(std - length) <= TOLERANCE * length:
            raise InputError(
                f"{place}: {prefix}{ENERGY_UNCERTAINTY.name} is {std:.3g} eV, but the length of {name} is {length:.3g} "
                "eV: one of them was changed; predict the frame anew"
            )
        names = [values.get(prefix + key, values.get(key)) for key in (MODEL_KEY, CALIBRATION_KEY)]
        return cls(energy, vector.astype(np.float64), *(None if name is None else str(name) for name in names))


def _number(values: Dict[str, Any], key: str, place: str, default: Optional[float] = None) -> float:
    """Return a finite number of a frame; without a default, `InputError` where it has none."""
    value = values.get(key, default)
    if value is None:
        raise InputError(f"{place}: has no predicted energy ({key}): predict the frame with e2ip evaluate")
    try:
        number = np.asarray(value, dtype=np.float64).item()
    except (TypeError, ValueError):
        number = np.nan
    if not np.isfinite(number):
        raise InputError(f"{place}: {key} is no finite number: {value}")
    return number


def _values(atoms: Atoms) -> Dict[str, Any]:
    """Return the info of a frame and what its calculator has computed for it."""
    results = {} if atoms.calc is None or atoms.calc.check_state(atoms) else atoms.calc.results
    return {**atoms.info, **results}


def _prefix(values: Dict[str, Any], place: str) -> str:
    """Return what stands before the names of the predictions; `InputError` without an error vector."""
    name = ENERGY_ERROR_VECTOR.name
    keys = [key for key in values if key.endswith(name)]
    if len(keys) > 1:
        raise InputError(f"{place}: several error vectors: {', '.join(keys)}; keep the predictions of one model")
    if not keys:
        raise InputError(
            f"{place}: has no {name}: it was not predicted yet (e2ip evaluate), or with --no-energy-vectors; or its "
            "model has none (no energies in its validation set, several models at once), or its calculator has gone on "
            "to another frame"
        )
    return keys[0].removesuffix(name)
