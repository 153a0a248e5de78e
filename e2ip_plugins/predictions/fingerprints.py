"""Fingerprints that tell frames apart, whatever file or program they come from; and forces of one frame."""

import hashlib
from typing import Any, Mapping

import numpy as np
from ase import Atoms

from e2ip_plugins.keys import FAMILY_KEY, PREDICTED_KEY

#: Names in the info of frames from which calculators and models take charge and spin, with the value that is assumed
#: where a name is missing.
STATE = {"charge": 0, "total_charge": 0, "spin": 1, "total_spin": 1, "multiplicity": 1, "spin_multiplicity": 1}


def fingerprint(atoms: Atoms) -> str:
    """Return 12 hex digits for the species, positions, periodic cell vectors, charge and spin of a frame."""
    mark = fingerprint_of(atoms.numbers, atoms.positions, atoms.cell[:] * atoms.pbc[:, None])
    state = []
    for name, usual in STATE.items():
        value = atoms.info.get(name, usual)
        text = f"{value:g}" if isinstance(value, (int, float, np.number)) else str(value)
        if text != str(usual):
            state.append(f"{name}={text}")
    return hashlib.sha256(" ".join([mark, *state]).encode()).hexdigest()[:12] if state else mark


def fingerprint_of(species: np.ndarray, positions: np.ndarray, cell: np.ndarray) -> str:
    """Return the `fingerprint` of a frame without charge and spin.

    Six sums over atoms with fixed weights are hashed, in steps of 1e-4 Å. Of all coordinates there would be so many
    that some lie where rounding decides. A passage through a file with eight decimals changes the fingerprint of one
    frame in some thousand, one through float32 or six decimals that of one in ten.

    Parameters
    ----------
    species : (N,)
        Numbers of any kind.
    positions : (N, 3)
        In Å.
    cell : (3, 3)
        In Å; 0 for directions that are not periodic.
    """
    rows = np.concatenate([positions, cell]).astype(np.float64)
    phases = 1.0 + np.arange(len(rows)) * np.pi * (3.0 - 5.0**0.5)  # multiples of the golden angle: no two are alike
    sums = np.stack([np.cos(phases), np.sin(phases)]) @ rows
    # Adding 0 removes the sign of zeros.
    rounded = np.round(sums, 4) + 0.0
    return hashlib.sha256(np.asarray(species, dtype=np.int64).tobytes() + rounded.tobytes()).hexdigest()[:12]


def force_sizes(forces: np.ndarray) -> np.ndarray:
    """Return root mean square, largest and smallest norm (3,) of the forces (N, 3) on a frame's atoms.

    They do not depend on the order of the atoms or on the orientation.
    """
    norms = np.linalg.norm(forces, axis=-1)
    return np.array([np.sqrt(np.mean(np.square(norms))), norms.max(), norms.min()])


def are_predictions(info: Mapping[str, Any], forces: np.ndarray, prefix: str = "") -> bool:
    """Return whether forces (N, 3) of a frame are a model's predictions.

    They are in a frame with ``uq_family``, unless `PREDICTED_KEY` says that the predictions were others: then they were
    put there after the evaluation. Where a program has written no such key nobody can tell, and they are predictions.

    Parameters
    ----------
    info : mapping
        ``atoms.info`` of the frame.
    forces : (N, 3)
    prefix : str
        Text before ``forces`` and ``uq_family`` in the names, such as ``MACE_``.
    """
    sizes = info.get(prefix + PREDICTED_KEY)
    if sizes is None:
        return prefix + FAMILY_KEY in info
    # What six decimals in a file leave of them.
    return np.shape(sizes) == (3,) and np.allclose(force_sizes(forces), sizes, rtol=1e-5, atol=2e-6)
