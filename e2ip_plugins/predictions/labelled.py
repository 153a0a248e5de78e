"""Frames with reference forces from a user's data files: what ``e2ip fit`` hands to the hosts' ``fit_file``."""

from pathlib import Path
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np
from ase.data import chemical_symbols
from ase.geometry import complete_cell
from scipy.spatial import cKDTree

from e2ip_plugins.errors import InputError
from e2ip_plugins.files import readable_frames
from e2ip_plugins.keys import KCAL_PER_MOL
from e2ip_plugins.predictions.fingerprints import fingerprint, fingerprint_of
from e2ip_plugins.predictions.trajectories import TEXT, is_cut_off

#: Names that the communities of both hosts give to reference forces, most wanted first.
FORCES_KEYS = ("REF_forces", "forces", "force", "dft_forces", "DFT_forces", "ref_forces")

#: Root mean square of the components of forces in eV/Å that only data in other units has: hot molecules have 3.
TOO_LARGE = 12.0

#: Two atoms nearer than this, in Å, are at the same place.
SAME_PLACE = 1e-2
#: No cell is smaller than one with edges of so many Å.
SMALLEST_CELL = 0.1


class Configuration(NamedTuple):
    """A frame as a host has it: species (N,) in numbers of whatever kind, positions (N, 3) and cell (3, 3) in Å, 0 for
    none, whatever else tells frames apart, charge and spin for example, and forces (N, 3) if there are any."""

    species: np.ndarray
    positions: np.ndarray
    cell: np.ndarray
    state: Any = None
    forces: Optional[np.ndarray] = None


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

    atoms: Any
    forces: np.ndarray
    where: str


def read_frames(paths: Iterable[Path], forces_key: Optional[str] = None, need_forces: bool = True) -> List[Frame]:
    """All frames of some files, isolated atoms (``config_type=IsolatedAtom``, MACE's E0s) left out.

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
    import ase.io

    frames: List[Frame] = []
    for path in map(Path, paths):
        if not path.is_file():
            raise InputError(f"{path}: {'is a folder' if path.is_dir() else 'no such file'}")
        try:
            found = ase.io.read(path, index=":")
        # ASE's readers let whatever goes wrong inside them through.
        except Exception as error:
            if not path.stat().st_size:
                raise InputError(f"{path}: has no frames") from error
            cut = "; its last frame is cut off" if path.suffix in TEXT and is_cut_off(path) else ""
            where = f"{path}, frame {readable_frames(path)}" if path.suffix in TEXT else path
            raise InputError(f"{where}: ASE cannot read it ({type(error).__name__}: {error}){cut}") from error
        counting = [(a, f"{path}, frame {i}") for i, a in enumerate(found) if _counts(a)]
        own = [Frame(bare(a), _forces(a, forces_key, where), where) for a, where in counting]
        if not own:
            raise InputError(f"{path}: has no frames")
        for frame in own:
            check_structure(frame.atoms, frame.where)
            check_apart(frame.atoms.positions, frame.atoms.cell.array, frame.atoms.pbc, frame.where)
        if need_forces and not any(np.isfinite(frame.forces).all(-1).any() for frame in own):
            wanted = f"'{forces_key}'" if forces_key else f"any of {', '.join(FORCES_KEYS)}"
            raise InputError(f"{path}: no atom has finite reference forces under {wanted}; name them with --forces-key")
        frames += own
    return frames


def check_structure(atoms: Any, where: str, known: Optional[Sequence[str]] = None) -> None:
    """Raise `InputError` for what the hosts drop, or predict numbers of, without a word, and for unknown species.

    No atoms, positions that are not finite, and a periodic structure without a cell, or with one that is too small for
    an atom; species that are none of those ``known``, if given.
    """
    if not len(atoms):
        raise InputError(f"{where}: has no atoms")
    check_atoms(atoms.numbers, atoms.positions, where, known)
    _check_cell(atoms.cell.array, atoms.pbc, where)


def _check_cell(cell: np.ndarray, periodic: np.ndarray, where: str) -> None:
    vectors = cell[periodic]
    if not len(vectors):
        return
    sizes = np.linalg.svd(vectors, compute_uv=False) if np.isfinite(vectors).all() else np.zeros(1)
    if sizes.min() <= 1e-15 * sizes.max():
        raise InputError(f"{where}: is periodic in {len(vectors)} directions, and its cell is not")
    # Hosts would look for neighbours in millions of its images.
    if sizes.prod() < SMALLEST_CELL ** len(vectors):
        raise InputError(f"{where}: its cell repeats after {sizes.prod():.1e} Å^{len(vectors)}; is it in Å?")


def check_atoms(numbers: np.ndarray, positions: np.ndarray, where: str, known: Optional[Sequence[str]] = None) -> None:
    """The part of `check_structure` that asks for atomic numbers (N,) and positions (N, 3) alone."""
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

    Their energy is infinite, and features of the atoms around them tell nothing of any other frame.

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
    # What is -1e-17 of a box away from a face.
    scaled[wrapped & (scaled >= 1.0)] = 0.0
    tree = cKDTree(scaled, boxsize=wrapped.astype(np.float64))
    near = tree.query_pairs(SAME_PLACE * np.linalg.norm(np.linalg.inv(box), 2), output_type="ndarray")
    between = scaled[near[:, 0]] - scaled[near[:, 1]]
    distance = np.linalg.norm((between - np.where(wrapped, np.round(between), 0.0)) @ box, axis=-1)
    same = np.flatnonzero(distance < SAME_PLACE)
    if len(same):
        i, j = sorted(near[same[0]].tolist())
        raise InputError(f"{where}: atoms {i} and {j} are at the same place; correct the frame or leave it out")


def check_finite(values: Any, where: str, name: str = "energy") -> None:
    """Raise `InputError` for a label, energy or stress, that is not finite: unlike forces, the hosts mask none."""
    if not np.isfinite(values).all():
        raise InputError(
            f"{where}: the reference {name} is not finite, which would make the loss NaN; correct it, or leave the "
            "frame out (forces alone may be NaN)"
        )


def _counts(atoms: Any) -> bool:
    return not (len(atoms) == 1 and atoms.info.get("config_type") == "IsolatedAtom")


def _forces(atoms: Any, key: Optional[str], where: str) -> np.ndarray:
    # ASE's reader takes columns named like calculator results out of the arrays.
    there = {**atoms.arrays, **(atoms.calc.results if atoms.calc is not None else {})}
    for name in (key,) if key else FORCES_KEYS:
        values = np.asarray(there.get(name, ()))
        if values.shape == (len(atoms), 3) and values.dtype.kind in "fiu":
            return values.astype(np.float64)
        if key and key in there:
            raise InputError(
                f"{where}: '{key}' is not three numbers per atom; name the reference forces with --forces-key"
            )
    return np.full((len(atoms), 3), np.nan)


def bare(atoms: Any) -> Any:
    """A copy without the results of a calculator."""
    copy = atoms.copy()
    copy.calc = None
    return copy


def once(frames: Sequence[Frame]) -> List[Frame]:
    """Without further copies of a frame, which say nothing new; see `same_frames`."""
    first: Dict[str, Frame] = {}
    for frame in frames:
        first.setdefault(fingerprint(frame.atoms), frame)
    return list(first.values())


def same_frames(a: Sequence[Frame], b: Sequence[Frame]) -> int:
    """How many frames of ``b`` are also in ``a``, by species, positions and, where periodic, cell."""
    known = {fingerprint(frame.atoms) for frame in a}
    return sum(fingerprint(frame.atoms) in known for frame in b)


def doubts(training: Iterable[Configuration], validation: Iterable[Configuration]) -> List[str]:
    """What is wrong, for a leverage, with the sets of a training that is about to begin.

    Parameters
    ----------
    training, validation : iterable of Configuration
    """

    def mark(frame: Configuration) -> Tuple[str, Any]:
        return fingerprint_of(frame.species, frame.positions, frame.cell), frame.state

    known: Set[int] = set()
    marks = set()
    squares, components = 0.0, 0
    for frame in training:
        known.update(frame.species.tolist())
        marks.add(mark(frame))
        if frame.forces is not None:
            finite = np.isfinite(frame.forces)
            squares += float(np.square(frame.forces, where=finite, out=np.zeros(finite.shape)).sum())
            components += int(finite.sum())
    total = shared = strange = 0
    for frame in validation:
        total += 1
        # Isolated atoms are all alike, and of no account.
        shared += len(frame.species) > 1 and mark(frame) in marks
        strange += not known.issuperset(frame.species.tolist())
    found = []
    if squares > TOO_LARGE**2 * components:
        found.append(
            f"the training forces have a root mean square of {np.sqrt(squares / components):.3g} per component: what "
            "is put out is taken for eV and Å. Are they in kcal/mol/Å? Multiply energies and forces by "
            f"{KCAL_PER_MOL:.6g}"
        )
    if shared:
        found.append(
            f"{shared} of {total} validation frames are training frames: error bars come out too small; give frames "
            "that the model is not trained on"
        )
    if total and strange == total:
        found.append(
            "every validation frame has species that the training set lacks: the leverage cannot be fitted to them, "
            "and the model will predict as in evidence mode 'coupled'"
        )
    return found
