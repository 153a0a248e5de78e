"""Frames of an extxyz file one after another, as text with their place in the file.

``ase.io.iread`` looks through the whole file before its first frame and cannot begin in the middle. The functions here
hold one frame at a time and know where the next one begins. ASE still parses the text of a frame.
"""

import io
import lzma
import re
import zlib
from array import array
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Iterator, NamedTuple, Sequence, Tuple

import ase
import ase.io
from ase.io.formats import open_with_compression

from e2ip_plugins.errors import InputError


class Chunk(NamedTuple):
    """The text of one frame.

    Attributes
    ----------
    number : int
        Number of the frame in the file, from 0.
    start : int
        Byte at which it begins, in the uncompressed file.
    text : bytes
    complete : bool
        Whether all of its lines are in the file; False for the end of a half-written file.
    """

    number: int
    start: int
    text: bytes
    complete: bool

    @property
    def end(self) -> int:
        """Byte after its last one."""
        return self.start + len(self.text)


def check_is_file(path: Path) -> None:
    """Raise `InputError` for a path that is no file."""
    if split_slice(path)[0] != path:
        file, part = split_slice(path)
        way = f"write the part into a file first: ase convert -n {part} {file} PART.xyz"
        raise InputError(f"{path}: is a part of a file, and this command takes whole files; {way}")
    if not path.is_file():
        name, at, text = str(path).rpartition("@")
        way = f" (and '{text}' is no slice, such as :100 or ::10)" if at and Path(name).is_file() else ""
        raise InputError(f"{path}: {'is a folder' if path.is_dir() else f'no such file{way}'}")


def split_slice(path: Path) -> Tuple[Path, str]:
    """Return file and slice of a path in ASE's notation, ``file@slice``; the slice is ``:`` for a whole file.

    >>> split_slice(Path("train.xyz@:20"))
    (PosixPath('train.xyz'), ':20')
    """
    name, at, index = str(path).rpartition("@")
    if not at or path.exists() or not re.fullmatch(r"-?\d+|(-?\d*:){1,2}-?\d*", index):
        return path, ":"
    return Path(name), index


def open_frames(path: Path) -> BinaryIO:
    """Open an extxyz file, which may be compressed with gzip, bzip2 or xz."""
    check_is_file(path)
    try:
        return open_with_compression(str(path), "rb")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error


def chunks(file: BinaryIO, path: Path, number: int = 0, start: int = 0) -> Iterator[Chunk]:
    """Yield the frames from frame ``number`` on, which begins at byte ``start``.

    Raises
    ------
    InputError
        A line that should hold a number of atoms and does not: the next frame cannot be found without it.
    """
    try:
        file.seek(start)
        while header := file.readline():
            count = header.strip().decode(errors="replace")
            if not count and not any(line.strip() for line in file):
                return  # empty lines at the end
            if not count.isdecimal():
                raise InputError(
                    f"{path}, frame {number}: a line with the number of atoms should be here, found "
                    f"'{_printable(header)}': the file is no extxyz (ase convert makes one of what ASE reads), or the "
                    "frame before has another number of atoms than it says"
                )
            lines = [header, *islice(file, int(count) + 1)]
            # A last line without its end may have lost digits.
            complete = len(lines) == int(count) + 2 and lines[-1].endswith(b"\n")
            chunk = Chunk(number, start, b"".join(lines), complete)
            yield chunk
            number, start = number + 1, chunk.end
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise InputError(f"{path}, frame {number}: cannot be read ({error})") from error


def starts_of(path: Path) -> Sequence[int]:
    """Return the byte at which every frame of a file begins, and at last the one at which it ends."""
    starts = array("q", [0])
    with open_frames(path) as file:
        starts.extend(chunk.end for chunk in chunks(file, path))
    return starts


def to_atoms(chunk: Chunk, path: Path) -> ase.Atoms:
    """Return the ASE frame of a chunk, as ``ase.io.read`` does; `InputError` where ASE cannot read it."""
    check_whole(chunk, path)
    try:
        return parsed(chunk.text)
    # ASE's reader raises exceptions of all kinds.
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"{path}, frame {chunk.number}: ASE cannot read it ({reason})") from error


def check_whole(chunk: Chunk, path: Path) -> None:
    """Raise `InputError` for a frame whose end is missing in the file."""
    if not chunk.complete:
        raise InputError(
            f"{path}, frame {chunk.number}: is cut off, the file ends in the middle of it (if the frame is whole, end "
            "its last line)"
        )


def parsed(text: bytes) -> ase.Atoms:
    """Return the ASE frame of a frame's text; raise whatever ASE raises where it cannot read it."""
    if int(text.split(b"\n", 1)[0]) == 0:  # which not every ASE reads
        return ase.Atoms()
    return ase.io.read(io.StringIO(text.decode(errors="replace")), index=0, format="extxyz")


def _printable(line: bytes) -> str:
    """Return the beginning of a line, which may be of a binary file, without characters that control a terminal."""
    text = line[:40].decode(errors="replace").strip()
    return "".join(letter if letter.isprintable() else "?" for letter in text)
