"""Frames of an extxyz file one after another, as text with their place in the file.

``ase.io.iread`` looks through the whole file before its first frame and cannot begin in the middle; what is here never
holds more than one frame and knows where the next one begins. ASE still makes the atoms of a frame's text.
"""

import io
import lzma
import zlib
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Iterator, List, NamedTuple

from ase.io.formats import open_with_compression

from e2ip_plugins.errors import InputError

#: Frames between two places that `Index` remembers.
_STRIDE = 1024


class Chunk(NamedTuple):
    """The text of one frame.

    Attributes
    ----------
    number : int
        Of the frame in the file, from 0.
    start : int
        Byte at which it begins, in the uncompressed file.
    text : bytes
    complete : bool
        Whether all of its lines are there; False for the end of a half-written file.
    """

    number: int
    start: int
    text: bytes
    complete: bool

    @property
    def end(self) -> int:
        """Byte after its last one."""
        return self.start + len(self.text)


class Index(NamedTuple):
    """How many frames a file has, and where every 1024th of them begins."""

    frames: int
    places: List[int]


def open_frames(path: Path) -> BinaryIO:
    """An extxyz file, compressed with gzip, bzip2 or xz or not."""
    if not path.is_file():
        raise InputError(f"{path}: {'is a folder' if path.is_dir() else 'no such file'}")
    try:
        return open_with_compression(str(path), "rb")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error


def chunks(file: BinaryIO, path: Path, number: int = 0, start: int = 0) -> Iterator[Chunk]:
    """Frames from frame ``number`` on, which begins at byte ``start``.

    Raises
    ------
    InputError
        Where a frame should begin and does not: nobody can tell where the next one would.
    """
    try:
        file.seek(start)
        while header := file.readline():
            atoms = _atoms(header)
            if atoms is None and not header.strip() and not any(line.strip() for line in file):
                return  # empty lines at the end
            if atoms is None:
                raise InputError(
                    f"{path}, frame {number}: a line with the number of atoms should be here, found "
                    f"'{shown(header)}': the file is no extxyz (ase convert makes one of what ASE reads), or the frame "
                    "before has another number of atoms than it says"
                )
            lines = [header, *islice(file, atoms + 1)]
            # A last line without its end may have lost digits.
            complete = len(lines) == atoms + 2 and lines[-1].endswith(b"\n")
            chunk = Chunk(number, start, b"".join(lines), complete)
            yield chunk
            number, start = number + 1, chunk.end
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise InputError(f"{path}, frame {number}: cannot be read ({error})") from error


def index_frames(path: Path) -> Index:
    """Look through a file once."""
    count, places = 0, []
    with open_frames(path) as file:
        for chunk in chunks(file, path):
            if count % _STRIDE == 0:
                places.append(chunk.start)
            count += 1
    return Index(count, places)


def start_of(path: Path, index: Index, number: int) -> int:
    """Byte at which a frame begins, or at which the file ends."""
    if not index.frames:
        return 0
    nearest = min(number // _STRIDE, len(index.places) - 1)
    with open_frames(path) as file:
        end = 0
        for chunk in chunks(file, path, nearest * _STRIDE, index.places[nearest]):
            if chunk.number == number:
                return chunk.start
            end = chunk.end
    return end


def to_atoms(chunk: Chunk, path: Path) -> Any:
    """The ASE frame of a chunk, what ``ase.io.read`` makes of it; `InputError` where it cannot."""
    check_whole(chunk, path)
    try:
        return parsed(chunk.text)
    # ASE's reader lets whatever goes wrong inside it through.
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"{path}, frame {chunk.number}: ASE cannot read it ({reason})") from error


def check_whole(chunk: Chunk, path: Path) -> None:
    """`InputError` for a frame of which the file has not all."""
    if not chunk.complete:
        raise InputError(
            f"{path}, frame {chunk.number}: is cut off, the file ends in the middle of it (if the frame is whole, end "
            "its last line)"
        )


def parsed(text: bytes) -> Any:
    """The ASE frame of a frame's text; whatever ASE raises where it cannot read it."""
    import ase
    import ase.io

    if int(text.split(b"\n", 1)[0]) == 0:  # which not every ASE takes
        return ase.Atoms()
    return ase.io.read(io.StringIO(text.decode(errors="replace")), index=0, format="extxyz")


def shown(line: bytes) -> str:
    """The beginning of a line that may be of a file of another kind, without what a terminal would obey."""
    text = line[:40].decode(errors="replace").strip()
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _atoms(header: bytes) -> Any:
    try:
        atoms = int(header)
    except ValueError:
        return None
    return atoms if atoms >= 0 else None
