"""Every place where the plugin takes hold of MACE, and how it does so without breaking stock MACE.

Only the defining modules are patched: what other MACE modules import from them is then patched, too.
Standard library only; the patches themselves import torch when they run, not before.
"""

import importlib
import sys
from typing import NamedTuple

#: Releases of mace-torch on which the contract test of this table has passed.
SUPPORTED_MACE = ("0.3.16",)


class Seam(NamedTuple):
    """One patched MACE module.

    Attributes
    ----------
    module : str
    names : tuple of str
        What the patch replaces or relies on there.
    patch : str
        Module of `mace_ext.patches` whose ``apply(module)`` does it.
    what : str
    """

    module: str
    names: tuple
    patch: str
    what: str


SEAMS = (
    Seam(
        "mace.tools.arg_parser",
        ("build_default_arg_parser",),
        "arg_parser",
        "the options --readout and --e2ip_*; bad input ends the run before it starts",
    ),
    Seam(
        "mace.tools.model_script_utils",
        ("configure_model",),
        "model_script_utils",
        "the stock model is built first, then upgraded in place; e2ip models as foundation models",
    ),
    Seam(
        "mace.tools.scripts_utils",
        ("get_loss_fn", "get_swa", "get_params_options", "extract_config_mace_model", "remove_pt_head"),
        "scripts_utils",
        "force loss of both stages, the readout's parameters in the optimiser, settings of rebuilt models, "
        "the kept MACE head's readout",
    ),
    Seam(
        "mace.tools.train",
        ("MACELoss", "valid_err_log", "evaluate", "train", "take_step"),
        "train",
        "validation metrics, results file and log lines; the data that the leverage is fitted to; with "
        "--e2ip_forces host, gradients clipped without the readout's",
    ),
    Seam("mace.tools.tables_utils", ("create_error_table", "evaluate"), "tables_utils", "error tables"),
    Seam(
        "mace.tools.checkpoint",
        ("CheckpointBuilder.create_checkpoint", "CheckpointBuilder.load_checkpoint", "CheckpointHandler.load_latest"),
        "checkpoint",
        "a checkpoint with another readout ends the run; the leverage is fitted after the load that follows training",
    ),
    Seam(
        "mace.modules.lora",
        ("inject_LoRAs",),
        "lora",
        "the readout is trained as a whole, not adapted",
    ),
    Seam(
        "mace.calculators.mace",
        tuple(
            f"MACECalculator.{name}"
            for name in ("__init__", "_create_result_tensors", "_slice_real_outputs", "calculate")
        ),
        "calculators_mace",
        "uncertainties in the results of `MACECalculator`, committees included",
    ),
    Seam(
        "mace.cli.eval_configs",
        ("parse_args", "argparse", "get_model_output", "run", "main", "ase.io"),
        "eval_configs",
        "uncertainty columns in the file that `mace_eval_configs` writes, the option --e2ip_calibration",
    ),
    Seam(
        "mace.cli.plot_train",
        ("plot", "run"),
        "plot_train",
        "`mace_plot_train` without --heads works under pandas 2, which stock 0.3.16 does not",
    ),
)

MODULES = {seam.module: seam for seam in SEAMS}

#: Modules that were patched, and the reason for each one that could not be.
applied: set = set()
refused: dict = {}


def apply(module) -> None:
    """Patch a freshly loaded module, or leave it stock and note why.

    The parser is patched in any case, so that ``--readout`` can say what is wrong.
    """
    seam = MODULES[module.__name__]
    reason = version_problem()
    missing = [name for name in seam.names if not _has(module, name)]
    if missing:
        reason = reason or f"{seam.module} has no {', '.join(missing)}"
    if reason:
        refused[seam.module] = reason
        if seam.patch != "arg_parser" or missing:
            return
    importlib.import_module(f"mace_ext.patches.{seam.patch}").apply(module)
    if not reason:
        applied.add(seam.module)


def problem() -> str:
    """Why ``--readout`` cannot run here, or an empty string."""
    reasons = list(dict.fromkeys(refused.values()))
    if not reasons:
        unpatched = [name for name in MODULES if name in sys.modules and name not in applied]
        if unpatched:
            reasons = [f"{', '.join(unpatched)} was imported before the plugin's import hook was in place"]
    return f"{'; '.join(reasons)} (supported: mace-torch {', '.join(SUPPORTED_MACE)})" if reasons else ""


def version_problem() -> str:
    """Empty for a supported release of mace-torch."""
    from importlib import metadata

    try:
        version = metadata.version("mace-torch")
    except metadata.PackageNotFoundError:
        version = "unknown"
    if version in SUPPORTED_MACE:
        return ""
    return f"mace-torch {version} is installed"


def _has(module, dotted: str) -> bool:
    for name in dotted.split("."):
        if not hasattr(module, name):
            return False
        module = getattr(module, name)
    return True
