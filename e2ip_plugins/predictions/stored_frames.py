"""Frames of files of any length, read anew whenever they are asked for: in memory there are their places alone."""

import hashlib
from abc import ABC, abstractmethod
from array import array
from pathlib import Path
from typing import BinaryIO, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple, Union, overload

import numpy as np
from ase.data import chemical_symbols

from e2ip_plugins.predictions.checks import check_atoms
from e2ip_plugins.predictions.chunks import Chunk, chunks, open_frames, split_slice, starts_of, to_atoms
from e2ip_plugins.predictions.labelled import LabelledFrame, is_isolated, labelled
from e2ip_plugins.predictions.labelled_files import FileCheck
from e2ip_plugins.predictions.trajectories import TEXT, read_all


class FrameSource(ABC):
    """Frames of one file, or of several that belong together."""

    @abstractmethod
    def walk(self) -> Iterator[Optional[LabelledFrame]]:
        """Yield all frames, in order; None for one that is an isolated atom."""

    @abstractmethod
    def read(self, number: int) -> LabelledFrame:
        """Return a frame by its number, after `walk` has come past it."""


class TextFile(FrameSource):
    """Frames of an extxyz file, which may be compressed, or of a slice of it (``file@slice``).

    Parameters
    ----------
    path : Path
    keys : (str or None, str or None)
        Names of reference forces and energy.
    """

    def __init__(self, path: Path, keys: Tuple[Optional[str], Optional[str]]) -> None:
        self.name, (self.path, self.slice), self.keys = path, split_slice(path), keys
        open_frames(self.path).close()
        self.places: Sequence[int] = ()
        self.chosen: Sequence[int] = range(0)
        self._file: Optional[BinaryIO] = None

    def walk(self) -> Iterator[Optional[LabelledFrame]]:
        """Yield all frames."""
        # A slice may count from the end of the file.
        if self.slice != ":":
            self.places = starts_of(self.path)
            bounds = [int(text) if text else None for text in self.slice.split(":")]
            if len(bounds) == 1 and bounds[0] is not None:
                # One frame; -1 is the last one.
                bounds = [bounds[0], bounds[0] + 1 or None]
            self.chosen = range(len(self.places) - 1)[slice(*bounds)]
            for number, chosen in enumerate(self.chosen):
                yield self._frame(self._chunk(chosen), number)
            return
        places = array("q")
        with open_frames(self.path) as file:
            for chunk in chunks(file, self.path):
                places.append(chunk.start)
                yield self._frame(chunk, chunk.number)
        self.places, self.chosen = places, range(len(places))

    def read(self, number: int) -> LabelledFrame:
        """Return a frame by its number in the slice."""
        frame = self._frame(self._chunk(self.chosen[number]), number)
        assert frame is not None
        return frame

    def _frame(self, chunk: Chunk, number: int) -> Optional[LabelledFrame]:
        atoms = to_atoms(chunk, self.path)
        return None if is_isolated(atoms) else labelled(atoms, f"{self.name}, frame {number}", *self.keys)

    def _chunk(self, number: int) -> Chunk:
        if self._file is None:
            self._file = open_frames(self.path)
        return next(chunks(self._file, self.path, number, self.places[number]))


class InMemory(FrameSource):
    """Frames of a file in another format of ASE's, all of them in memory."""

    def __init__(self, path: Path, keys: Tuple[Optional[str], Optional[str]]) -> None:
        frames = enumerate(read_all(path))
        self.frames = [
            None if is_isolated(atoms) else labelled(atoms, f"{path}, frame {i}", *keys) for i, atoms in frames
        ]

    def walk(self) -> Iterator[Optional[LabelledFrame]]:
        """Yield all frames."""
        return iter(self.frames)

    def read(self, number: int) -> LabelledFrame:
        """Return a frame by its number."""
        frame = self.frames[number]
        assert frame is not None
        return frame


#: Makes the frames of a file that a framework alone reads, by its path and the names of forces and energy; None for
#: other files.
OpenSource = Callable[[Path, Tuple[Optional[str], Optional[str]]], Optional[FrameSource]]


class StoredFrames(Sequence[LabelledFrame]):
    """Frames of some files, except isolated atoms and frames that count nowhere, see `read_frames`.

    The files are read once to check all frames; 27 bytes a frame are kept.

    Parameters
    ----------
    paths, forces_key, need_forces, on_note, energy_key
        See `e2ip_plugins.predictions.labelled_files.read_frames`.
    open_source : callable, optional
        Opens files that a framework alone reads.

    Attributes
    ----------
    species : dict of str
        Place of the first frame with an element, by atomic number.
    digest : str
        Of structures and references of all frames.
    names : list of str
        Names that the references have in the files.

    Raises
    ------
    InputError
        See there.
    """

    def __init__(
        self,
        paths: Iterable[Union[str, Path]],
        forces_key: Optional[str] = None,
        need_forces: bool = True,
        on_note: Callable[[str], None] = lambda text: None,
        energy_key: Optional[str] = None,
        open_source: OpenSource = lambda path, keys: None,
    ) -> None:
        self.sources: List[FrameSource] = []
        self.species: Dict[int, str] = {}
        columns: List[np.ndarray] = []
        names: Dict[str, None] = {}
        digest, keys = hashlib.sha256(), (forces_key, energy_key)
        for path in map(Path, paths):
            source = open_source(path, keys) or (TextFile if _is_text(path) else InMemory)(path, keys)
            check = FileCheck(path, keys, need_forces)
            columns.append(np.fromiter(self._columns(source, check, digest), dtype=_COLUMNS))
            check.finish(on_note)
            names.update(check.names)
            self.sources.append(source)
        self.names = list(names)
        self._table = np.concatenate(columns)
        self.digest = digest.hexdigest()[:16]

    def _columns(self, source: FrameSource, check: FileCheck, digest: "hashlib._Hash") -> Iterator[Tuple]:
        for number, frame in enumerate(source.walk()):
            if frame is None or not check.counts(frame):
                continue
            forces = frame.counted_forces
            for values in (frame.atoms.numbers, frame.atoms.positions, frame.atoms.cell.array, frame.atoms.pbc):
                digest.update(np.ascontiguousarray(values).tobytes())
            digest.update(forces.tobytes() + frame.counted_energy.tobytes() + frame.counted_stress.tobytes())
            for element in np.unique(frame.atoms.numbers).tolist():
                self.species.setdefault(element, frame.where)
            missing = int(np.isnan(forces).any(-1).sum())
            weighted = frame.forces is None or frame.forces.counts
            mark = int.from_bytes(hashlib.blake2b(repr(frame.mark).encode(), digest_size=8).digest(), "little")
            yield len(self.sources), number, mark, missing if weighted else 0, missing < len(forces)

    def __len__(self) -> int:
        return len(self._table)

    @overload
    def __getitem__(self, index: int) -> LabelledFrame: ...

    @overload
    def __getitem__(self, index: slice) -> "StoredFrames": ...

    def __getitem__(self, index: Union[int, slice]) -> Union[LabelledFrame, "StoredFrames"]:
        if isinstance(index, slice):
            return self._take(np.arange(len(self))[index])
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        row = self._table[index]
        return self.sources[int(row["source"])].read(int(row["number"]))

    @property
    def lacking(self) -> int:
        """Number of atoms without a finite reference force, except in frames whose forces do not count."""
        return int(self._table["lacking"].sum())

    def once(self) -> "StoredFrames":
        """Return the frames without further copies, see `e2ip_plugins.predictions.labelled.once`."""
        _, first, index = np.unique(self._table["mark"], return_index=True, return_inverse=True)
        with_forces = np.full(len(first), len(self))
        np.minimum.at(with_forces, index, np.where(self._table["forces"], np.arange(len(self)), len(self)))
        chosen = np.where(with_forces < len(self), with_forces, first)
        return self._take(chosen[np.argsort(first)])

    def shared(self, others: "StoredFrames") -> int:
        """Return how many frames of ``others`` are also here."""
        return int(np.isin(others._table["mark"], self._table["mark"]).sum())

    def _take(self, chosen: np.ndarray) -> "StoredFrames":
        other = object.__new__(StoredFrames)
        other.__dict__.update(self.__dict__, _table=self._table[chosen])
        return other


_COLUMNS = np.dtype([("source", "u2"), ("number", "i4"), ("mark", "u8"), ("lacking", "i4"), ("forces", "?")])


def _is_text(path: Path) -> bool:
    name = split_slice(path)[0].name
    for ending in (".gz", ".bz2", ".xz"):
        name = name.removesuffix(ending)
    return name.endswith(TEXT)


def check_species(frames: Sequence[LabelledFrame], known: Sequence[str]) -> None:
    """Raise `InputError` for the first frame with species that a model does not know, or with a position that is NaN.

    ``known`` are the chemical symbols of the model's species.
    """
    if not isinstance(frames, StoredFrames):
        for frame in frames:
            check_atoms(frame.atoms.numbers, frame.atoms.positions, frame.where, known)
        return
    unknown = [(where, element) for element, where in frames.species.items() if chemical_symbols[element] not in known]
    first = np.array([element for where, element in unknown if where == unknown[0][0]], dtype=int)
    if unknown:
        check_atoms(first, np.zeros((len(first), 3)), unknown[0][0], known)
