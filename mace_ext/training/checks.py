"""Checks before a run starts: the options of the readout, and the data files that it names."""

import ast
import os
import re
from argparse import Namespace
from pathlib import Path
from typing import Any, List, Optional, Set

import numpy as np

from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.checks import check_structure
from e2ip_plugins.readout.settings import resolve_force_unit, wants_auto_unit
from mace_ext import seams
from mace_ext.compat import option as option_of
from mace_ext.training.options import given_options, has_readout, known_options, settings_of

LOSSES = ("weighted", "ef", "stress", "virials", "huber", "universal", "l1l2energyforces")
MODELS = ("MACE", "ScaleShiftMACE")

#: MACE's own names for replay data, and what it does not read with ASE.
REPLAY_SETS = ("mp", "omat", "matpes_pbe", "matpes_r2scan")
BINARY = (".h5", ".hdf5", ".lmdb", ".aselmdb", ".mdb")


def check_options(args: Namespace) -> None:
    """Raise `InputError` for what cannot be trained; does nothing to a run without our options."""
    _check_names(args)
    if not has_readout(args):
        return
    readout = f"--readout {args.readout}"
    problem = seams.problem()
    if problem:
        raise InputError(f"{readout} does not work with this installation: {problem}")
    seams.warn_if_untested()
    try:
        settings_of(args)
        if not wants_auto_unit(args.e2ip_force_unit):
            resolve_force_unit(args.e2ip_force_unit)
    except InputError as error:
        # The core knows options by the names that both hosts share; those with an underscore are no ordinary words.
        given, text = given_options(args), str(error)
        names = "|".join(name for name in given if "_" in name)
        text = re.sub(rf"(?<!--e2ip_)\b({names})\b", r"--e2ip_\1", text) if names else text
        about = text.removeprefix("unknown ").partition(" ")[0]
        raise InputError(f"--e2ip_{about}: {text}" if about in given else text) from error
    if args.model not in MODELS:
        raise InputError(f"{readout} needs --model {' or '.join(MODELS)}, not {args.model}")
    if args.loss not in LOSSES:
        raise InputError(f"{readout} needs a --loss with energy and forces: {', '.join(LOSSES)}; not {args.loss}")
    for name in ("forces_weight", "swa_forces_weight"):
        if not getattr(args, name) > 0:
            raise InputError(f"{readout} needs --{name} > 0, got {getattr(args, name)}: it learns from forces")
    if args.e2ip_forces == "fixed":
        _fix_host(args)
    if args.e2ip_forces in ("host", "fixed") and args.lbfgs:
        raise InputError(
            f"{readout} --e2ip_forces {args.e2ip_forces} does not go with --lbfgs, which takes one step for all "
            "weights together; leave one of them out"
        )
    if not args.compute_forces:
        raise InputError(f"{readout} needs forces; leave --compute_forces out")
    check_files(args)
    if args.e2ip_forces == "fixed":
        _check_structures(args)


def _check_structures(args: Namespace) -> None:
    """Of a model that stays as it is: one head is meant, it must know every species, and a batch must have its frames.

    MACE would ask for atomic energies, which the model has, and leaves batches out that are not full.
    """
    path = Path(args.foundation_model)
    if not path.is_file():  # the name of a published one
        return
    import ase.io

    from mace_ext.model.files import open_file, species_of  # MACE itself is not there yet where these options are made

    model = open_file(path)
    # MACE passes over the head of replayed data, and without a choice takes the first of the others.
    every = getattr(model, "heads", None) or ()
    heads = [head for head in every if head != "pt_head"]
    if len(heads) > 1 and hasattr(args, "foundation_head") and args.foundation_head is None:
        raise InputError(
            f"--foundation_model {path} has the heads {', '.join(heads)}: give --foundation_head, the one whose "
            "energies and forces are to stay"
        )
    chosen = getattr(args, "foundation_head", None)
    if every and chosen is not None and chosen not in every:
        raise InputError(f"--foundation_head {chosen}: --foundation_model {path} has the heads {', '.join(heads)}")
    known = species_of(model)
    for option in ("train_file", "valid_file"):
        total = 0
        for name in listed(getattr(args, option)):
            if os.path.isdir(name) or name.endswith(BINARY):
                continue
            try:
                frames = ase.io.read(name, index=":")
            except Exception as error:
                raise _unreadable(f"--{option} {name}", error) from error
            for number, atoms in enumerate(frames):
                check_structure(atoms, f"--{option} {name}, frame {number}", known)
            total += len(frames)
        if option == "train_file" and 0 < total < args.batch_size:
            raise InputError(f"--{option}: {total} frames fill no batch of --batch_size {args.batch_size}")


def listed(paths: Any) -> List[str]:
    """Paths of a data option, of which MACE takes one or several."""
    return [paths] if isinstance(paths, str) else list(paths or [])


def _fix_host(args: Namespace) -> None:
    """Options of MACE that go with a model that stays as it is."""
    if args.foundation_model is None:
        raise InputError(
            "--e2ip_forces fixed trains the readout of a model that is there: name it with --foundation_model, or "
            "leave --e2ip_forces out"
        )
    # Names of published models have no ending.
    if Path(args.foundation_model).suffix and not Path(args.foundation_model).is_file():
        raise InputError(f"--foundation_model {args.foundation_model}: no such file")
    if option_of(args, "lora"):
        raise InputError("--e2ip_forces fixed does not go with --lora True, which changes the model; leave one out")
    # Its elements, its atomic energies, and nothing to replay.
    args.foundation_model_elements, args.multiheads_finetuning, args.E0s = True, False, "foundation"


def _check_names(args: Namespace) -> None:
    """Every option that was given is one of the chosen readout."""
    for name in given_options(args):
        owners = known_options()[name]
        if not has_readout(args):
            choice = " or ".join(f"--readout {owner}" for owner in owners)
            raise InputError(f"--e2ip_{name} has no effect without {choice}; add it or leave --e2ip_{name} out")
        if args.readout not in owners:
            raise InputError(
                f"--e2ip_{name} is no option of --readout {args.readout}, but of {', '.join(owners)}; leave it out"
            )


def check_files(args: Namespace) -> None:
    """Every file is there, can be read and, if ASE reads it, has a frame with the named forces.

    MACE itself trains on without a word: frames without the named key get force weight zero. A training file
    without the named energies makes MACE's average atomic energies NaN, and everything after them.
    """
    heads = ast.literal_eval(args.heads) if isinstance(args.heads, str) else args.heads
    for head in (heads or {"Default": {}}).values():
        key = head.get("arrays_keys", {}).get("forces", head.get("forces_key", args.forces_key))
        energy_key = head.get("info_keys", {}).get("energy", head.get("energy_key", args.energy_key))
        if head.get("train_file", args.train_file) is None:
            raise InputError("no training data: --train_file is missing")
        for option in ("train_file", "valid_file", "test_file"):
            paths = head.get(option, None if option == "test_file" and heads else getattr(args, option))
            for path in listed(paths):
                check_file(path, f"--{option}", key, "--forces_key")
                if option == "train_file" and args.energy_weight > 0:
                    check_file(path, f"--{option}", energy_key, "--energy_key")
    if args.pt_train_file is not None and args.pt_train_file not in REPLAY_SETS:
        key = None if option_of(args, "pseudolabel_replay") else args.forces_key
        check_file(args.pt_train_file, "--pt_train_file", key, "--forces_key")


def _unreadable(what: str, error: Exception) -> InputError:
    return InputError(f"{what}: cannot be read ({type(error).__name__}: {error})")


def check_file(path: str, option: str, key: Optional[str], key_option: str) -> None:
    """Raise `InputError` unless ``path`` can be read and, given ``key``, one frame has forces or energies under it.

    ``key_option`` is ``--forces_key`` or ``--energy_key``. Stops at the first frame that has them, usually the first
    one, or the one after the isolated atoms; but not where the key is ``forces``, which MACE takes from ASE's
    calculator after the frame's constraints have been applied.
    """
    if path in REPLAY_SETS:
        return
    parts = path.split(":")  # MACE's way to join LMDB files
    if len(parts) > 1 and not os.path.exists(path):
        for part in parts:
            check_file(part, option, key, key_option)
        return
    if not os.path.exists(path):
        raise InputError(f"{option} {path}: there is no such file")
    if os.path.isdir(path) and not any(name.endswith(BINARY) for name in os.listdir(path)):
        raise InputError(f"{option} {path}: is a folder without HDF5 or LMDB files; give an extxyz file")
    if os.path.isdir(path) or path.endswith(BINARY):
        return
    import ase.io

    forces = key_option == "--forces_key"
    found: Set[Any] = set()
    there = False
    try:
        for number, atoms in enumerate(ase.io.iread(path)):
            calculated = {"forces" if forces else "energy"} & set(getattr(atoms.calc, "results", {}))
            names = set(atoms.arrays if forces else atoms.info) | calculated
            there = there or key is None or key in names
            if key == "forces" and calculated:
                _check_constraints(atoms, f"{option} {path}, frame {number}")
            elif there:
                return
            found |= names | {"numbers"}
    except InputError:
        raise
    except Exception as error:
        raise _unreadable(f"{option} {path}", error) from error
    if there:
        return
    if not found:
        raise InputError(f"{option} {path}: holds no frames")
    others = ", ".join(sorted(found - {"numbers", "positions"})) or "none"
    what, where = ("forces", "per-atom columns") if forces else ("an energy", "names in the comment lines")
    way_out = f"name it with {key_option}" + ("" if forces else ", or train on forces alone with --energy_weight 0")
    raise InputError(f"{option} {path}: no frame has {what} under '{key}' ({where} found: {others}); {way_out}")


def _check_constraints(atoms: Any, where: str) -> None:
    raw = atoms.get_forces(apply_constraint=False)
    changed = int((np.abs(atoms.get_forces() - raw) > 1e-9).any(-1).sum()) if atoms.constraints else 0
    if changed:
        raise InputError(
            f"{where}: has constraints, with which MACE takes other reference forces of {changed} atoms than the file "
            "has, 0 of fixed ones; write the forces under another name, for example REF_forces, or the frames without "
            "constraints"
        )
