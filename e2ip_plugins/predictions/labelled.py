"""Frames with reference forces from a user's data files, as ``e2ip fit`` and ``e2ip select`` read them."""

from pathlib import Path
from typing import Dict, Iterable, List, NamedTuple, Optional, Sequence

import numpy as np
from ase import Atoms

from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.checks import check_apart, check_structure
from e2ip_plugins.predictions.fingerprints import fingerprint
from e2ip_plugins.predictions.trajectories import read_all

#: Names that users of MACE and NequIP give to reference forces; the first one that a file has is taken.
FORCES_KEYS = ("REF_forces", "forces", "force", "dft_forces", "DFT_forces", "ref_forces")


class Frame(NamedTuple):
    """One configuration.

    Attributes
    ----------
    atoms : ase.Atoms
        Without calculator.
    forces : (N, 3)
        Reference in eV/Å; NaN where the file has none.
    where : str
        File and number of the frame, for messages.
    """

    atoms: Atoms
    forces: np.ndarray
    where: str


def read_frames(paths: Iterable[Path], forces_key: Optional[str] = None, need_forces: bool = True) -> List[Frame]:
    """Return all frames of some files except isolated atoms (``config_type=IsolatedAtom``, MACE's E0s).

    Parameters
    ----------
    paths
        Anything that ASE reads.
    forces_key : str, optional
        Array with the reference forces; default: the first of `FORCES_KEYS` that a file has.
    need_forces : bool
        Whether a file without a finite reference force is an error.

    Raises
    ------
    InputError
        Missing, unreadable and empty files, those without the forces, an array that holds something else, and what
        `check_structure` and `check_apart` refuse.
    """
    return [frame for path in map(Path, paths) for frame in _read_file(path, forces_key, need_forces)]


def _read_file(path: Path, forces_key: Optional[str], need_forces: bool) -> List[Frame]:
    frames = []
    for i, atoms in enumerate(read_all(path)):
        if len(atoms) == 1 and atoms.info.get("config_type") == "IsolatedAtom":
            continue
        where = f"{path}, frame {i}"
        frames.append(Frame(bare(atoms), _forces(atoms, forces_key, where), where))
        check_structure(atoms, where)
        check_apart(atoms.positions, atoms.cell.array, atoms.pbc, where)
    if not frames:
        raise InputError(f"{path}: has no frames")
    if need_forces and not any(np.isfinite(frame.forces).all(-1).any() for frame in frames):
        wanted = f"'{forces_key}'" if forces_key else f"any of {', '.join(FORCES_KEYS)}"
        raise InputError(f"{path}: no atom has finite reference forces under {wanted}; name them with --forces-key")
    return frames


def _forces(atoms: Atoms, key: Optional[str], where: str) -> np.ndarray:
    # ASE's reader takes columns named like calculator results out of the arrays.
    columns = {**atoms.arrays, **(atoms.calc.results if atoms.calc is not None else {})}
    for name in (key,) if key else FORCES_KEYS:
        values = np.asarray(columns.get(name, ()))
        if values.shape == (len(atoms), 3) and values.dtype.kind in "fiu":
            return values.astype(np.float64)
        if key and key in columns:
            raise InputError(
                f"{where}: '{key}' is not three numbers per atom; name the reference forces with --forces-key"
            )
    return np.full((len(atoms), 3), np.nan)


def bare(atoms: Atoms) -> Atoms:
    """Return a copy of a frame without the results of a calculator."""
    copy = atoms.copy()
    copy.calc = None
    return copy


def once(frames: Sequence[Frame]) -> List[Frame]:
    """Return the frames without further copies of a frame, which add nothing; see `same_frames`."""
    first: Dict[str, Frame] = {}
    for frame in frames:
        first.setdefault(fingerprint(frame.atoms), frame)
    return list(first.values())


def same_frames(a: Sequence[Frame], b: Sequence[Frame]) -> int:
    """Return how many frames of ``b`` are also in ``a``, by species, positions and, where periodic, cell."""
    known = {fingerprint(frame.atoms) for frame in a}
    return sum(fingerprint(frame.atoms) in known for frame in b)
