"""Energies of frames in prediction files, their standard deviations and their error vectors."""

import math
from pathlib import Path
from typing import Any, Dict, Optional, Sequence

import numpy as np

from e2ip_plugins.errors import InputError
from e2ip_plugins.keys import ENERGY_ERROR_VECTOR, ENERGY_UNCERTAINTY

#: ``info`` of every frame of a file.
Infos = Sequence[Dict[str, Any]]

#: Names of the arrays of `read_all`.
FIELDS = ("reference_energy", "energy", "energy_uncertainty", "energy_error_vector")

_WAY_OUT = "predict the frame anew or leave it out"


def read_all(path: Path, infos: Infos, prefix: str, reference: str) -> Dict[str, Any]:
    """Return all arrays of energies of a file by the names of `FIELDS`, as `Predictions` describes them.

    Parameters
    ----------
    path : Path
    infos : sequence of dict
    prefix : str
        Beginning of the names of what was predicted.
    reference : str
        Name of the reference energy.
    """
    return {
        "reference_energy": read_energies(path, infos, reference),
        "energy": read_energies(path, infos, prefix + "energy"),
        "energy_uncertainty": read_uncertainties(path, infos, prefix + ENERGY_UNCERTAINTY.name),
        "energy_error_vector": read_vectors(path, infos, prefix + ENERGY_ERROR_VECTOR.name),
    }


def read_energies(path: Path, infos: Infos, name: str) -> np.ndarray:
    """Return the energy of every frame (F,) in eV, NaN where it has none; `InputError` where it is not a number."""
    values = np.full(len(infos), np.nan)
    for i, info in enumerate(infos):
        try:
            values[i] = np.asarray(info.get(name, np.nan), dtype=np.float64).item()
        except ValueError as error:
            raise InputError(f"{path}: '{name}' of frame {i} is not a number") from error
    return values


def read_uncertainties(path: Path, infos: Infos, name: str) -> np.ndarray:
    """Return the standard deviation of every energy (F,) in eV, NaN where a frame has none.

    Zero in every frame means that the length of the error vectors was never fitted: no frame has one.

    Raises
    ------
    InputError
        Values that are no numbers, not finite or not positive.
    """
    values = read_energies(path, infos, name)
    present = np.array([name in info for info in infos])
    if not values[present].any():
        return np.full(len(infos), np.nan)
    for i in np.flatnonzero(present):
        if not 0.0 < values[i] < math.inf:
            problem = f"is {values[i]:g}, and a standard deviation is a positive finite number"
            raise InputError(f"{path}: '{name}' of frame {i} {problem}; {_WAY_OUT}")
    return values


def read_vectors(path: Path, infos: Infos, name: str) -> Optional[np.ndarray]:
    """Return the error vectors (F, M) in eV, NaN where a frame has none; None where no frame has one.

    Zero in every frame means the same as in `read_uncertainties`.

    Raises
    ------
    InputError
        Vectors that hold other things than finite numbers, of several lengths, or zero.
    """
    vectors: Dict[int, np.ndarray] = {}
    for i, info in enumerate(infos):
        if name not in info:
            continue
        try:
            vectors[i] = np.asarray(info[name], dtype=np.float64).ravel()
        except ValueError as error:
            raise InputError(f"{path}: '{name}' of frame {i} is no list of numbers") from error
    if not any(vector.any() for vector in vectors.values()):
        return None
    first = next(iter(vectors))
    table = np.full((len(infos), len(vectors[first])), np.nan)
    for i, vector in vectors.items():
        if len(vector) != table.shape[1]:
            problem = f"has {len(vector)} numbers in frame {i} and {table.shape[1]} in frame {first}"
            raise InputError(f"{path}: '{name}' {problem}; one file holds the predictions of one model")
        if not np.isfinite(vector).all() or not vector.any():
            problem = "has numbers that are not finite" if vector.any() else "is zero"
            raise InputError(f"{path}: '{name}' of frame {i} {problem}; {_WAY_OUT}")
        table[i] = vector
    return table
