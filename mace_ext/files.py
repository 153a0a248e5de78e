"""Checks on the data files that a run names, before MACE starts to load them."""

import ast
import os

from e2ip_plugins.errors import InputError

#: MACE's own names for replay data, and what it does not read with ASE.
REPLAY_SETS = ("mp", "omat", "matpes_pbe", "matpes_r2scan")
_BINARY = (".h5", ".hdf5", ".lmdb", ".aselmdb", ".mdb")


def check_files(args) -> None:
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
            for path in [paths] if isinstance(paths, str) else paths or []:
                check_file(path, f"--{option}", key, "--forces_key")
                if option == "train_file" and args.energy_weight > 0:
                    check_file(path, f"--{option}", energy_key, "--energy_key")
    if args.pt_train_file is not None and args.pt_train_file not in REPLAY_SETS:
        key = None if args.pseudolabel_replay else args.forces_key
        check_file(args.pt_train_file, "--pt_train_file", key, "--forces_key")


def check_file(path, option, key, key_option) -> None:
    """Raise `InputError` unless ``path`` can be read and, given ``key``, one frame has forces or energies under it.

    ``key_option`` is ``--forces_key`` or ``--energy_key``. Stops at the first frame that has them: usually
    the first one, or the one after the isolated atoms.
    """
    if path in REPLAY_SETS:
        return
    if not os.path.exists(path):
        raise InputError(f"{option} {path}: there is no such file")
    if os.path.isdir(path) and not any(name.endswith(_BINARY) for name in os.listdir(path)):
        raise InputError(f"{option} {path}: is a folder without HDF5 or LMDB files; give an extxyz file")
    if os.path.isdir(path) or path.endswith(_BINARY):
        return
    import ase.io

    forces = key_option == "--forces_key"
    found = set()
    try:
        for atoms in ase.io.iread(path):
            calculated = {"forces" if forces else "energy"} & set(getattr(atoms.calc, "results", {}))
            names = set(atoms.arrays if forces else atoms.info) | calculated
            if key is None or key in names:
                return
            found |= names | {"numbers"}
    except Exception as error:
        raise InputError(f"{option} {path}: cannot be read ({type(error).__name__}: {error})") from error
    if not found:
        raise InputError(f"{option} {path}: holds no frames")
    others = ", ".join(sorted(found - {"numbers", "positions"})) or "none"
    what, where = ("forces", "per-atom columns") if forces else ("an energy", "names in the comment lines")
    way_out = f"name it with {key_option}" + ("" if forces else ", or train on forces alone with --energy_weight 0")
    raise InputError(f"{option} {path}: no frame has {what} under '{key}' ({where} found: {others}); {way_out}")
