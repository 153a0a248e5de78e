"""Fingerprints that tell frames apart, whatever file or program they come from."""

import hashlib
from typing import Any

import numpy as np

#: In the info of frames, what calculators and models make charge and spin of, and what counts as if it were not there.
STATE = {"charge": 0, "total_charge": 0, "spin": 1, "total_spin": 1, "multiplicity": 1, "spin_multiplicity": 1}


def fingerprint(atoms: Any) -> str:
    """What tells an ASE frame from others: species, positions, where periodic cell, charge and spin; 12 hex digits."""
    mark = fingerprint_of(atoms.numbers, atoms.positions, atoms.cell[:] * atoms.pbc[:, None])
    given = {name: atoms.info.get(name, usual) for name, usual in STATE.items()}
    said = {n: f"{value:g}" if isinstance(value, (int, float, np.number)) else str(value) for n, value in given.items()}
    state = [f"{name}={said[name]}" for name, usual in STATE.items() if said[name] != str(usual)]
    return hashlib.sha256(" ".join([mark, *state]).encode()).hexdigest()[:12] if state else mark


def fingerprint_of(species: np.ndarray, positions: np.ndarray, cell: np.ndarray) -> str:
    """`fingerprint` of species (N,) in numbers of whatever kind, positions (N, 3) and cell (3, 3), 0 for none, in Å.

    What is hashed are six sums over atoms with fixed weights, in steps of 1e-4 Å: of all coordinates there would be so
    many that some lie where rounding decides. A passage through a file with eight decimals makes one frame of some
    thousand another one, one through float32 or six decimals one of ten.
    """
    rows = np.concatenate([positions, cell]).astype(np.float64)
    phases = 1.0 + np.arange(len(rows)) * np.pi * (3.0 - 5.0**0.5)  # of the golden angle: no two alike
    sums = np.stack([np.cos(phases), np.sin(phases)]) @ rows
    # Without the sign of zeros.
    rounded = np.round(sums, 4) + 0.0
    return hashlib.sha256(np.asarray(species, dtype=np.int64).tobytes() + rounded.tobytes()).hexdigest()[:12]
