"""What users write: the options of the readout and the checks that come before any work."""

import re

from e2ip_plugins.errors import InputError
from e2ip_plugins.families.presets_tmp import resolve_force_unit
from e2ip_plugins.readout.loss import ForceLossSettings, force_loss_settings
from mace_ext import seams
from mace_ext.files import check_files

OPTIONS = ("e2ip_preset", "e2ip_evidence", "e2ip_evidence_weight", "e2ip_force_unit")
LOSSES = ("weighted", "ef", "stress", "virials", "huber", "universal", "l1l2energyforces")
MODELS = ("MACE", "ScaleShiftMACE")


def check_options(args) -> None:
    """Raise `InputError` for what cannot be trained; does nothing to a run without our options."""
    try:
        _check_options(args)
    except InputError as error:
        # The core knows these options by the names that both hosts share.
        names = r"(?<!--e2ip_)\b(evidence_weight|force_unit)\b"
        raise InputError(re.sub(names, r"--e2ip_\1", str(error))) from error


def _check_options(args) -> None:
    if args.readout != "e2ip":
        given = [name for name in OPTIONS if getattr(args, name) is not None]
        if given:
            raise InputError(f"--{given[0]} has no effect without --readout e2ip; add it or leave --{given[0]} out")
        return
    problem = seams.problem()
    if problem:
        raise InputError(f"--readout e2ip does not work with this installation: {problem}")
    loss_settings(args)
    if not wants_auto_unit(args):
        resolve_force_unit(args.e2ip_force_unit)
    if args.model not in MODELS:
        raise InputError(f"--readout e2ip needs --model {' or '.join(MODELS)}, not {args.model}")
    if args.loss not in LOSSES:
        raise InputError(f"--readout e2ip needs a --loss with energy and forces: {', '.join(LOSSES)}; not {args.loss}")
    for name in ("forces_weight", "swa_forces_weight"):
        if not getattr(args, name) > 0:
            raise InputError(f"--readout e2ip needs --{name} > 0, got {getattr(args, name)}: it learns from forces")
    if not args.compute_forces:
        raise InputError("--readout e2ip needs forces; leave --compute_forces out")
    check_files(args)


def loss_settings(args) -> ForceLossSettings:
    """Settings of the force loss from parsed arguments."""
    return force_loss_settings(args.e2ip_preset or "default", args.e2ip_evidence, args.e2ip_evidence_weight)


def wants_auto_unit(args) -> bool:
    """Whether the force unit comes from the training forces."""
    return str(args.e2ip_force_unit).strip().lower() == "auto"
