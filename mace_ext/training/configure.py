"""From parsed arguments and the training set to an e²IP model."""

import copy
import logging
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any, Callable, Iterable, NoReturn, Optional, Sequence, Tuple

import numpy as np
import torch
from ase.data import chemical_symbols

from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.checks import check_apart, check_atoms, check_finite
from e2ip_plugins.predictions.doubts import Configuration, doubts
from e2ip_plugins.readout.settings import resolve_force_unit, wants_auto_unit
from mace_ext.model.foundation import load_foundation_readout, without_readout
from mace_ext.model.model import ScaleShiftMACE, add_readout
from mace_ext.model.readout import find_readout
from mace_ext.training.checks import BINARY, listed
from mace_ext.training.options import settings_of


def configure_e2ip_model(
    stock: Callable,
    args: Namespace,
    train_loader: Any,
    atomic_energies: Any,
    model_foundation: Any = None,
    *rest: Any,
    **kwargs: Any,
) -> Tuple[ScaleShiftMACE, Any]:
    """``configure_model`` of `mace.tools.model_script_utils` for a run with ``--readout``.

    Parameters
    ----------
    stock : callable
        The stock function; its model is upgraded in place, foundation weights already loaded.

    Returns
    -------
    model, output_args
    """
    head_configs = kwargs.get("head_configs", rest[2] if len(rest) > 2 else None)
    z_table = kwargs.get("z_table", rest[1] if len(rest) > 1 else None)
    try:
        labels = ("energy", *_FURTHER.get(args.loss, ()))
        warn_of_masked_forces(head_configs or [], z_table and [chemical_symbols[z] for z in z_table.zs], labels)
        _check_atomic_energies(atomic_energies, head_configs or [])
        _check_reference_forces(train_loader.dataset)
    except InputError as error:
        _end(error)
    model, output_args = stock(
        args, _FiniteForces(train_loader), atomic_energies, without_readout(model_foundation), *rest, **kwargs
    )
    try:
        settings = settings_of(args, _force_unit(args, train_loader.dataset, model_foundation))
        if settings.forces == "fixed":
            model = _as_it_is(model_foundation, model)
        add_readout(model, settings, seed=args.seed)
    except InputError as error:
        _end(error)
    if model.e2ip_readout.family.takes_support:
        warn_of_sets(head_configs or [])
    options = "".join(f"{name} {value}, " for name, value in settings.options.items())
    logging.info(
        f"{settings.family} readout: {options}force unit {settings.force_unit:.6g} eV / A, "
        f"{sum(p.numel() for p in model.e2ip_readout.parameters())} parameters"
    )
    load_foundation_readout(model, model_foundation)
    return model, output_args


#: What losses learn from beside energies and forces.
_FURTHER = {"stress": ("stress",), "huber": ("stress",), "universal": ("stress",), "virials": ("virials",)}


def _check_atomic_energies(energies: Any, head_configs: Iterable[Any]) -> None:
    """`InputError` for atomic energies that are not finite: averages over frames of which some have no energy."""
    if np.isfinite(np.asarray(energies, dtype=np.float64)).all():
        return
    of_heads = [(head, head.collections.train) for head in head_configs if head.collections is not None]
    frames = [(head, index, config) for head, configs in of_heads for index, config in enumerate(configs)]
    without = [frame for frame in frames if frame[2].properties.get("energy") is None]
    where = ""
    if without:
        head, index, config = without[0]
        where = f"; {len(without)} of {len(frames)} have none, the first is {_place(config, head, index)}"
    raise InputError(
        "the atomic energies that --E0s average gives are not finite, because they need an energy of every training "
        f"frame{where}: leave such frames out, or give --E0s the energies of isolated atoms"
    )


def _check_reference_forces(dataset: Iterable[Any]) -> None:
    """`InputError` for data without forces: of files that are not in memory nobody has looked for any yet."""
    if not any(_is_labelled(frame) and bool(torch.isfinite(frame.forces).any()) for frame in dataset):
        raise InputError(
            "no frame of the training data has finite reference forces, which the readout learns from; of HDF5 data "
            "mace_prepare_data has found none under its --forces_key"
        )


def _is_labelled(frame: Any) -> bool:
    return float(frame.weight * frame.forces_weight) > 0


def _as_it_is(foundation: Any, rebuilt: Any) -> Any:
    """A foundation model without its readout; MACE has rebuilt it, for the training set's atomic energies."""
    dtype = next(foundation.parameters()).dtype
    if torch.get_default_dtype() != dtype:
        name = str(dtype).removeprefix("torch.")
        raise InputError(f"--e2ip_forces fixed keeps the foundation model as it is: give --default_dtype {name}")
    heads = getattr(foundation, "heads", ())
    if len(heads) > 1:  # before 0.3.15; later releases have left one
        raise InputError(
            f"--e2ip_forces fixed: the foundation model has the heads {', '.join(heads)}, and this release of MACE "
            "chooses none of them: make a model of one with mace_select_head first"
        )
    model = copy.deepcopy(without_readout(foundation)).to(next(rebuilt.parameters()).device)
    model.heads = rebuilt.heads  # names in the data; there is one
    return model.requires_grad_(False)


def _end(error: InputError) -> NoReturn:
    print(f"mace_run_train: error: {error}", file=sys.stderr)
    raise SystemExit(2) from error


def _force_unit(args: Namespace, dataset: Any, foundation: Any) -> float:
    """σ_ref in eV/Å: as given, or that of an e²IP foundation model, or the default."""
    given, inherited = args.e2ip_force_unit, find_readout(foundation)
    if given is None and inherited is not None:
        return inherited.settings.force_unit
    return resolve_force_unit(given, forces_rms(dataset) if wants_auto_unit(given) else None)


def forces_rms(dataset: Iterable[Any]) -> float:
    """Root mean square of the finite force components of all labelled frames, in eV/Å.

    Reads the data set, not a loader: iterating a loader would change the order of the batches.
    """
    total, count = 0.0, 0
    for frame in dataset:
        if _is_labelled(frame):
            finite = frame.forces[torch.isfinite(frame.forces)].double()
            total += float(finite.square().sum())
            count += finite.numel()
    if count == 0:
        raise InputError("the training set has no finite reference forces")
    return (total / count) ** 0.5


def warn_of_masked_forces(
    head_configs: Iterable[Any], known: Optional[Sequence[str]] = None, labels: Sequence[str] = ("energy",)
) -> None:
    """Warnings per data set: atoms with NaN or infinite reference forces, and frames with no forces at all.

    Raises
    ------
    InputError
        For positions that are not finite, such atoms MACE leaves out of every neighbourhood without a word; for two
        atoms at the same place; for ``labels`` to learn from that are not finite; and for species
        that are none of those ``known``: in test data it meets them after the training, and leaves no model.
    """
    for head in head_configs:
        paths = [path for option in _FILES for path in listed(getattr(head, option, None))]
        if head.collections is None or any(path.endswith(BINARY) or Path(path).is_dir() for path in paths):
            which = "Data" if head.collections is None else "Some data"
            logging.warning(
                f"{which} of head {head.head_name} are not in memory (HDF5 or LMDB): labels and positions that are no "
                "numbers and atoms at the same place are not looked for"
            )
        if head.collections is None:
            continue
        sets = [("training", head.collections.train), ("validation", head.collections.valid)]
        for name, configs in [*sets, *((f"test ({test})", configs) for test, configs in head.collections.tests)]:
            where = f"of the {name} set (head {head.head_name})"
            wanted = () if name.startswith("test") else tuple(labels)
            for index, config in enumerate(configs):
                try:
                    _check(config, f"frame {index} {where}", known, wanted)
                except InputError:
                    _check(config, f"{_place(config, head, index)} {where}", known, wanted)
                    raise
            forces = [config.properties.get("forces") for config in configs]
            masked = sum(int((~np.isfinite(array).all(-1)).sum()) for array in forces if array is not None)
            if masked:
                logging.warning(
                    f"{masked} atoms {where} have NaN or infinite reference forces: "
                    "they are left out of loss and metrics"
                )
            unlabelled = sum(array is None for array in forces)
            if unlabelled:
                logging.warning(
                    f"{unlabelled} of {len(forces)} frames {where} have no reference forces: "
                    "the uncertainty learns nothing from them"
                )


def _check(config: Any, where: str, known: Optional[Sequence[str]], labels: Sequence[str]) -> None:
    check_atoms(config.atomic_numbers, config.positions, where, known)
    check_apart(config.positions, config.cell, config.pbc, where)
    for label in labels:
        value = config.properties.get(label)
        if value is not None:
            check_finite(value, where, label)


#: Where MACE has the paths of a head's data.
_FILES = ("train_file", "valid_file", "test_file")


def _place(config: Any, head: Any, index: int) -> str:
    """Where a configuration is in the user's files; MACE has left isolated atoms out and may have shuffled the rest."""
    import ase.io

    for path in (path for option in _FILES for path in listed(getattr(head, option, None))):
        if not path.endswith(BINARY) and Path(path).is_file():
            for number, atoms in enumerate(ase.io.iread(path)):
                same = np.array_equal(atoms.numbers, config.atomic_numbers)
                if same and np.array_equal(atoms.positions, config.positions, equal_nan=True):
                    return f"{path}, frame {number}"
    return f"frame {index}"


def warn_of_sets(head_configs: Iterable[Any]) -> None:
    """Warnings per data set whose leverage will not be fitted well; what is not in memory is not looked at, nor are
    configurations of weight zero, which MACE reads and never uses."""
    for head in head_configs:
        if head.collections is None:
            continue
        used = [
            [_as_configuration(config) for config in configs if config.weight > 0]
            for configs in (head.collections.train, head.collections.valid)
        ]
        for text in doubts(*used):
            logging.warning(f"Data of head {head.head_name}: {text}")


def _as_configuration(config: Any) -> Configuration:
    cell = np.zeros((3, 3)) if config.cell is None else config.cell
    state = tuple(str(config.properties.get(name)) for name in ("total_charge", "total_spin"))
    return Configuration(config.atomic_numbers, config.positions, cell, state, config.properties.get("forces"))


class _FiniteForces:
    """A loader whose non-finite reference forces read as the RMS of the others: MACE's force scale stays right."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        for batch in self.loader:
            finite = torch.isfinite(batch.forces)
            if not finite.all():
                batch.forces = batch.forces.where(finite, torch.full_like(batch.forces, forces_rms(self.dataset)))
            yield batch

    def __getattr__(self, name):
        return getattr(self.loader, name)
