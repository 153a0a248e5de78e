"""Files of a data set: which frames train, validate and test."""

import hashlib
import json
import re
import shlex
import subprocess
import sys
import warnings
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import numpy as np

from e2ip_plugins.bench.catalogue import FETCHED, DataSet
from e2ip_plugins.errors import InputError, UncertaintyWarning
from e2ip_plugins.files import replacing
from e2ip_plugins.predictions.chunks import Chunk, check_whole, chunks, open_frames, to_atoms
from e2ip_plugins.predictions.fingerprints import fingerprint
from e2ip_plugins.predictions.labelled import LabelledFrame, labelled, weight_in_words

#: Seed of the rotations of `rotated`.
SEED = 0


def read_json(path: Path) -> Any:
    """Read what this package wrote to a file that it can make anew; `InputError` where it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error}); remove it, and it is made anew") from error


def read_verbatim(source: Path, count: "int | None" = None) -> List[str]:
    """Frames of an extxyz file verbatim, the first ``count``; ASE would round numbers.

    Frames of weight zero are left out, with a warning: MACE does not train on them, and NequIP knows no weights. So are
    frames of negative weight, from which MACE would move away.
    """
    used: List[Chunk] = []
    left_out: List[float] = []
    with open_frames(source) as file:
        for chunk in chunks(file, source):
            if len(used) == count:
                break
            frame = _weighted(chunk, source)
            if frame is None or frame.counts:
                used.append(chunk)
            else:
                left_out.append(frame.least_weight)
    for chunk in used[-1:]:
        check_whole(chunk, source)
    if left_out:
        text = f"{source}: {len(left_out)} frames of {weight_in_words(left_out)} left out"
        warnings.warn(text, UncertaintyWarning, stacklevel=2)
    return [chunk.text.decode() for chunk in used]


def _weighted(chunk: Chunk, source: Path) -> Optional[LabelledFrame]:
    """Return a frame that names a weight; None of others, which are not parsed."""
    if not chunk.complete or b"_weight" not in chunk.text.split(b"\n", 2)[1]:
        return None
    return labelled(to_atoms(chunk, source), f"{source}, frame {chunk.number}")


def find(name: str, roots: Sequence[Path], where: str = "") -> Path:
    """A data file in one of the folders; `InputError` where it is in none. ``where`` names the key that wants it."""
    for root in roots:
        if (root / name).is_file():
            return (root / name).resolve()
    listed = " or ".join(dict.fromkeys(str(root.resolve()) for root in roots))
    folder, way = name.partition("/")[0], "correct the name, or give its folder by --data or E2IP_DATA"
    if folder in ("demo", "benchmarks"):
        way = f"run this in a clone of e2ip-plugins, whose folder {folder} it is in"
    elif folder in FETCHED:
        way += f"; `e2ip fetch {folder} --to FOLDER` downloads it"
    raise InputError(f"{where}no file {name} in {listed}: {way}")


def find_all(name: str, dataset: DataSet, roots: Sequence[Path]) -> Dict[str, Path]:
    """Every file that a data set is made of, by label; of one that a script makes, the script alone."""
    if dataset.script:
        return {"script": find(shlex.split(dataset.script)[0], roots, f"{name}.yaml: script: ")}
    names = {"train": dataset.train, **({"valid": dataset.valid} if dataset.valid else {}), **dataset.tests}
    keys = {label: f"tests: {label}" for label in dataset.tests}
    return {label: find(file, roots, f"{name}.yaml: {keys.get(label, label)}: ") for label, file in names.items()}


def made(name: str, dataset: DataSet, roots: Sequence[Path], folder: Path) -> Dict[str, Path]:
    """`find_all` of a data set; if a script makes it, the files in a folder below ``folder``, made on first use."""
    if not dataset.script:
        return find_all(name, dataset, roots)
    called = re.sub(r"[^\w-]+", "-", dataset.script)
    target = folder / f"{called}-{fingerprints(name, dataset, roots)['script']}"
    if not target.exists():
        unfinished = target.with_name(f"{target.name}.unfinished")
        # Files that the script is called with may be beside it.
        words = [str(next((r / w for r in roots if (r / w).is_file()), w)) for w in shlex.split(dataset.script)]
        if code := subprocess.run([sys.executable, *words, "--out", str(unfinished)]).returncode:
            raise InputError(f"{name}.yaml: script: {' '.join(words)} failed with status {code}")
        unfinished.rename(target)
    return find_all(name, replace(dataset, script=""), [target])


def fingerprints(name: str, dataset: DataSet, roots: Sequence[Path]) -> Dict[str, str]:
    """Fingerprints of the contents of those files, by label."""
    sources = find_all(name, dataset, roots)
    return {label: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for label, path in sources.items()}


def prepare(name: str, dataset: DataSet, roots: Sequence[Path], folder: Path, limit: "int | None") -> Dict[str, Path]:
    """Files by label: ``train``, ``valid``, the tests; ``rotated``, the first test with each frame turned at random.

    Energies and forces are called `REF_energy` and `REF_forces` in them, whatever the data set calls them.
    All frames of the data set are checked, also where ``limit`` leaves few.
    Where the data set has them, also ``further`` frames of the training file, which are used neither to train nor to
    validate.

    Parameters
    ----------
    name : str
        Name of the files that are written.
    dataset : DataSet
    roots
        Folders with data.
    folder
        Where splits are written, unless they exist and are made of the same files.
    limit : int, optional
        Largest number of frames of each file.
    """
    files = {label: folder / f"{name}_{label}.extxyz" for label in ("train", *dataset.labels)}
    note = folder / f"{name}.json"
    origin = {"sources": fingerprints(name, dataset, roots), "limit": limit, "keys": dataset.keys}
    if note.exists() and read_json(note) == origin and all(p.exists() for p in files.values()):
        return files
    folder.mkdir(parents=True, exist_ok=True)
    sources = made(name, dataset, roots, folder)
    marks = {
        label: _checked(frames, f"of {label} in {sources.get(label, sources['train'])}", name, dataset)
        for label, frames in _split(dataset, sources, None).items()
    }
    _check_apart(marks, name, dataset)
    for label, frames in _split(dataset, sources, limit).items():
        _write(files[label], frames)
    _rotate(files[next(iter(dataset.tests))], files["rotated"])
    _write(note, [json.dumps(origin)])
    return files


def _split(dataset: DataSet, sources: Dict[str, Path], limit: "int | None") -> Dict[str, List[str]]:
    """Return all frames by label, with our names of energy and forces."""
    tests = {label: read_verbatim(sources[label], limit) for label in dataset.tests}
    split = {**_split_training(dataset, sources, limit), **tests}
    return {label: [_renamed(frame, dataset.keys) for frame in frames] for label, frames in split.items()}


def _split_training(dataset: DataSet, sources: Dict[str, Path], limit: "int | None") -> Dict[str, List[str]]:
    """Return the frames to train, to validate and, where the data set has them, ``further`` ones."""
    if not dataset.frames:
        return {label: read_verbatim(sources[label], limit) for label in ("train", "valid")}
    train, valid = (min(n, limit or n) for n in dataset.frames)
    used = train if dataset.valid else train + valid
    needed = sum(dataset.frames) + dataset.further if dataset.further else used
    frames = read_verbatim(sources["train"], needed)
    if len(frames) < needed:
        keys = f"frames: {list(dataset.frames)}" + (f" and further: {dataset.further}" if dataset.further else "")
        raise InputError(f"{sources['train']} has {len(frames)} frames; {keys} need {needed}: give smaller numbers")
    further = frames[sum(dataset.frames) :][:limit]
    frames = frames[:used]
    if dataset.valid:
        of_valid = read_verbatim(sources["valid"], valid)
    else:
        rows = [int((i + 0.5) * used / valid) for i in range(valid)] if dataset.spread else list(range(train, used))
        of_valid = [frames[i] for i in rows]
        frames = [frame for i, frame in enumerate(frames) if i not in set(rows)]
    return {"train": frames, "valid": of_valid, **({"further": further} if dataset.further else {})}


def _renamed(text: str, keys: Dict[str, str]) -> str:
    """A frame with our names of energy and forces; what had them before is kept under another name."""
    count, comment, atoms = text.split("\n", 2)
    for name, key in keys.items():
        if key != (ours := f"REF_{name}"):
            comment = re.sub(rf"(?<![\w-]){ours}(?=[=:])", f"other_{ours}", comment)
            comment = re.sub(rf"(?<![\w-]){re.escape(key)}(?=[=:])", ours, comment)
    return "\n".join((count, comment, atoms))


def _checked(frames: Sequence[str], where: str, name: str, dataset: DataSet) -> List[str]:
    """Return the fingerprints of frames.

    Raises
    ------
    InputError
        For a frame without energy or forces, or with species that the data set does not name.
    """
    import ase.io

    marks = []
    for i, atoms in enumerate(ase.io.iread(StringIO("".join(frames)), index=":", format="extxyz")):
        for kind, values in (("energy", atoms.info), ("forces", atoms.arrays)):
            if f"REF_{kind}" not in values:
                key = dataset.keys.get(kind, f"REF_{kind}")
                raise InputError(f"{name}.yaml: frame {i} {where} has no '{key}': name it by keys: {{{kind}: NAME}}")
        if lacking := sorted(set(atoms.symbols) - set(dataset.species)):
            raise InputError(
                f"{name}.yaml: species: lacks {', '.join(lacking)}, which frame {i} {where} has: "
                f"give [{', '.join((*dataset.species, *lacking))}]"
            )
        marks.append(fingerprint(atoms))
    return marks


def _check_apart(marks: Dict[str, List[str]], name: str, dataset: DataSet) -> None:
    """`InputError` for a test whose frames are used to train, to validate or, as ``further`` ones, to calibrate."""
    used = {mark for label, of_label in marks.items() if label not in dataset.tests for mark in of_label}
    for label in dataset.tests:
        if shared := sum(mark in used for mark in marks[label]):
            raise InputError(
                f"{name}.yaml: tests: {label}: {shared} of {len(marks[label])} frames are also training, validation or "
                "further frames, on which errors are too small: take them out of one of the files"
            )


def _write(path: Path, frames: Sequence[str]) -> None:
    with replacing(path) as unfinished:  # a later call takes what exists
        unfinished.write_text("".join(frames), encoding="utf-8")


def rotations(count: int) -> np.ndarray:
    """Random proper rotations (count, 3, 3), the same ones for every count."""
    from scipy.spatial.transform import Rotation

    return Rotation.random(count, random_state=SEED).as_matrix()


def _rotate(source: Path, target: Path) -> None:
    import ase.io

    frames = ase.io.read(source, index=":", format="extxyz")
    for atoms, rotation in zip(frames, rotations(len(frames)), strict=True):
        atoms.positions = atoms.positions @ rotation.T
        atoms.cell = atoms.cell.array @ rotation.T
        atoms.arrays["REF_forces"] = atoms.arrays["REF_forces"] @ rotation.T
    with replacing(target) as unfinished:
        ase.io.write(unfinished, frames, format="extxyz")
