"""``e2ip evaluate``: predictions for the frames of a file that may be larger than memory.

Frames are read one by one, gathered into batches and written when each batch is done. No batch depends on where an
earlier run was stopped: an output that was made in several runs is equal, byte by byte, to one made in a single run.
"""

import dataclasses
import hashlib
import math
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from ase import Atoms

from e2ip_plugins.errors import InputError
from e2ip_plugins.evaluation.batches import PreparedFrame, predict, prepare
from e2ip_plugins.evaluation.options import FAR, BatchModel, EvaluateOptions, State
from e2ip_plugins.files import replacing
from e2ip_plugins.keys import LEVERAGE
from e2ip_plugins.predictions.chunks import chunks, open_frames, starts_of
from e2ip_plugins.predictions.trajectories import check_output
from e2ip_plugins.unfinished import START_ANEW, Unfinished


class _Batch(NamedTuple):
    """Frames of a batch, and those left out: number and reason. The input is done before frame ``number``, which
    begins at byte ``end``; its text up to there has the digest."""

    frames: List[PreparedFrame]
    skipped: List[Tuple[int, str]]
    number: int
    end: int
    sha256: str


def evaluate(
    model: BatchModel,
    source: Path,
    output: Path,
    options: EvaluateOptions,
    settings: Dict[str, str],
    on_progress: Callable[[State], None] = lambda state: None,
    name: str = "the model",
) -> State:
    """Write the frames of ``source`` with a model's predictions to ``output``, which appears when it is complete.

    An earlier call with the same settings that did not finish is continued.

    Parameters
    ----------
    model : BatchModel
    source, output : Path
        extxyz files; ``source`` may be compressed.
    options : EvaluateOptions
    settings : dict
        Further settings that must be the same to continue: text by name.
    on_progress : callable
        Function of the state, called after every batch.
    name : str
        Name of the model, for messages.

    Raises
    ------
    InputError
        Models without readout, files and frames that cannot be used, an output that exists or cannot be written.
        Finished batches are kept.
    """
    check_files(source, output, options.overwrite)
    _check_model(model, options, name)
    starts = starts_of(source) if options.part != (1, 1) else None
    # Parts of files with different numbers of frames would not fit together.
    frames = {"an input of frames": "any number" if starts is None else str(len(starts) - 1)}
    first, last, begin = _piece(options.part, starts)
    with Unfinished(output, {**settings, **options.texts(), **frames}) as file:
        state, digest = State(first), hashlib.sha256()
        if file.state is not None:
            state = State.read(file.state)
            digest = _checked_digest(source, begin, state, file.part)
        for batch in _batches(model, source, (state.frame, last), begin + state.bytes, options, digest):
            results = predict(model, batch.frames, options)
            skipped = tuple(sorted((*state.skipped, *batch.skipped, *results.skipped)))
            lacking = sum(options.stress and "stress" not in atoms.info for atoms in results.frames)
            written, without_stress = state.written + len(results.frames), state.without_stress + lacking
            far = state.far + sum(map(_is_far, results.frames))
            state = State(batch.number, batch.end - begin, batch.sha256, written, skipped, without_stress, far)
            file.write(results.text(), dataclasses.asdict(state))
            on_progress(state)
        if not state.frame and options.part == (1, 1):
            raise InputError(f"{source}: has no frames")
        _list_skipped(output, state)
        file.finish()
    return state


def _is_far(atoms: Atoms) -> bool:
    """Return whether an atom of an evaluated frame has a leverage above `FAR`; never where it is not fitted."""
    return bool(np.any(atoms.arrays.get(LEVERAGE.name, 0.0) > FAR))


def skipped_file(output: Path) -> Path:
    """Return the path of the list of frames that were left out of an output."""
    return output.with_name(f"{output.name}.skipped")


def check_files(source: Path, output: Path, overwrite: bool = False) -> None:
    """`InputError` for an input that cannot be read and an output that cannot be written."""
    open_frames(source).close()
    check_output(output, inputs=[source], frames=True, replace=overwrite, permission="--overwrite")


def _check_model(model: BatchModel, options: EvaluateOptions, name: str) -> None:
    if model.family is None:
        raise InputError(f"{name}: has no readout, hence no uncertainties: e2ip fit gives a trained model one")
    if options.calibration is not None:
        options.calibration.check(model.family, (), name, model.uq_model)


def _piece(part: Tuple[int, int], starts: Optional[Sequence[int]]) -> Tuple[int, float, int]:
    """Return the first frame of a part, the frame after its last one, and the byte at which it begins."""
    if starts is None:
        return 0, math.inf, 0
    (i, n), frames = part, len(starts) - 1
    first = frames * (i - 1) // n
    return first, frames * i // n, starts[first]


def _checked_digest(source: Path, begin: int, state: State, part: Path) -> Any:
    """Return the hash of the input that is done; `InputError` if the input has changed."""
    digest, left = hashlib.sha256(), state.bytes
    with open_frames(source) as file:
        file.seek(begin)
        while left and (piece := file.read(min(left, 1 << 20))):
            digest.update(piece)
            left -= len(piece)
    if left or digest.hexdigest() != state.sha256:
        problem = f"differs, before frame {state.frame}, from the input that {part} was begun with"
        raise InputError(f"{source}: {problem}: {START_ANEW}")
    return digest


def _batches(
    model: BatchModel, source: Path, numbers: Tuple[int, float], end: int, options: EvaluateOptions, digest: Any
) -> Iterator[_Batch]:
    """Gather the frames from the first number to the one before the last, of which the first begins at byte ``end``."""
    (number, last), size = numbers, np.zeros(2)
    frames: List[PreparedFrame] = []
    skipped: List[Tuple[int, str]] = []
    largest = [math.inf if bound is None else bound for bound in (options.batch_atoms, options.batch_edges)]
    with open_frames(source) as file:
        for chunk in chunks(file, source, number, end):
            if chunk.number >= last:
                break
            try:
                frame = prepare(model, chunk, source, options.calibration)
            except InputError as error:
                if not options.skip_bad:
                    raise
                skipped.append((chunk.number, str(error)))
            else:
                more = (len(frame.atoms), frame.edges)
                if frames and (size + more > largest).any():
                    yield _Batch(frames, skipped, chunk.number, chunk.start, digest.hexdigest())
                    frames, skipped, size = [], [], np.zeros(2)
                frames.append(frame)
                size = size + more
            digest.update(chunk.text)
            number, end = chunk.number + 1, chunk.end
    if frames or skipped:
        yield _Batch(frames, skipped, number, end, digest.hexdigest())


def _list_skipped(output: Path, state: State) -> None:
    path = skipped_file(output)
    if not state.skipped:
        path.unlink(missing_ok=True)
        return
    with replacing(path) as unfinished:
        unfinished.write_text("".join(f"{number}\t{why}\n" for number, why in state.skipped), encoding="utf-8")
