"""What users write: the options of the readout and the checks that need no training data in memory."""

from e2ip_plugins.errors import InputError
from e2ip_plugins.loss import ForceLossSettings, force_loss_settings
from e2ip_plugins.presets import resolve_force_unit
from mace_ext import seams

OPTIONS = ("e2ip_preset", "e2ip_evidence", "e2ip_evidence_weight", "e2ip_force_unit")
LOSSES = ("weighted", "ef", "stress", "virials", "huber", "universal", "l1l2energyforces")
MODELS = ("MACE", "ScaleShiftMACE")


def check_options(args) -> None:
    """Raise `InputError` for what cannot be trained; does nothing without ``--readout e2ip``."""
    if args.readout != "e2ip":
        given = [name for name in OPTIONS if getattr(args, name) is not None]
        if given:
            raise InputError(f"--{given[0]} has no effect without --readout e2ip; add it or leave --{given[0]} out")
        return
    problem = seams.problem()
    if problem:
        raise InputError(f"--readout e2ip does not work with this installation: {problem}")
    loss_settings(args)
    if str(args.e2ip_force_unit).strip().lower() != "auto":
        resolve_force_unit(args.e2ip_force_unit)


def loss_settings(args) -> ForceLossSettings:
    """Settings of the force loss from parsed arguments."""
    return force_loss_settings(args.e2ip_preset or "default", args.e2ip_evidence, args.e2ip_evidence_weight)
