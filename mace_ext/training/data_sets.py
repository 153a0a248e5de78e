"""Checks of the data of a training: of files before MACE reads them, of configurations before the first batch.

Loaded while MACE is: imports of ASE's readers and of MACE wait until they are used.
"""

import ast
import logging
import os
from argparse import Namespace
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Set, Union

import numpy as np
from ase import Atoms

from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.checks import check_structure
from e2ip_plugins.predictions.data_sets import check_frame, masked_forces
from e2ip_plugins.predictions.doubts import doubts
from e2ip_plugins.predictions.labelled import LabelledFrame
from mace_ext.compat import option as option_of
from mace_ext.training.labels import (
    ENERGY,
    FORCES,
    count_labels,
    is_of_calculator,
    keys_of_head,
    labelled_frame,
    names_of_labels,
)

#: MACE's own names for replay data, and endings of what it does not read with ASE.
REPLAY_SETS = ("mp", "omat", "matpes_pbe", "matpes_r2scan")
BINARY = (".h5", ".hdf5", ".lmdb", ".aselmdb", ".mdb")

#: Foundation models for which MACE itself has replay data.
WITH_REPLAY_SET = ("small", "medium", "large")

#: MACE's name for the head of replayed data.
REPLAY_HEAD = "pt_head"

#: Where MACE has the paths of a head's data.
_FILES = ("train_file", "valid_file", "test_file")

#: What losses learn from beside energies and forces.
_FURTHER = {"stress": ["stress"], "huber": ["stress"], "universal": ["stress"], "virials": ["stress"]}


def _listed(paths: Union[str, Sequence[str], None]) -> List[str]:
    """Return the paths of a data option, of which MACE takes one or several."""
    return [paths] if isinstance(paths, str) else list(paths or [])


def _file(path: str, where: str) -> str:
    """Return the file of a path; `InputError` for a part of one, ``file@slice``, of which MACE would read all."""
    from e2ip_plugins.predictions.chunks import split_slice

    file, part = split_slice(Path(path))
    if part != ":" and file.is_file():
        raise InputError(f"{where}: MACE reads all of {file}, not '{part}' of it; write that part to a file of its own")
    return str(file)


def _is_binary(path: str) -> bool:
    return os.path.isdir(path) or path.endswith(BINARY)


def _read(path: str, where: str) -> Iterator[Atoms]:
    import ase.io

    try:
        yield from ase.io.iread(path)
    except Exception as error:
        raise InputError(f"{where}: cannot be read ({type(error).__name__}: {error})") from error


class HeadFiles(NamedTuple):
    """Paths that MACE reads for a MACE head, by option, and the keys of its labels.

    Attributes
    ----------
    name : str
        Of an entry of ``--heads``; empty where there is none.
    files : dict of list of str
        By option, such as ``train_file``.
    keys : dict of str
        `mace_ext.training.labels.keys_of_head`.
    """

    name: str
    files: Dict[str, List[str]]
    keys: Dict[str, str]


def files_of_heads(args: Namespace) -> Iterator[HeadFiles]:
    """Yield what MACE will read: for the heads of ``--heads`` or the only one, and for that of replayed data.

    Raises
    ------
    InputError
        For a head without training data.
    """
    heads = (ast.literal_eval(args.heads) if isinstance(args.heads, str) else args.heads) or {}
    data = args.pt_train_file is not None or args.foundation_model in WITH_REPLAY_SET
    replays = args.foundation_model is not None and args.multiheads_finetuning and data
    for name, head in (heads or {"Default": {}}).items():
        if replays and name == REPLAY_HEAD:
            continue  # MACE takes nothing from this entry except the keys
        if head.get("train_file", args.train_file) is None:
            where = f"head {name} has no train_file, and " if heads else ""
            raise InputError(f"no training data: {where}--train_file is missing")
        by_option = {
            option: head.get(option, None if option == "test_file" and heads else getattr(args, option))
            for option in _FILES
        }
        files = {option: _listed(paths) for option, paths in by_option.items()}
        yield HeadFiles(name if heads else "", files, keys_of_head(head, args))
    if replays:
        files = {option: _listed(getattr(args, option, None)) for option in ("pt_train_file", "pt_valid_file")}
        head = heads.get(REPLAY_HEAD, {})
        yield HeadFiles(REPLAY_HEAD if head else "", files, keys_of_head(head, args))


def check_files(args: Namespace) -> None:
    """Raise `InputError` for files that do not exist, cannot be read or, if ASE reads them, lack the named forces.

    MACE trains on without a word: frames without the named key get force weight zero. A training file without the named
    energies makes MACE's average atomic energies NaN, and everything after them.
    """
    for head in files_of_heads(args):
        for option, paths in head.files.items():
            # MACE makes labels of its own for replayed data.
            unlabelled = option.startswith("pt_") and option_of(args, "pseudolabel_replay")
            for path in paths:
                check_file(path, f"--{option}", FORCES, None if unlabelled else head.keys[FORCES], head.name)
                if option == "train_file" and args.energy_weight > 0:
                    check_file(path, f"--{option}", ENERGY, head.keys[ENERGY], head.name)


def check_file(path: str, option: str, label: str, key: Optional[str], head: str = "") -> None:
    """Raise `InputError` unless ``path`` can be read and, given ``key``, one frame has forces or energies under it.

    ``label`` is ``forces`` or ``energy``, ``head`` the entry of ``--heads`` that may name its key. Stops at the first
    frame that has it, usually the first one, or the one after the isolated atoms; but not where MACE takes forces from
    ASE's calculator, after the frame's constraints have been applied.
    """
    where = f"{option} {path}"
    if path in REPLAY_SETS:
        return
    file = _file(path, where)
    if not os.path.exists(file):
        if ":" not in file:
            raise InputError(f"{where}: there is no such file")
        for part in file.split(":"):  # MACE's way to join LMDB files
            check_file(part, option, label, key, head)
        return
    if os.path.isdir(path) and not any(name.endswith(BINARY) for name in os.listdir(path)):
        raise InputError(f"{where}: is a folder without HDF5 or LMDB files; give an extxyz file")
    if _is_binary(path):
        return
    names: Set[str] = set()
    count = 0
    for count, atoms in enumerate(_read(path, where), 1):
        names |= names_of_labels(atoms, label)
        if label == FORCES and is_of_calculator(atoms, label, key):
            _check_constraints(atoms, f"{where}, frame {count - 1}")
        elif key is None or key in names:
            return
    if not count:
        raise InputError(f"{where}: holds no frames")
    if key not in names:
        forces = label == FORCES
        what, place = ("forces", "per-atom columns") if forces else ("an energy", "names in the comment lines")
        way_out = f"name it with --{label}_key" + (f" or in the entry {head} of --heads" if head else "")
        way_out += "" if forces else ", or train on forces alone with --energy_weight 0"
        others = ", ".join(sorted(names - {"numbers", "positions"})) or "none"
        raise InputError(f"{where}: no frame has {what} under '{key}' ({place} found: {others}); {way_out}")


def _check_constraints(atoms: Atoms, where: str) -> None:
    raw = atoms.get_forces(apply_constraint=False)
    changed = int((np.abs(atoms.get_forces() - raw) > 1e-9).any(-1).sum()) if atoms.constraints else 0
    if changed:
        raise InputError(
            f"{where}: has constraints, with which MACE takes other reference forces of {changed} atoms than the file "
            "has; write the forces under another name, for example REF_forces, or the frames without constraints"
        )


def check_structures(args: Namespace, known: Sequence[str]) -> None:
    """Raise `InputError` for structures that a model which stays as it is cannot learn from.

    MACE would ask for the atomic energies of species that are none of those ``known``, and leaves batches out that are
    not full.
    """
    for option in ("train_file", "valid_file"):
        total = 0
        for path in _listed(getattr(args, option)):
            where = f"--{option} {path}"
            for number, atoms in enumerate(() if _is_binary(path) else _read(path, where)):
                check_structure(atoms, f"{where}, frame {number}", known)
                total += 1
        if option == "train_file" and 0 < total < args.batch_size:
            raise InputError(f"--{option}: {total} frames fill no batch of --batch_size {args.batch_size}")


def _sets(head: Any) -> Dict[str, Sequence[Any]]:
    """Return the data sets in memory of a head's config, a `HeadConfig` of MACE's, by their names."""
    collections = head.collections
    if collections is None:
        return {}
    tests = {f"test ({name})": configs for name, configs in collections.tests}
    return {"training": collections.train, "validation": collections.valid, **tests}


def check_configurations(head_configs: Iterable[Any], known: Optional[Sequence[str]], loss: str) -> None:
    """Warn of atoms with NaN or infinite reference forces, of frames without any, and of data that are not in memory.

    Raises
    ------
    InputError
        For positions that are not finite, such atoms MACE leaves out of every neighbourhood without a word; for two
        atoms at the same place; for labels that the ``loss`` learns from and that are not finite; and for species that
        are none of those ``known``: in test data MACE meets them after the training, and leaves no model.
    """
    for head in head_configs:
        sets = _sets(head)
        if not sets or any(map(_is_binary, _paths(head))):
            logging.warning(
                f"{'Some data' if sets else 'Data'} of head {head.head_name} are not in memory (HDF5 or LMDB): labels "
                "and positions that are no numbers and atoms at the same place are not looked for"
            )
        for name, configs in sets.items():
            where = f"of the {name} set (head {head.head_name})"
            finite = [] if name.startswith("test") else [ENERGY, *_FURTHER.get(loss, [])]
            frames = [labelled_frame(config, where) for config in configs]
            for index, frame in enumerate(frames):
                try:
                    check_frame(frame, finite, known)
                except InputError as error:
                    raise InputError(f"{_place(configs[index], head, index)} {error}") from error
            _tell_of_labels(frames, where)


def _tell_of_labels(frames: Sequence[LabelledFrame], where: str) -> None:
    """Log how many frames and atoms of a data set do not count."""
    forces = [np.isfinite(frame.forces.values).all(-1) for frame in frames if frame.forces is not None]
    text = masked_forces(sum((~atoms).sum() for atoms in forces), sum(map(len, forces)), where)
    if text:
        logging.warning(text)
    negative = sum(frame.least_weight < 0.0 for frame in frames)
    if negative:
        logging.warning(
            f"{negative} of {len(frames)} frames {where} have a negative weight: MACE moves away from such energies "
            "and stresses; the readout does not learn from such forces, nor does anything that is fitted"
        )
    unused, lacking = count_labels(frame for frame in frames if frame.least_weight >= 0.0)
    if unused:
        level = logging.INFO if unused < len(frames) else logging.WARNING
        logging.log(level, f"{unused} of {len(frames)} frames {where} have weight zero and count nowhere")
    if lacking[FORCES]:
        logging.warning(
            f"{lacking[FORCES]} of {len(frames)} frames {where} have no reference forces, or forces of weight zero: "
            "the uncertainty learns nothing from them"
        )
    if lacking[ENERGY]:
        logging.warning(
            f"{lacking[ENERGY]} of {len(frames)} frames {where} have no reference energy, or an energy of weight zero: "
            "the energy term leaves them out"
        )


def check_atomic_energies(energies: Any, head_configs: Iterable[Any]) -> None:
    """Raise `InputError` for atomic energies that are not finite: averages over frames of which some have no energy."""
    if np.isfinite(np.asarray(energies, dtype=np.float64)).all():
        return
    frames = [(config, head, i) for head in head_configs for i, config in enumerate(_sets(head).get("training", ()))]
    lacking = [frame for frame in frames if labelled_frame(frame[0]).energy is None]
    where = f"; {len(lacking)} of {len(frames)} have none, the first is {_place(*lacking[0])}" if lacking else ""
    raise InputError(
        "the atomic energies that --E0s average gives are not finite, because they need an energy of every training "
        f"frame{where}: leave such frames out, or give --E0s the energies of isolated atoms"
    )


def warn_of_sets(head_configs: Iterable[Any]) -> None:
    """Warn of sets in memory to which a leverage will not be fitted well.

    Configurations of weight zero, which MACE reads and never uses, do not count.
    """
    for head in head_configs:
        sets = [[labelled_frame(config) for config in configs] for configs in _sets(head).values()]
        for text in doubts(*sets[:2]) if sets else ():
            logging.warning(f"Data of head {head.head_name}: {text}")


def _paths(head: Any) -> List[str]:
    return [path for option in _FILES for path in _listed(getattr(head, option, None))]


def _place(config: Any, head: Any, index: int) -> str:
    """Return where a configuration is in the user's files: MACE leaves isolated atoms out and may shuffle the rest."""
    for path in _paths(head):
        if not path.endswith(BINARY) and Path(_file(path, path)).is_file():
            for number, atoms in enumerate(_read(path, path)):
                same = np.array_equal(atoms.numbers, config.atomic_numbers)
                if same and np.array_equal(atoms.positions, config.positions, equal_nan=True):
                    return f"{path}, frame {number}"
    return f"frame {index}"
