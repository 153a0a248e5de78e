"""Safe writing: a file is complete or unchanged, and errors of the operating system name it."""

import io
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, Union

import torch


@contextmanager
def naming(path: Union[str, Path]) -> Iterator[None]:
    """Add the file's name to an ``OSError`` that has none, as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def replacing(path: Union[str, Path]) -> Iterator[Path]:
    """Yield a file to write that replaces ``path`` at the end, unless there is an error.

    It has the same name and lies in a temporary folder beside ``path``: formats depend on the suffix, and some files,
    such as packages, contain their name. The permissions of an existing file stay.

    Raises
    ------
    OSError
        The folder of ``path`` is missing or may not be written to.
    """
    target = Path(os.path.realpath(path))
    with naming(path), tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as place:
        unfinished = Path(place, target.name)
        yield unfinished
        if target.exists():
            unfinished.chmod(target.stat().st_mode)
        unfinished.replace(target)


def save(content: Any, path: Union[str, Path]) -> None:
    """Save with ``torch.save`` to a file that is complete or unchanged."""
    # torch would hide a full disk behind another error, so it writes to memory.
    buffer = io.BytesIO()
    torch.save(content, buffer)
    with replacing(path) as unfinished:
        unfinished.write_bytes(buffer.getbuffer())


def append(path: Union[str, Path], text: str) -> None:
    """Add a text to a file; where there is an error, the file stays as it was."""
    path = Path(path)
    before = path.stat().st_size if path.exists() else None
    with naming(path):
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(text)
        except BaseException:
            if before is not None:
                os.truncate(path, before)
            else:
                path.unlink(missing_ok=True)
            raise
