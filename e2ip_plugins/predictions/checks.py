"""Checks of structures: what NequIP and MACE would drop, or predict numbers of, without a word."""

from typing import Any, Callable, Optional, Sequence

import numpy as np
from ase import Atoms
from ase.data import chemical_symbols
from ase.geometry import complete_cell
from scipy.spatial import cKDTree

from e2ip_plugins.errors import InputError

#: Two atoms nearer than this, in Å, are at the same place.
SAME_PLACE = 1e-2

#: No cell is smaller than one with edges of this length, in Å.
SMALLEST_CELL = 0.1


def check_structure(atoms: Atoms, where: str, known: Optional[Sequence[str]] = None) -> None:
    """Raise `InputError` for a structure that no model can predict.

    That is a structure without atoms, with positions that are not finite, or with species other than those ``known``;
    and a periodic structure without a cell, or with a cell that is too small for an atom.

    Parameters
    ----------
    atoms : ase.Atoms
    where : str
        File and frame, for the message.
    known : sequence of str, optional
        Chemical symbols.
    """
    if not len(atoms):
        raise InputError(f"{where}: has no atoms")
    check_atoms(atoms.numbers, atoms.positions, where, known)
    _check_cell(atoms.cell.array, atoms.pbc, where)


class StructureCheck:
    """`check_structure` for the structures of one calculator, of which a run changes the positions alone.

    Attributes
    ----------
    passed : bytes
        Species, cell and periodic directions of the last structure that passed. They are not checked again.
    """

    def __init__(self) -> None:
        self.passed = b""

    def __call__(self, atoms: Atoms, known: Callable[[], Optional[Sequence[str]]]) -> None:
        """Raise `InputError` as `check_structure` does; ``known`` returns the chemical symbols."""
        constant = atoms.numbers.tobytes() + atoms.cell.array.tobytes() + atoms.pbc.tobytes()
        if constant != self.passed or not np.isfinite(atoms.positions).all():
            check_structure(atoms, "the structure", known())
            self.passed = constant


def _check_cell(cell: np.ndarray, periodic: np.ndarray, where: str) -> None:
    vectors = cell[periodic]
    if not len(vectors):
        return
    sizes = np.linalg.svd(vectors, compute_uv=False) if np.isfinite(vectors).all() else np.zeros(1)
    if sizes.min() <= 1e-15 * sizes.max():
        raise InputError(f"{where}: is periodic in {len(vectors)} directions, and its cell is not")
    # NequIP and MACE would look for neighbours in millions of its images.
    if sizes.prod() < SMALLEST_CELL ** len(vectors):
        raise InputError(f"{where}: its cell repeats after {sizes.prod():.1e} Å^{len(vectors)}; is it in Å?")


def check_atoms(numbers: np.ndarray, positions: np.ndarray, where: str, known: Optional[Sequence[str]] = None) -> None:
    """Raise `InputError` for positions (N, 3) that are not finite and atomic numbers (N,) of unknown species."""
    bad = np.flatnonzero(~np.isfinite(positions).all(-1))
    if len(bad):
        raise InputError(f"{where}: the position of atom {bad[0]} is not finite ({len(bad)} such atoms)")
    if known is None:
        return
    unknown = sorted({chemical_symbols[number] for number in np.unique(numbers)} - set(known))
    if unknown:
        raise InputError(
            f"{where}: has {', '.join(unknown)}, which the model does not know; it knows {', '.join(known)}"
        )


def check_apart(positions: np.ndarray, cell: Any, periodic: Any, where: str) -> None:
    """Raise `InputError` for two atoms at the same place, and for a periodic structure without a cell.

    The energy of such atoms is infinite, and the features around them say nothing about other frames.

    Parameters
    ----------
    positions : (N, 3)
        Finite, in Å.
    cell : (3, 3) or None
        In Å.
    periodic : (3,) of bool or None
    where : str
        For the message.
    """
    vectors = np.zeros((3, 3)) if cell is None else np.asarray(cell, dtype=np.float64)
    wrapped = np.zeros(3, dtype=bool) if periodic is None else np.asarray(periodic, dtype=bool)
    _check_cell(vectors, wrapped, where)
    box = complete_cell(np.where(wrapped[:, None], vectors, 0.0))
    scaled = np.asarray(positions, dtype=np.float64) @ np.linalg.inv(box)
    scaled = np.where(wrapped, scaled % 1.0, scaled)
    # -1e-17 % 1.0 is 1.0, which the tree refuses.
    scaled[wrapped & (scaled >= 1.0)] = 0.0
    tree = cKDTree(scaled, boxsize=wrapped.astype(np.float64))
    near = tree.query_pairs(SAME_PLACE * np.linalg.norm(np.linalg.inv(box), 2), output_type="ndarray")
    between = scaled[near[:, 0]] - scaled[near[:, 1]]
    distance = np.linalg.norm((between - np.where(wrapped, np.round(between), 0.0)) @ box, axis=-1)
    same = np.flatnonzero(distance < SAME_PLACE)
    if len(same):
        i, j = sorted(near[same[0]].tolist())
        raise InputError(f"{where}: atoms {i} and {j} are at the same place; correct the frame or leave it out")


def check_finite(values: Any, where: str, name: str = "energy", way_out: str = "forces alone may be NaN") -> None:
    """Raise `InputError` for an energy or a stress that is not finite: MACE and NequIP by default mask only forces."""
    if not np.isfinite(values).all():
        raise InputError(
            f"{where}: the reference {name} is not finite, which would make the loss NaN; correct it, or leave the "
            f"frame out ({way_out})"
        )
