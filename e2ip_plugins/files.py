"""Files that are whole or not there, and errors of the machine that name them."""

import io
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, Union

import torch


@contextmanager
def naming(path: Union[str, Path]) -> Iterator[None]:
    """Let an ``OSError`` of a write, which knows no file, name this one: a full disk, for example."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def replacing(path: Union[str, Path]) -> Iterator[Path]:
    """A file to write that takes the place of ``path`` at the end, unless there is an error.

    It has the same name and lies in a folder of its own beside ``path``: formats go by the suffix, and some, such as
    packages, have the name inside. An existing file's permissions stay.

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


def save(thing: Any, path: Union[str, Path]) -> None:
    """``torch.save`` to a file that is whole or not there."""
    # By way of memory: torch hides a full disk behind an error of its own.
    content = io.BytesIO()
    torch.save(thing, content)
    with replacing(path) as unfinished:
        unfinished.write_bytes(content.getbuffer())


def append(path: Union[str, Path], text: str) -> None:
    """Add to a file, all of the text or, where there is an error, nothing."""
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
