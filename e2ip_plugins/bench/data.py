"""Files of a data set: which frames train, validate and test."""

import hashlib
import json
from itertools import islice
from pathlib import Path
from typing import Any, Dict, List, Sequence

import numpy as np

from e2ip_plugins.bench.plan import FETCHED, DataSet, labels
from e2ip_plugins.errors import InputError
from e2ip_plugins.files import replacing
from e2ip_plugins.predictions.chunks import check_whole, chunks, open_frames

#: Seed of the rotations of `rotated`.
SEED = 0


def read_json(path: Path) -> Any:
    """What a program of ours noted in a file that it can make anew; `InputError` where that is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error}); remove it, and it is made anew") from error


def read_verbatim(source: Path, count: "int | None" = None) -> List[str]:
    """Frames of an extxyz file as they stand there, the first ``count``; ASE would round numbers."""
    with open_frames(source) as file:
        found = list(islice(chunks(file, source), count))
    for chunk in found[-1:]:
        check_whole(chunk, source)
    return [chunk.text.decode() for chunk in found]


def find(name: str, roots: Sequence[Path]) -> Path:
    """A data file in one of the folders; `InputError` where it is in none."""
    for root in roots:
        if (root / name).is_file():
            return root / name
    listed = " or ".join(str(root) for root in roots)
    folder, way = name.partition("/")[0], "name the folder that holds it with --data, or in E2IP_DATA"
    if folder == "demo":
        way = "run this in a clone of e2ip-plugins, whose folder demo it is in"
    elif folder in FETCHED:
        way += f"; `e2ip fetch {folder} --to FOLDER` downloads it"
    raise InputError(f"no file {name} in {listed}: {way}")


def find_all(dataset: DataSet, roots: Sequence[Path]) -> Dict[str, Path]:
    """Every file that a data set is made of, by label."""
    names = {"train": dataset.train, **({"valid": dataset.valid} if dataset.valid else {}), **dataset.tests}
    return {label: find(name, roots) for label, name in names.items()}


def fingerprints(dataset: DataSet, roots: Sequence[Path]) -> Dict[str, str]:
    """Of the contents of those files, by label."""
    found = find_all(dataset, roots)
    return {label: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for label, path in found.items()}


def prepare(name: str, dataset: DataSet, roots: Sequence[Path], folder: Path, limit: "int | None") -> Dict[str, Path]:
    """Files by label: ``train``, ``valid``, the tests; ``rotated``, the first test with each frame turned at random.

    Where the data set has them, also ``further`` frames of the training file, which are used neither to train nor to
    validate.

    Parameters
    ----------
    name : str
        Of the files that are written.
    dataset : DataSet
    roots
        Folders with data.
    folder
        Where splits are written, unless they are there and made of the same files.
    limit : int, optional
        Frames of each at most.
    """
    sources = find_all(dataset, roots)
    train, valid = (min(n, limit or n) for n in dataset.frames)
    files = {label: folder / f"{name}_{label}.extxyz" for label in ("train", *labels(dataset))}
    made_of = folder / f"{name}.json"
    origin = {"sources": fingerprints(dataset, roots), "limit": limit}
    if made_of.exists() and read_json(made_of) == origin and all(p.exists() for p in files.values()):
        return files
    folder.mkdir(parents=True, exist_ok=True)
    used = train if dataset.valid else train + valid
    needed = sum(dataset.frames) + dataset.further if dataset.further else used
    frames = read_verbatim(sources["train"], needed)
    if len(frames) < needed:
        raise InputError(f"{sources['train']} has {len(frames)} frames; {needed} are needed")
    if dataset.further:
        _write(files["further"], frames[sum(dataset.frames) :][:limit])
    frames = frames[:used]
    if dataset.valid:
        of_valid = read_verbatim(sources["valid"], valid)
    else:
        rows = list(range(train, used))
        if dataset.spread:
            rows = [int((i + 0.5) * used / valid) for i in range(valid)]
        of_valid = [frames[i] for i in rows]
        frames = [frame for i, frame in enumerate(frames) if i not in set(rows)]
    _write(files["train"], frames)
    _write(files["valid"], of_valid)
    for label in dataset.tests:
        _write(files[label], read_verbatim(sources[label], limit))
    _rotate(files[next(iter(dataset.tests))], files["rotated"])
    _write(made_of, [json.dumps(origin)])
    return files


def _write(path: Path, frames: Sequence[str]) -> None:
    with replacing(path) as unfinished:  # a later call takes what is there
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
