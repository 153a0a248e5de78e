"""Checks of the options of the readout, before a run starts."""

import re
from argparse import Namespace
from pathlib import Path

from e2ip_plugins.errors import InputError
from e2ip_plugins.readout.settings import resolve_force_unit, wants_auto_unit
from mace_ext import seams
from mace_ext.compat import option as option_of
from mace_ext.training.data_sets import REPLAY_HEAD, check_files, check_structures
from mace_ext.training.options import given_options, has_readout, known_options, settings_of

LOSSES = ("weighted", "ef", "stress", "virials", "huber", "universal", "l1l2energyforces")
MODELS = ("MACE", "ScaleShiftMACE")


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
    _check_values(args)
    if args.model not in MODELS:
        raise InputError(f"{readout} needs --model {' or '.join(MODELS)}, not {args.model}")
    if args.loss not in LOSSES:
        raise InputError(f"{readout} needs a --loss with energy and forces: {', '.join(LOSSES)}; not {args.loss}")
    for name in ("forces_weight", "swa_forces_weight"):
        if not getattr(args, name) > 0:
            raise InputError(f"{readout} needs --{name} > 0, got {getattr(args, name)}: it learns from forces")
    if args.e2ip_forces == "fixed":
        _keep_model(args)
    if args.e2ip_forces in ("host", "fixed") and args.lbfgs:
        # It takes one step for all weights together.
        raise InputError(f"--e2ip_forces {args.e2ip_forces} does not go with --lbfgs; leave one of them out")
    if not args.compute_forces:
        raise InputError(f"{readout} needs forces; leave --compute_forces out")
    check_files(args)
    # Names of published models are no files.
    if args.e2ip_forces == "fixed" and Path(args.foundation_model).is_file():
        _check_kept_model(args)


def _check_names(args: Namespace) -> None:
    """Raise `InputError` for options that are none of the chosen readout's."""
    for name in given_options(args):
        owners = known_options()[name]
        if not has_readout(args):
            choice = " or ".join(f"--readout {owner}" for owner in owners)
            raise InputError(f"--e2ip_{name} has no effect without {choice}; add it or leave --e2ip_{name} out")
        if args.readout not in owners:
            raise InputError(
                f"--e2ip_{name} is no option of --readout {args.readout}, but of {', '.join(owners)}; leave it out"
            )


def _check_values(args: Namespace) -> None:
    """Raise `InputError`, with the names that options have here, for values that the readout does not take."""
    try:
        settings_of(args)
        if not wants_auto_unit(args.e2ip_force_unit):
            resolve_force_unit(args.e2ip_force_unit)
    except InputError as error:
        # The core knows options by the names that NequIP has, too; those with an underscore are no ordinary words.
        options, text = given_options(args), str(error)
        names = "|".join(name for name in options if "_" in name)
        text = re.sub(rf"(?<!--e2ip_)\b({names})\b", r"--e2ip_\1", text) if names else text
        about = text.removeprefix("unknown ").partition(" ")[0]
        raise InputError(f"--e2ip_{about}: {text}" if about in options else text) from error


def _keep_model(args: Namespace) -> None:
    """Set the options of MACE that go with a model that stays as it is."""
    if args.foundation_model is None:
        raise InputError("--e2ip_forces fixed trains the readout of an existing model: name it with --foundation_model")
    # Names of published models have no ending.
    if Path(args.foundation_model).suffix and not Path(args.foundation_model).is_file():
        raise InputError(f"--foundation_model {args.foundation_model}: no such file")
    if option_of(args, "lora"):
        raise InputError("--e2ip_forces fixed does not go with --lora True, which changes the model; leave one out")
    # Its elements, its atomic energies, and nothing to replay.
    args.foundation_model_elements, args.multiheads_finetuning, args.E0s = True, False, "foundation"


def _check_kept_model(args: Namespace) -> None:
    """Raise `InputError` where a model that stays as it is has several heads, or does not know a species."""
    from mace_ext.model.files import open_file, species_of  # MACE itself is not loaded yet where options are made

    where = f"--foundation_model {args.foundation_model}"
    model = open_file(Path(args.foundation_model))
    # MACE passes over the head of replayed data, and without a choice takes the first of the others.
    every = getattr(model, "heads", None) or ()
    heads = [name for name in every if name != REPLAY_HEAD]
    head = getattr(args, "foundation_head", None)
    if len(heads) > 1 and hasattr(args, "foundation_head") and head is None:
        raise InputError(f"{where} has the heads {', '.join(heads)}: give --foundation_head, the one that is to stay")
    if every and head is not None and head not in every:
        raise InputError(f"--foundation_head {head}: {where} has the heads {', '.join(heads)}")
    check_structures(args, species_of(model))
