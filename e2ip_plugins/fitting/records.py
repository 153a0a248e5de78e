"""What a fit has made of every batch, in a file: a killed fit goes on, and several processes share the training set.

A record has the arrays that the sums of the fit are made of. They are added again in the same order when the fit goes
on, so that it ends with the same bits as without the stop.
"""

import io
import json
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple, TypeVar

import numpy as np

from e2ip_plugins import __version__
from e2ip_plugins.errors import InputError, ResumableError
from e2ip_plugins.fitting.batches import Pass
from e2ip_plugins.fitting.training_atoms import Record
from e2ip_plugins.formats import FIT_PARTS, FormatError
from e2ip_plugins.unfinished import Unfinished

#: Name of the pass that parts share.
TRAINING = "training set"

#: Name of the pass over training configurations whose errors are compared with those of the validation set.
TRAINING_ERRORS = "errors of the training set"

_FORMAT = "e2ip fit"

#: Settings in which parts differ.
_PIECES = ("--part", "--merge")

Item = TypeVar("Item")


class Work(NamedTuple):
    """Which part of a fit a process does.

    Attributes
    ----------
    output : Path
        The model that is made in the end; files of records lie beside it.
    settings : dict
        Everything that decides the result: text by option.
    part : (int, int), optional
        i of n: run the model over the i-th of n pieces of the training set, and no more.
    merge : int, optional
        Number of parts that are finished, in place of a pass over the training set.
    """

    output: Path
    settings: Dict[str, str]
    part: Optional[Tuple[int, int]] = None
    merge: Optional[int] = None


def part_file(output: Path, i: int, n: int) -> Path:
    """Return the file of a finished part of a fit."""
    return output.with_name(f"{output.name}.{i}-of-{n}")


class Records:
    """Records of a fit; a context manager.

    Parameters
    ----------
    work : Work

    Raises
    ------
    InputError
        Parts that are missing or of other data, and what `Unfinished` refuses.
    """

    def __init__(self, work: Work) -> None:
        self.work, self.done = work, {}  # type: Work, Dict[str, int]
        pieces = "{}/{}".format(*work.part or (1, 1)), str(work.merge or "none")
        options = dict(zip(_PIECES, pieces, strict=True))
        self.settings = {**work.settings, **options}
        self.parts = [part_file(work.output, i + 1, work.merge) for i in range(work.merge)] if work.merge else []
        for path in self.parts:
            self._check_part(path)
        target = part_file(work.output, *work.part) if work.part else work.output.with_name(f"{work.output.name}.fit")
        self._file = Unfinished(target, self.settings, "e2ip fit")
        self._replay: Optional[BinaryIO] = None
        self._end = 0

    @property
    def is_part(self) -> bool:
        """Whether only a part of the training set is wanted."""
        return self.work.part is not None

    def __enter__(self) -> "Records":
        self._file.__enter__()
        if self._file.state is None:
            header = {"format": _FORMAT, "version": FIT_PARTS.number, "e2ip_version": __version__}
            self._file.write(_written({**header, "settings": self.settings}, {}), {"done": {}})
        else:
            self.done = dict(self._file.state["done"])
        self._replay = self._file.part.open("rb")
        self._end = self._file.part.stat().st_size
        self._replay.readline()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        assert self._replay is not None
        self._replay.close()
        if isinstance(error, InputError) and not isinstance(error, ResumableError):
            # The same command would end in the same way.
            self._file.discard()
        self._file.__exit__(kind, error, trace)

    def finish(self) -> None:
        """Give the file of a part its name; delete that of a fit whose model is written, and the parts of it."""
        if self.is_part:
            self._file.finish()
            return
        self._file.discard()
        for path in self.parts:
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def of(self, name: str, batches: Iterable[Item], make: Callable[[Item], Record]) -> Iterator[Record]:
        """Yield what ``make`` makes of the batches of a pass, or has made of them before a stop or in other parts."""
        if name == TRAINING and self.parts:
            for path in self.parts:
                with path.open("rb") as file:
                    file.readline()
                    yield from _records(file, path.stat().st_size, name)
            return
        assert isinstance(batches, Pass) and self._replay is not None
        yield from _records(self._replay, self._end, name)
        done = self.done.get(name, 0)
        if done:
            # TorchScript optimises after its first call, which differs from later ones in the last bit.
            next(iter(batches), None)
        for count, item in batches.after(done):
            record = make(item)
            self.done[name] = count
            self._file.write(_written({"pass": name}, record), {"done": dict(self.done)})
            yield record

    def _check_part(self, path: Path) -> None:
        i, n = self.parts.index(path) + 1, len(self.parts)
        if not path.is_file():
            raise InputError(f"{path}: is missing: run the same command with --part {i}/{n} in place of --merge {n}")
        try:
            with path.open("rb") as file:
                header = json.loads(file.readline())
            if header["format"] != _FORMAT:
                raise ValueError("of another kind")
            FIT_PARTS.check(header["version"], f"{path}:", header.get("e2ip_version"))
            theirs = {name: str(value) for name, value in header["settings"].items() if name not in _PIECES}
        except FormatError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path}: is no part of e2ip fit ({error}); delete it and make it anew") from error
        for name, value in theirs.items():
            if value != self.work.settings.get(name):
                raise InputError(
                    f"{path}: was made with {name} {value}, now it is {self.work.settings.get(name, 'none')}: all "
                    f"parts must be of the same model and data; make this one anew with --part {i}/{n}"
                )


@contextmanager
def records_of(work: Optional[Work]) -> Iterator[Optional[Records]]:
    """Yield the records of a fit, or None where none are wanted; finish them afterwards, unless there is an error."""
    if work is None:
        yield None
        return
    with Records(work) as records:
        yield records
        records.finish()


def recorded(
    records: Optional[Records], name: str, batches: Iterable[Item], make: Callable[[Item], Record]
) -> Iterator[Record]:
    """Yield what ``make`` makes of every batch, see `Records.of`; without records nothing is kept."""
    return map(make, batches) if records is None else records.of(name, batches, make)


def _written(header: Dict[str, Any], record: Record) -> bytes:
    """Return a record as bytes: a line of JSON, and the arrays one after another."""
    arrays = [(name, values.dtype.str, values.shape) for name, values in record.items()]
    text = io.BytesIO()
    text.write(json.dumps({**header, "arrays": arrays}).encode() + b"\n")
    for values in record.values():
        text.write(np.ascontiguousarray(values).tobytes())
    return text.getvalue()


def _records(file: BinaryIO, end: int, name: str) -> Iterator[Record]:
    """Yield the records of a pass from where a file is, up to the first one of another pass or byte ``end``."""
    while (begin := file.tell()) < end:
        header = json.loads(file.readline())
        if header["pass"] != name:
            file.seek(begin)
            return
        arrays: List[Tuple[str, str, List[int]]] = header["arrays"]
        record = {}
        for key, kind, shape in arrays:
            size = np.dtype(kind).itemsize * int(np.prod(shape))
            record[key] = np.frombuffer(bytearray(file.read(size)), dtype=kind).reshape(shape)
        yield record
