"""From parsed arguments and the training set to an e²IP model."""

import copy
import inspect
import logging
import sys
from argparse import Namespace
from typing import Any, Callable, Tuple

import torch
from ase.data import chemical_symbols

from e2ip_plugins.errors import InputError
from e2ip_plugins.readout.settings import resolve_force_unit, wants_auto_unit
from mace_ext.compat import option as option_of
from mace_ext.model.foundation import load_foundation_readout, without_readout
from mace_ext.model.model import ScaleShiftMACE, add_readout
from mace_ext.model.readout import find_readout
from mace_ext.training.data_sets import REPLAY_HEAD, check_atomic_energies, check_configurations, warn_of_sets
from mace_ext.training.labels import FiniteForces
from mace_ext.training.options import settings_of


def configure_e2ip_model(stock: Callable, *args: Any, **kwargs: Any) -> Tuple[ScaleShiftMACE, Any]:
    """``configure_model`` of `mace.tools.model_script_utils` for a run with ``--readout``.

    Parameters
    ----------
    stock : callable
        The stock function; its model is upgraded in place, foundation weights already loaded.
    *args, **kwargs
        Its arguments.

    Returns
    -------
    model, output_args
    """
    call = inspect.signature(stock).bind(*args, **kwargs)
    call.apply_defaults()
    try:
        return _configure(stock, **call.arguments)
    except InputError as error:
        print(f"mace_run_train: error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def _configure(
    stock: Callable,
    args: Namespace,
    train_loader: Any,
    atomic_energies: Any,
    model_foundation: Any,
    z_table: Any,
    head_configs: Any,
    **others: Any,
) -> Tuple[ScaleShiftMACE, Any]:
    heads = head_configs or []
    check_configurations(heads, z_table and [chemical_symbols[z] for z in z_table.zs], args.loss)
    check_atomic_energies(atomic_energies, heads)
    if option_of(args, "pseudolabel_replay") and REPLAY_HEAD in (head.head_name for head in heads):
        logging.warning(
            f"the references of head {REPLAY_HEAD} are predictions of the foundation model (--pseudolabel_replay): its "
            "uncertainties tell of the distance from that model, not from the truth"
        )
    loader = FiniteForces(train_loader)
    loader.check()
    model, output_args = stock(
        args,
        loader,
        atomic_energies,
        without_readout(model_foundation),
        z_table=z_table,
        head_configs=head_configs,
        **others,
    )
    settings = settings_of(args, _force_unit(args, loader, model_foundation))
    if settings.forces == "fixed":
        model = _unchanged(model_foundation, model)
    add_readout(model, settings, seed=args.seed)
    if model.e2ip_readout.family.takes_support:
        warn_of_sets(heads)
    options = "".join(f"{name} {value}, " for name, value in settings.options.items())
    logging.info(
        f"{settings.family} readout: {options}force unit {settings.force_unit:.6g} eV / A, "
        f"{sum(p.numel() for p in model.e2ip_readout.parameters())} parameters"
    )
    load_foundation_readout(model, model_foundation)
    return model, output_args


def _unchanged(foundation: Any, rebuilt: Any) -> Any:
    """Return a foundation model without its readout; MACE has rebuilt it, for the training set's atomic energies."""
    dtype = next(foundation.parameters()).dtype
    if torch.get_default_dtype() != dtype:
        name = str(dtype).removeprefix("torch.")
        raise InputError(f"--e2ip_forces fixed keeps the foundation model as it is: give --default_dtype {name}")
    heads = getattr(foundation, "heads", ())
    if len(heads) > 1:  # before 0.3.15; later releases have left one
        raise InputError(
            f"--e2ip_forces fixed: the foundation model has the heads {', '.join(heads)}; take one by mace_select_head"
        )
    model = copy.deepcopy(without_readout(foundation)).to(next(rebuilt.parameters()).device)
    model.heads = rebuilt.heads  # names in the data; there is one
    return model.requires_grad_(False)


def _force_unit(args: Namespace, loader: FiniteForces, foundation: Any) -> float:
    """Return σ_ref in eV/Å: as given, or that of an e²IP foundation model, or the default."""
    unit, inherited = args.e2ip_force_unit, find_readout(foundation)
    if unit is None and inherited is not None:
        return inherited.settings.force_unit
    return resolve_force_unit(unit, loader.forces_rms if wants_auto_unit(unit) else None)
