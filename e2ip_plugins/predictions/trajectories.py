"""Whole files of frames: reading them, also where a killed run has cut one off, and adding frames to them."""

import io
import tempfile
from pathlib import Path
from typing import Iterable, Iterator, List, Optional, Tuple

import ase.io
from ase import Atoms

from e2ip_plugins.errors import InputError
from e2ip_plugins.files import append
from e2ip_plugins.predictions.chunks import Chunk, check_is_file, chunks, open_frames, split_slice, to_atoms

#: Endings of extxyz files.
TEXT = (".xyz", ".extxyz")


def read_all(path: Path, format: Optional[str] = None) -> List[Atoms]:
    """Return the frames of a file, or of a slice of it (``file@slice``), at least one, in any format of ASE's.

    Raises
    ------
    InputError
        Files that are missing or empty, or that ASE cannot read; the message names the first such frame.
    """
    wanted, (path, index) = path, split_slice(path)
    check_is_file(path)
    try:
        frames = ase.io.read(path, index=index, format=format, do_not_split_by_at_sign=True)
    # ASE's readers raise exceptions of all kinds.
    except Exception as error:
        if not path.stat().st_size:
            raise InputError(f"{path}: has no frames") from error
        # Frame by frame, the first bad one is found.
        for chunk in _chunks(path) if format == "extxyz" or path.suffix in TEXT else ():
            to_atoms(chunk, path)
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"{path}: ASE cannot read it ({reason})") from error
    frames = [frames] if isinstance(frames, Atoms) else frames
    if not frames:
        raise InputError(f"{wanted}: has no frames")
    return frames


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


def check_end(path: Path, option: str = "") -> None:
    """Raise `InputError` for an extxyz file whose last frame is cut off: a frame added to it would be broken."""
    if not all(chunk.complete for chunk in _chunks(path)):
        raise InputError(
            f"{option}{path}: its last frame is cut off; take it out or, if it is all there, end its last line"
        )


def check_output(
    path: Path,
    option: str = "",
    *,
    inputs: Iterable[Path] = (),
    frames: bool = False,
    replace: bool = False,
    permission: str = "",
) -> None:
    """Raise `InputError` for a file that cannot be written, or that must not be replaced.

    Parameters
    ----------
    path : Path
        File that is going to be written.
    option : str
        Text before the path in messages, such as ``--output`` with a space.
    inputs : iterable of Path
        Files that are never replaced.
    frames : bool
        Whether frames go into the file, whose name then ends as those of extxyz files do.
    replace : bool
        Whether an existing file may be replaced, or appended to.
    permission : str
        Option by which the user allows that, for the message.
    """
    name = f"{option}{path}"
    if path.is_dir():
        raise InputError(f"{name}: is a folder")
    if not path.parent.is_dir():
        raise InputError(f"{name}: there is no folder {path.parent}")
    files = [split_slice(file)[0] for file in inputs]
    if path.exists() and any(file.exists() and path.samefile(file) for file in files):
        raise InputError(f"{name}: is a file that this command reads; choose another name")
    if path.exists() and not replace:
        raise InputError(f"{name}: is there already; choose another name{permission and f', or {permission}'}")
    if frames and path.suffix not in TEXT:
        raise InputError(f"{name}: frames go into an extxyz file, {' or '.join(TEXT)}")
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise InputError(f"{name}: nothing can be written to that folder ({error.strerror})") from error


def _chunks(path: Path) -> Iterator[Chunk]:
    with open_frames(path) as file:
        yield from chunks(file, path)
