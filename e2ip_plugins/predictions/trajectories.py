"""Frames of trajectories that runs have left, whole or cut off in the middle of a frame."""

import io
import tempfile
from pathlib import Path
from typing import Any, Iterable, Iterator, List, Sequence, Tuple

from e2ip_plugins.errors import InputError
from e2ip_plugins.files import append
from e2ip_plugins.predictions.chunks import Chunk, chunks, open_frames, to_atoms

#: Endings of extxyz files.
TEXT = (".xyz", ".extxyz")


def read_trajectory(path: Path, may_be_empty: bool = False) -> Tuple[List[Any], str]:
    """All frames of a file, as they are: frames without atoms and with positions that are no numbers included.

    A last frame that was cut off, as a program that is killed leaves it, is left out.

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
    if not path.is_file():
        raise InputError(f"{path}: {'is a folder' if path.is_dir() else 'no such file'}")
    frames: List[Any] = []
    note = ""
    if path.suffix in TEXT:
        for chunk in _chunks(path):
            if not chunk.complete:
                note = f"{path}: frame {chunk.number} is cut off and left out"
                break
            frames.append(to_atoms(chunk, path))
    else:
        import ase.io

        try:
            frames = ase.io.read(path, index=":")
        # ASE's readers let whatever goes wrong inside them through.
        except Exception as error:
            raise InputError(f"{path}: ASE cannot read it ({type(error).__name__}: {error})") from error
    if not frames and not may_be_empty:
        raise InputError(f"{path}: has no whole frame")
    return frames, note


def append_frame(path: Path, atoms: Any) -> None:
    """Add a frame to an extxyz file, which is left as it was where that cannot be, or is interrupted."""
    import ase.io

    text = io.StringIO()
    ase.io.write(text, atoms, format="extxyz")
    append(path, text.getvalue())


def whole_bytes(path: Path) -> int:
    """How much of an extxyz file are whole frames."""
    return sum(len(chunk.text) for chunk in _chunks(path) if chunk.complete)


def is_cut_off(path: Path) -> bool:
    """Whether the last frame of a file, if it is extxyz, is not all there."""
    try:
        return not all(chunk.complete for chunk in _chunks(path))
    except InputError:
        return False


def check_end(path: Path, option: str = "") -> None:
    """`InputError` for an extxyz file whose last frame is cut off: what is written behind it would go into its line."""
    if not all(chunk.complete for chunk in _chunks(path)):
        raise InputError(
            f"{option}{path}: its last frame is cut off; take it out or, if it is all there, end its last line"
        )


def check_output(
    path: Path,
    option: str = "",
    *,
    inputs: Iterable[Path] = (),
    endings: Sequence[str] = (),
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
    endings : sequence of str
        Endings that the name of a file of frames may have; any name may be given without them.
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
    if path.exists() and any(file.exists() and path.samefile(file) for file in inputs):
        raise InputError(f"{name}: is a file that this command reads; choose another name")
    if path.exists() and not replace:
        raise InputError(f"{name}: is there already; choose another name{permission and f', or {permission}'}")
    if endings and path.suffix not in endings:
        raise InputError(f"{name}: frames go into an extxyz file, {' or '.join(endings)}")
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise InputError(f"{name}: nothing can be written to that folder ({error.strerror})") from error


def _chunks(path: Path) -> Iterator[Chunk]:
    with open_frames(path) as file:
        yield from chunks(file, path)
