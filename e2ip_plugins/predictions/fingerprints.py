"""Fingerprints that tell frames apart, whatever file or program they come from."""

import hashlib

import numpy as np
from ase import Atoms

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
