"""Data that MACE alone reads, for ``e2ip fit``: HDF5 of `mace_prepare_data`, and LMDB."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from mace.data import HDF5Dataset
from mace.data.lmdb_dataset import LMDBDataset

from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.labelled import LabelledFrame, is_isolated, labelled
from e2ip_plugins.predictions.stored_frames import FrameSource
from mace_ext.training.labels import labelled_frame

_HDF5 = (".h5", ".hdf5")

#: What a model may embed beside the species.
_STATE = ("total_charge", "total_spin")

#: Stands where MACE makes graphs of configurations.
_AS_IT_IS = SimpleNamespace(from_config=lambda config, **_: config)


class _File(NamedTuple):
    """A file: its name, how many frames it has, and a function from a number and a place to a frame, or None for an
    isolated atom."""

    path: Path
    size: int
    frame: Callable[[int, str], Optional[LabelledFrame]]


class Source(FrameSource):
    """Frames of HDF5 or LMDB files, one after another."""

    def __init__(self, files: Sequence[_File]) -> None:
        self.files = files

    def walk(self) -> Iterator[Optional[LabelledFrame]]:
        """Yield all frames."""
        for file in self.files:
            for number in range(file.size):
                yield _frame(file, number)

    def read(self, number: int) -> LabelledFrame:
        """Return a frame by its number over all files."""
        for file in self.files:
            if number < file.size:
                frame = _frame(file, number)
                assert frame is not None
                return frame
            number -= file.size
        raise IndexError(number)


def open_source(path: Path, keys: Tuple[Optional[str], Optional[str]], split: str) -> Optional[FrameSource]:
    """Open an HDF5 or LMDB file, or a folder of HDF5 files; None for others. ``keys`` are those of forces and energy.

    Raises
    ------
    InputError
        Missing and damaged files.
    """
    if path.is_dir():
        paths = sorted(file for file in path.iterdir() if file.suffix in _HDF5)
        if paths:
            return Source([_hdf5(file) for file in paths])
        if not any(path.glob("*lmdb")):
            raise InputError(f"{path}: is a folder without HDF5 or LMDB files")
    elif not path.is_file():
        raise InputError(f"{path}: no such file")
    if path.suffix in _HDF5:
        return Source([_hdf5(path)])
    return Source([_lmdb(path, keys)]) if path.is_dir() or path.suffix.endswith(("lmdb", ".mdb")) else None


def _frame(file: _File, number: int) -> Optional[LabelledFrame]:
    where = f"{file.path}, frame {number}"
    try:
        return file.frame(number, where)
    except InputError:
        raise
    # Libraries raise whatever goes wrong in a file that was cut off.
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"{where}: cannot be read ({reason}); was the file cut off?") from error


def _opened(path: Path, kind: str, open_file: Callable[[], Any]) -> Any:
    try:
        return open_file()
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"{path}: cannot be opened as {kind} of MACE ({reason}); was it cut off?") from error


def _hdf5(path: Path) -> _File:
    stored = _opened(path, "HDF5", lambda: HDF5Dataset(str(path), r_max=0.0, z_table=None, atomic_dataclass=_AS_IT_IS))

    def frame(number: int, where: str) -> Optional[LabelledFrame]:
        config = stored[number]
        read = labelled_frame(config, where)
        if len(read.atoms) == 1 and config.config_type == "IsolatedAtom":
            return None
        state = {name: config.properties.get(name) for name in _STATE}
        read.atoms.info.update({name: float(value) for name, value in state.items() if value is not None})
        return read

    return _File(path, len(stored), frame)


def _lmdb(path: Path, keys: Tuple[Optional[str], Optional[str]]) -> _File:
    stored = _opened(path, "LMDB", lambda: LMDBDataset(str(path), r_max=0.0, z_table=None).AseDB)
    ids: List[int] = stored.ids

    def frame(number: int, where: str) -> Optional[LabelledFrame]:
        atoms = stored.get_atoms(ids[number])
        return None if is_isolated(atoms) else labelled(atoms, where, *keys)

    return _File(path, len(ids), frame)
