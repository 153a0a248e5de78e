"""``e2ip evaluate``: predictions for the frames of a file that may be larger than memory.

Frames are read one by one, gathered into batches and written as each batch is done. A batch never depends on where an
earlier run was stopped, so that a file which was made in several goes is the same, to the byte, as one made in one.
"""

import dataclasses
import hashlib
import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Protocol, Sequence, Tuple, Type

import ase.io
import numpy as np
import torch
from ase import Atoms
from torch import Tensor

from e2ip_plugins.errors import InputError
from e2ip_plugins.evaluation.unfinished import Unfinished
from e2ip_plugins.families.interface import Family
from e2ip_plugins.files import replacing
from e2ip_plugins.keys import CALIBRATION_KEY, FAMILY_KEY, LEVERAGE, MODEL_KEY
from e2ip_plugins.predictions.checks import check_structure
from e2ip_plugins.predictions.chunks import Chunk, Index, chunks, index_frames, open_frames, start_of, to_atoms
from e2ip_plugins.predictions.columns import keep_references, put_uncertainties, uncertainties
from e2ip_plugins.predictions.trajectories import TEXT
from e2ip_plugins.scores.calibration import Calibration

#: Info of every frame that is written: its number in the file that was read, from 0.
FRAME_KEY = "input_frame"


class Model(Protocol):
    """What a host's adapter opens, entry points ``e2ip_plugins.evaluate``: a model that takes batches.

    Attributes
    ----------
    family : subclass of Family, or None
        None for a model without a readout.
    uq_model : str or None
        Name of the readout, where it is known.
    species : sequence of str
        That it knows.
    reads : sequence of str
        What it reads of a frame beside the structure: keys of the info and per-atom columns.
    dtype : str
        Name of its precision.
    warning : str
        What the user should know, or nothing.
    """

    family: Optional[Type[Family]]
    uq_model: Optional[str]
    species: Sequence[str]
    reads: Sequence[str]
    dtype: str
    warning: str

    def graph(self, atoms: Atoms) -> Tuple[Any, int]:
        """A frame with its neighbours, and their number."""

    def evaluate(self, graphs: Sequence[Any], stress: bool) -> Dict[str, Tensor]:
        """Results of F frames with N atoms, as one batch, in eV and Å.

        ``energy`` (F,), ``forces`` (N, 3), with ``stress`` also that (F, 3, 3); every output key of the family and the
        leverage where there is one, (N, …).
        """


@dataclass(frozen=True)
class Options:
    """What decides the result.

    Attributes
    ----------
    batch_atoms, batch_edges : int or None
        Bounds of a batch; a frame that is larger is a batch of its own.
    calibration : Calibration, optional
    stress : bool
        Of fully periodic frames.
    covariances : bool
        Whether columns of 3×3 tensors are written.
    part : (int, int)
        i of n: the i-th of n equal pieces of the file, from 1.
    skip_bad : bool
        Leave bad frames out instead of ending at the first.
    overwrite : bool
        Replace an output that is there already.
    """

    batch_atoms: Optional[int] = 512
    batch_edges: Optional[int] = None
    calibration: Optional[Calibration] = None
    stress: bool = False
    covariances: bool = True
    part: Tuple[int, int] = (1, 1)
    skip_bad: bool = False
    overwrite: bool = False


@dataclass(frozen=True)
class State:
    """How far an evaluation has come.

    Attributes
    ----------
    frame : int
        Next frame of the input.
    bytes : int
        Of the input's text that is done with, from the first frame of this part on.
    sha256 : str
        Of that text.
    written : int
        Frames in the output.
    skipped : list of (int, str)
        Frames that were left out, and why.
    without_stress : int
        Frames in the output that have none, though it was asked for.
    """

    frame: int
    bytes: int = 0
    sha256: str = hashlib.sha256().hexdigest()
    written: int = 0
    skipped: Tuple[Tuple[int, str], ...] = ()
    without_stress: int = 0

    @classmethod
    def read(cls, content: Dict[str, Any]) -> "State":
        """What ``dataclasses.asdict`` made of one, after a passage through JSON."""
        return cls(**{**content, "skipped": tuple((int(number), str(why)) for number, why in content["skipped"])})


class _Ready(NamedTuple):
    """A frame that waits for its batch."""

    number: int
    where: str
    atoms: Atoms
    graph: Any


Told = Callable[[State], None]


def evaluate(
    model: Model,
    source: Path,
    output: Path,
    options: Options,
    settings: Dict[str, str],
    told: Told = lambda state: None,
    name: str = "the model",
) -> State:
    """Write the frames of ``source`` with a model's predictions to ``output``, which appears when it is complete.

    What an earlier call with the same settings left unfinished is gone on with.

    Parameters
    ----------
    model : Model
    source, output : Path
        extxyz files; ``source`` may be compressed.
    options : Options
    settings : dict
        What else must be the same to go on: text by name.
    told : callable
        Takes the state after every batch.
    name : str
        Of the model, for messages.

    Raises
    ------
    InputError
        Models without readout, files and frames that cannot be used, an output that is there or cannot be written.
        What was finished until then is kept.
    """
    check_files(source, output, options.overwrite)
    _check_model(model, options, name)
    index = index_frames(source) if options.part != (1, 1) else None
    first, last, begin = _piece(source, options.part, index)
    with Unfinished(output, {**settings, **_settings(options, index)}) as file:
        state, digest = State(first), hashlib.sha256()
        if file.state is not None:
            state = State.read(file.state)
            digest = _checked_digest(source, begin, state, file.part)
        for text, reached in _pieces(model, source, (last, begin), options, state, digest):
            state = reached
            file.write(text, dataclasses.asdict(state))
            told(state)
        if not state.frame and not state.skipped and options.part == (1, 1):
            raise InputError(f"{source}: has no frames")
        _list_skipped(output, state)
        file.finish()
    return state


def skipped_file(output: Path) -> Path:
    """Where the frames are listed that were left out of an output."""
    return output.with_name(f"{output.name}.skipped")


def part_of(text: str) -> Tuple[int, int]:
    """(i, n) of ``i/n``; `InputError` for anything else."""
    try:
        i, n = (int(number) for number in text.split("/"))
        if not 1 <= i <= n:
            raise ValueError
    except ValueError as error:
        raise InputError(f"--part {text}: give I/N, for example 3/8 for the third of eight parts") from error
    return i, n


def digest_of(path: Path) -> str:
    """Name and SHA-256 of a file's content."""
    try:
        with open(path, "rb") as file:
            found = hashlib.sha256()
            while piece := file.read(1 << 20):
                found.update(piece)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    return f"{path.name} (sha256 {found.hexdigest()})"


def check_files(source: Path, output: Path, overwrite: bool = False) -> None:
    """`InputError` for an input that cannot be read and an output that cannot be written."""
    open_frames(source).close()
    if output.exists() and (output.is_dir() or output.samefile(source) or not overwrite):
        reason = "is the input" if output.samefile(source) else "is there already; choose another name, or --overwrite"
        raise InputError(f"{output}: {'is a folder' if output.is_dir() else reason}")
    if not output.parent.is_dir():
        raise InputError(f"{output}: there is no folder {output.parent}")
    if output.suffix not in TEXT:
        raise InputError(f"{output}: is going to be an extxyz file, not compressed: {' or '.join(TEXT)}")


def _check_model(model: Model, options: Options, name: str) -> None:
    if model.family is None:
        raise InputError(
            f"{name}: has no readout, hence no uncertainties: e2ip fit gives a trained model one, and the host's own "
            "tools evaluate it without"
        )
    if options.calibration is not None:
        options.calibration.check(model.family, (), name, model.uq_model)


def _settings(options: Options, index: Optional[Index]) -> Dict[str, str]:
    calibration = options.calibration
    return {
        "--calibration": "none" if calibration is None else digest_of(Path(calibration.path)),
        "--stress": "given" if options.stress else "not given",
        "--no-covariances": "not given" if options.covariances else "given",
        "--part": "{}/{}".format(*options.part),
        # Parts of a file with other frames would not fit to each other.
        "an input of frames": "any number" if index is None else str(index.frames),
    }


def _piece(source: Path, part: Tuple[int, int], index: Optional[Index]) -> Tuple[int, float, int]:
    """First frame of a part, the frame after its last one, and the byte at which it begins."""
    if index is None:
        return 0, math.inf, 0
    i, n = part
    first, last = index.frames * (i - 1) // n, index.frames * i // n
    return first, last, start_of(source, index, first)


def _checked_digest(source: Path, begin: int, state: State, part: Path) -> Any:
    """Hash of the input that is done with; `InputError` if it is not what it was."""
    digest, left = hashlib.sha256(), state.bytes
    with open_frames(source) as file:
        file.seek(begin)
        while left and (piece := file.read(min(left, 1 << 20))):
            digest.update(piece)
            left -= len(piece)
    if left or digest.hexdigest() != state.sha256:
        raise InputError(
            f"{source}: differs, before frame {state.frame}, from the input that {part} was begun with: choose another "
            "name for the output, or delete that file and its .json to start anew"
        )
    return digest


def _pieces(
    model: Model, source: Path, piece: Tuple[float, int], options: Options, state: State, digest: Any
) -> Iterator[Tuple[bytes, State]]:
    """The text of every batch, and how far the work has come with it."""
    last, begin = piece
    ready: List[_Ready] = []
    atoms = edges = 0
    written, skipped, without_stress = state.written, list(state.skipped), state.without_stress

    def done(frame: int, end: int) -> Tuple[bytes, State]:
        nonlocal written, without_stress
        text, count, lacking = _written(model, ready, options, skipped)
        written, without_stress = written + count, without_stress + lacking
        return text, State(frame, end - begin, digest.hexdigest(), written, tuple(sorted(skipped)), without_stress)

    end = begin + state.bytes
    number = state.frame
    with open_frames(source) as file:
        for chunk in chunks(file, source, number, end):
            if chunk.number >= last:
                break
            try:
                one, more = _prepared(model, chunk, source, options.calibration)
            except InputError as error:
                if not options.skip_bad:
                    raise
                skipped.append((chunk.number, str(error)))
            else:
                sizes = ((atoms + len(one.atoms), options.batch_atoms), (edges + more, options.batch_edges))
                if ready and any(bound is not None and size > bound for size, bound in sizes):
                    yield done(chunk.number, chunk.start)
                    ready, atoms, edges = [], 0, 0
                ready.append(one)
                atoms, edges = atoms + len(one.atoms), edges + more
            digest.update(chunk.text)
            number, end = chunk.number + 1, chunk.end
    if number > state.frame:
        yield done(number, end)


def _prepared(model: Model, chunk: Chunk, source: Path, calibration: Optional[Calibration]) -> Tuple[_Ready, int]:
    """A frame with its neighbours, and their number; `InputError` for one that no model could take."""
    where = f"{source}, frame {chunk.number}"
    atoms = to_atoms(chunk, source)
    check_structure(atoms, where, model.species)
    if calibration is not None:
        calibration.check_species(set(atoms.symbols), where)
    # Nothing else of it may reach a host.
    seen = Atoms(atoms.numbers, atoms.positions, cell=atoms.cell, pbc=atoms.pbc)
    for key in model.reads:
        if key in atoms.info:
            seen.info[key] = atoms.info[key]
        elif key in atoms.arrays:
            seen.set_array(key, atoms.arrays[key])
    try:
        graph, edges = model.graph(seen)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    return _Ready(chunk.number, where, atoms, graph), edges


def _written(
    model: Model, batch: Sequence[_Ready], options: Options, skipped: List[Tuple[int, str]]
) -> Tuple[bytes, int, int]:
    """The text of a batch with its predictions, frames in it, and how many of them lack a stress that was asked for."""
    if not batch:
        return b"", 0, 0
    try:
        outputs = model.evaluate([one.graph for one in batch], options.stress)
    except torch.OutOfMemoryError as error:
        raise InputError(
            f"{batch[0].where}: the batch of {len(batch)} frames that begins here is too much for the memory of the "
            "device; what is finished is kept: run the command again with a smaller --batch-atoms"
        ) from error
    assert model.family is not None
    names = ("energy", "forces", *(key.name for key in model.family.parameter_keys))
    if len(batch) > 1 and not all(torch.isfinite(outputs[name]).all() for name in names):
        # With stresses, MACE's forces on all frames of a batch are NaN where those on one of them are: each by itself.
        pieces = [_written(model, [one], options, skipped) for one in batch]
        texts, counts, lacking = zip(*pieces, strict=True)
        return b"".join(texts), sum(counts), sum(lacking)
    columns = _columns(model, outputs, [one.atoms for one in batch], options)
    frames, start, known = [], 0, uncertainties()
    for i, one in enumerate(batch):
        atoms, count = one.atoms, len(one.atoms)
        results: Dict[str, Any] = {name: values[start : start + count] for name, values in columns.items()}
        results["energy"] = outputs["energy"][i].item()
        if "stress" in outputs and atoms.pbc.all():
            results["stress"] = outputs["stress"][i].cpu().numpy()
        start += count
        results[FAMILY_KEY] = model.family.uq_family
        if model.uq_model is not None:
            results[MODEL_KEY] = model.uq_model
        if options.calibration is not None:
            results[CALIBRATION_KEY] = Path(options.calibration.path).name
        if not all(np.isfinite(results[name]).all() for name in names):
            problem = f"{one.where}: the model's prediction is not finite (do two atoms lie on each other? "
            problem += "Did its training diverge?)"
            if not options.skip_bad:
                raise InputError(problem)
            skipped.append((one.number, problem))
            continue
        keep_references(atoms)
        put_uncertainties(atoms, results, known)
        # As ASE writes a calculator's, of which it would make two more copies.
        atoms.info[FRAME_KEY] = one.number
        atoms.info.update({name: results[name] for name in ("energy", "stress") if name in results})
        atoms.arrays["forces"] = results["forces"]
        frames.append(atoms)
    text = io.StringIO()
    ase.io.write(text, frames, format="extxyz", write_results=False)
    return text.getvalue().encode(), len(frames), sum(options.stress and "stress" not in a.info for a in frames)


def _columns(model: Model, outputs: Dict[str, Tensor], frames: Sequence[Atoms], options: Options) -> Dict[str, Any]:
    """Everything per atom, as arrays."""
    family = model.family
    assert family is not None
    found = {key.name: outputs[key.name] for key in family.output_keys()}
    if options.calibration is not None:
        parameters = {key.name: found[key.name].cpu().double() for key in family.parameter_keys}
        species = [symbol for atoms in frames for symbol in atoms.symbols]
        found = options.calibration.in_units(family, parameters, 1.0, species)
    if not options.covariances:
        found = {key.name: found[key.name] for key in family.output_keys() if key.shape != (3, 3)}
    if LEVERAGE.name in outputs:
        found[LEVERAGE.name] = outputs[LEVERAGE.name]
    return {name: value.cpu().numpy() for name, value in {"forces": outputs["forces"], **found}.items()}


def _list_skipped(output: Path, state: State) -> None:
    path = skipped_file(output)
    if not state.skipped:
        path.unlink(missing_ok=True)
        return
    text = "".join(f"{number}\t{why}\n" for number, why in state.skipped)
    try:
        with replacing(path) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); run the same command again") from error
