"""Whole files of frames: reading them, also where a killed run has cut one off, and adding frames to them."""

import io
from contextlib import suppress
from pathlib import Path
from typing import Iterator, List, Optional, Tuple

import ase.io
from ase import Atoms

from e2ip_plugins.errors import InputError
from e2ip_plugins.files import append
from e2ip_plugins.predictions.chunks import Chunk, check_is_file, chunks, open_frames, to_atoms

#: Endings of extxyz files.
TEXT = (".xyz", ".extxyz")


def read_all(path: Path, format: Optional[str] = None) -> List[Atoms]:
    """Return the frames of a file, at least one, in any format of ASE's.

    Raises
    ------
    InputError
        Files that are missing or empty, or that ASE cannot read; the message names the first such frame.
    """
    check_is_file(path)
    try:
        frames = ase.io.read(path, index=":", format=format)
    # ASE's readers raise exceptions of all kinds.
    except Exception as error:
        if not path.stat().st_size:
            raise InputError(f"{path}: has no frames") from error
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        where, cut = str(path), ""
        if format == "extxyz" or path.suffix in TEXT:
            where += f", frame {_readable_frames(path, format)}"
            cut = "; its last frame is cut off" if is_cut_off(path) else ""
        raise InputError(f"{where}: ASE cannot read it ({reason}){cut}") from error
    if not frames:
        raise InputError(f"{path}: has no frames")
    return frames


def _readable_frames(path: Path, format: Optional[str]) -> int:
    """Return the number of frames before the first that ASE cannot read."""
    count = 0
    with suppress(Exception):
        for _ in ase.io.iread(path, index=":", format=format):
            count += 1
    return count


def read_trajectory(path: Path, may_be_empty: bool = False) -> Tuple[List[Atoms], str]:
    """Return all frames of a file, also those without atoms and those with positions that are not finite.

    A last frame that is cut off is left out.

    Parameters
    ----------
    path : Path
        extxyz file, or anything else that ASE reads.
    may_be_empty : bool
        Whether a file without a whole frame is no error.

    Returns
    -------
    frames : list of ase.Atoms
    note : str
        What was left out; empty if nothing was.

    Raises
    ------
    InputError
        Files that are missing, empty, or broken elsewhere than at the end.
    """
    path = Path(path)
    if path.suffix not in TEXT:
        return read_all(path), ""
    frames: List[Atoms] = []
    note = ""
    for chunk in _chunks(path):
        if not chunk.complete:
            note = f"{path}: frame {chunk.number} is cut off and left out"
            break
        frames.append(to_atoms(chunk, path))
    if not frames and not may_be_empty:
        raise InputError(f"{path}: has no whole frame")
    return frames, note


def append_frame(path: Path, atoms: Atoms) -> None:
    """Add a frame to an extxyz file, which stays as it was if that fails or is interrupted."""
    text = io.StringIO()
    ase.io.write(text, atoms, format="extxyz")
    append(path, text.getvalue())


def whole_bytes(path: Path) -> int:
    """Return how many bytes of an extxyz file belong to whole frames."""
    return sum(len(chunk.text) for chunk in _chunks(path) if chunk.complete)


def is_cut_off(path: Path) -> bool:
    """Return whether the last frame of an extxyz file is cut off; False for other files."""
    try:
        return not all(chunk.complete for chunk in _chunks(path))
    except InputError:
        return False


def check_end(path: Path, option: str = "") -> None:
    """Raise `InputError` for an extxyz file whose last frame is cut off: a frame added to it would be broken."""
    if not all(chunk.complete for chunk in _chunks(path)):
        raise InputError(
            f"{option}{path}: its last frame is cut off; take it out or, if it is all there, end its last line"
        )


def check_is_new(path: Path, option: str = "") -> None:
    """Raise `InputError` for an output file that exists, or whose folder does not."""
    if path.exists():
        raise InputError(f"{option}{path}: is there already; choose another name")
    if not path.parent.is_dir():
        raise InputError(f"{option}{path}: there is no folder {path.parent}")


def _chunks(path: Path) -> Iterator[Chunk]:
    with open_frames(path) as file:
        yield from chunks(file, path)
