"""What users write: ``--readout`` and the options of every predictive family, and the settings that these make."""

import math
from argparse import ArgumentParser, Namespace
from typing import Any, Dict, List

from e2ip_plugins import families
from e2ip_plugins.families.interface import Option
from e2ip_plugins.readout.settings import Settings

#: Value of ``--readout`` that leaves MACE as it is.
STOCK = "stock"
#: Of all readouts, whatever their family. MACE's parser has ASCII help.
FORCE_UNIT = Option(
    "force_unit",
    "force unit in eV/A, or auto: 0.03 of the training forces' component RMS (default: 0.0433641, 1 kcal/mol/A)",
)
FORCES = Option(
    "forces",
    "what trains the forces: likelihood (default); host: MACE's own loss alone, to the last bit, while the readout "
    "learns beside it; or fixed: nothing, they stay those of --foundation_model, and the readout learns alone",
)
COMMON = (FORCE_UNIT, FORCES)


def known_options() -> Dict[str, Dict[str, Option]]:
    """Return every option by its name, then by the families that have it."""
    known: Dict[str, Dict[str, Option]] = {}
    for readout, family in families.table().items():
        for option in (*family.options, *COMMON):
            known.setdefault(option.name, {})[readout] = option
    return known


def add_options(parser: ArgumentParser) -> None:
    """Add ``--readout`` and ``--e2ip_*``; by default everything is stock MACE."""
    group = parser.add_argument_group("e2ip", "force uncertainties (e2ip-plugins)")
    group.add_argument(
        "--readout",
        choices=[STOCK, *families.table()],
        default=STOCK,
        help="predictive family of the forces: every force gets a 3x3 covariance, with e2ip a full one",
    )
    for name, owners in known_options().items():
        by_text: Dict[str, List[str]] = {}
        for readout, option in owners.items():
            by_text.setdefault(option.help, []).append(readout)
        texts = [f"readout {', '.join(readouts)}: {text}" for text, readouts in by_text.items()]
        common = [option.help for option in COMMON if option.name == name]
        text = "; ".join(common or texts)
        # Strings, converted by `Settings.of`: families may share a name. "%(default).0s" prints nothing and keeps
        # MACE's formatter from adding "(default: None)".
        group.add_argument(f"--e2ip_{name}", help=text.replace("%", "%%") + "%(default).0s")


def has_readout(args: Namespace) -> bool:
    """Return whether a run is to have a readout."""
    return getattr(args, "readout", STOCK) != STOCK


def given_options(args: Namespace) -> Dict[str, Any]:
    """Return options of any readout that the user wrote, without their prefix."""
    values = {name: getattr(args, f"e2ip_{name}", None) for name in known_options()}
    return {name: value for name, value in values.items() if value is not None}


def settings_of(args: Namespace, force_unit: float = math.nan) -> Settings:
    """Return the settings of the readout; what is not this family's option is left to `mace_ext.training.checks`.

    Parameters
    ----------
    args
        Parsed arguments.
    force_unit : float
        σ_ref in eV/Å, known once the model is made. The loss, which MACE makes before, does without.

    Raises
    ------
    InputError
        For values that mean nothing or do not go together.
    """
    names = [option.name for option in families.get(args.readout).options]
    options = {name: value for name, value in given_options(args).items() if name in names}
    return Settings.of(args.readout, options, force_unit, args.e2ip_forces)
