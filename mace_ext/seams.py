"""Every place where the plugin takes hold of MACE, and how it does so without breaking stock MACE.

Only the defining modules are patched: what other MACE modules import from them is then patched, too.
Standard library only; the patches themselves import torch when they run, not before.
"""

import importlib
import sys
import warnings
from typing import NamedTuple

from e2ip_plugins import contract

#: Releases that were tested (docs/releases.md). Others are used, with a warning, if they have all that is named here.
TESTED = ("0.3.13", "0.3.14", "0.3.15", "0.3.16")


class Seam(NamedTuple):
    """One patched MACE module.

    Attributes
    ----------
    module : str
    terms : tuple of str
        What the patch replaces or relies on there, with the parameters that it passes on (`contract.problem`).
    patch : str
        Module of `mace_ext.patches` whose ``apply(module)`` does it.
    what : str
    """

    module: str
    terms: tuple
    patch: str
    what: str

    @property
    def names(self) -> tuple:
        """Without their parameters."""
        return tuple(contract.name_of(term) for term in self.terms)


SEAMS = (
    Seam(
        "mace.tools.arg_parser",
        ("build_default_arg_parser()",),
        "arg_parser",
        "the options --readout and --e2ip_*; bad input ends the run before it starts",
    ),
    Seam(
        "mace.tools.model_script_utils",
        ("configure_model(args, train_loader, atomic_energies, model_foundation, heads, z_table, head_configs, ...)",),
        "model_script_utils",
        "the stock model is built first, then upgraded in place; e2ip models as foundation models",
    ),
    Seam(
        "mace.tools.scripts_utils",
        (
            "get_loss_fn(args, ...)",
            "get_swa(args, ...)",
            "get_params_options(args, model, ...)",
            "extract_config_mace_model(model, ...)",
            "remove_pt_head(model, ...)",
        ),
        "scripts_utils",
        "force loss of both stages, the readout's parameters in the optimiser, settings of rebuilt models, "
        "the kept MACE head's readout",
    ),
    Seam(
        "mace.tools.train",
        (
            "MACELoss.__init__(loss_fn)",
            "MACELoss.update(batch, output)",
            "MACELoss.compute()",
            "valid_err_log(valid_loss, eval_metrics, logger, log_errors, epoch, valid_loader_name)",
            "evaluate",
            "train(..., model, train_loader, valid_loaders, device, checkpoint_handler)",
            "take_step(model, loss_fn, batch, optimizer, ema, output_args, max_grad_norm, device)",
        ),
        "train",
        "validation metrics, results file and log lines; the data that the leverage is fitted to; with "
        "--e2ip_forces host, gradients clipped without the readout's",
    ),
    Seam("mace.tools.tables_utils", ("create_error_table", "evaluate"), "tables_utils", "error tables"),
    Seam(
        "mace.tools.checkpoint",
        (
            "CheckpointBuilder.create_checkpoint(state)",
            "CheckpointBuilder.load_checkpoint(state, checkpoint, strict)",
            "CheckpointHandler.load_latest(state, ...)",
        ),
        "checkpoint",
        "a checkpoint with another readout ends the run; the leverage is fitted after the load that follows training",
    ),
    Seam(
        "mace.modules.lora",
        ("inject_LoRAs(model, ...)",),
        "lora",
        "the readout is trained as a whole, not adapted",
    ),
    Seam(
        "mace.calculators.mace",
        ("MACECalculator.__init__", "MACECalculator.calculate(atoms, ...)", "MACECalculator._atoms_to_batch(atoms)"),
        "calculators_mace",
        "uncertainties in the results of `MACECalculator`, committees included",
    ),
    Seam(
        "mace.cli.eval_configs",
        (
            "parse_args()",
            "argparse",
            "get_model_output(model, batch, ...)",
            "torch.load",
            "run(args)",
            "main()",
            "ase.io",
        ),
        "eval_configs",
        "uncertainty columns in the file that `mace_eval_configs` writes, the option --e2ip_calibration",
    ),
    Seam(
        "mace.cli.plot_train",
        ("plot(data, ...)", "run"),
        "plot_train",
        "`mace_plot_train` without --heads works under pandas 2, which stock MACE does not",
    ),
)

MODULES = {seam.module: seam for seam in SEAMS}

#: What not every release has, and what is done without it.
OPTIONAL = {
    "mace.modules.lora": "0.3.15 and later: before, MACE has no LoRA",
    "mace.cli.eval_configs.get_model_output": "0.3.14 and later: before, the loaded model tells of its outputs",
}

#: Names that are called and not replaced.
CALLED = {
    "mace.modules.models": (
        "ScaleShiftMACE.forward(data, training, compute_force, compute_virials, compute_stress, compute_displacement, "
        "compute_hessian, compute_edge_forces, compute_atomic_stresses, lammps_mliap)",
    ),
    "mace.modules.blocks": ("RadialEmbeddingBlock.forward(edge_lengths, node_attrs, edge_index, atomic_numbers)",),
    "mace.modules.utils": ("get_edge_vectors_and_lengths(positions, edge_index, shifts, ...)",),
    "mace.modules.loss": ("reduce_loss(raw_loss, ddp)",),
    "mace.tools": ("AtomicNumberTable", "TensorDict"),
    "mace.tools.torch_geometric": ("Batch.from_data_list",),
    "mace.tools.torch_geometric.dataloader": ("DataLoader",),
    "mace.data": (
        "config_from_atoms(atoms, ..., head_name)",
        "AtomicData.from_config(config, z_table, cutoff, heads, ...)",
    ),
}

#: Names that the command takes from the defining modules: patched there, they are patched here.
TAKEN = {
    "mace.cli.run_train": {
        "mace.tools.model_script_utils": ("configure_model",),
        "mace.tools.scripts_utils": (
            "get_loss_fn",
            "get_swa",
            "get_params_options",
            "extract_config_mace_model",
            "remove_pt_head",
        ),
        "mace.tools.tables_utils": ("create_error_table",),
    }
}

#: Modules that were patched, and the reason for each one that could not be.
applied: set = set()
refused: dict = {}
_warned: set = set()


def apply(module) -> None:
    """Patch a freshly loaded module, or leave it stock and note why.

    The parser is patched wherever that is possible, so that ``--readout`` can say what is wrong.
    """
    seam = MODULES[module.__name__]
    wrong = contract.problems_of(module, seam.terms, seam.module, OPTIONAL)
    if wrong:
        refused[seam.module] = "; ".join(wrong)
        return
    importlib.import_module(f"mace_ext.patches.{seam.patch}").apply(module)
    applied.add(seam.module)


def problem() -> str:
    """Why ``--readout`` cannot run here, or an empty string."""
    reasons = list(dict.fromkeys(refused.values()))
    if not reasons:
        unpatched = [name for name in MODULES if name in sys.modules and name not in applied]
        if unpatched:
            reasons = [f"{', '.join(unpatched)} was imported before the plugin's import hook was in place"]
    reasons = reasons or contract.problems(CALLED) or _not_taken()
    if not reasons:
        return ""
    version = contract.installed("mace-torch") or "of unknown version"
    return f"{'; '.join(reasons)} (mace-torch {version} is installed; tested: {', '.join(TESTED)})"


def _not_taken() -> list:
    """What is wrong with `TAKEN`, as far as it is loaded."""
    return [
        f"{user} does not take {name} from {source}"
        for user, sources in TAKEN.items()
        for source, names in sources.items()
        for name in names
        if user in sys.modules
        and source in sys.modules
        and getattr(sys.modules[user], name, None) is not getattr(sys.modules[source], name)
    ]


def warn_if_untested() -> None:
    """One warning in a process where mace-torch is none of the releases in `TESTED`."""
    text = contract.untested("mace-torch", contract.installed("mace-torch"), TESTED)
    if text and text not in _warned:
        _warned.add(text)
        warnings.warn(text, stacklevel=3)
