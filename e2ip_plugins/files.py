"""Files that are whole or not there."""

import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, Union

import torch


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
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as place:
        unfinished = Path(place, target.name)
        yield unfinished
        if target.exists():
            unfinished.chmod(target.stat().st_mode)
        unfinished.replace(target)


def save(thing: Any, path: Union[str, Path]) -> None:
    """``torch.save`` to a file that is whole or not there."""
    with replacing(path) as unfinished:
        torch.save(thing, unfinished)
