"""Every place where the plugin takes hold of MACE, and how it does so without breaking stock MACE.

Only the defining modules are patched: what other MACE modules import from them is then patched, too.
Standard library only; the patches themselves import torch when they run, not before.
"""

import importlib
import sys
from typing import Dict, List, Tuple

from e2ip_plugins import contract
from mace_ext.switch import disabled

#: Releases that were tested (docs/reference/releases.md). Others are used, with a warning, if they have all that is
#: named here.
TESTED = ("0.3.13", "0.3.14", "0.3.15", "0.3.16")

#: Patched modules: what the patch replaces or relies on there, with the parameters that it passes on
#: (`contract.problem`). The patch is ``apply`` in the module of `mace_ext.patches` with the same last name; its
#: docstring and docs/develop/mace-patches.md say what it is for.
SEAMS: Dict[str, Tuple[str, ...]] = {
    "mace.tools.arg_parser": ("build_default_arg_parser()",),
    "mace.tools.model_script_utils": (
        "configure_model(args, train_loader, atomic_energies, model_foundation, heads, z_table, head_configs, ...)",
    ),
    "mace.tools.scripts_utils": (
        "get_loss_fn(args, ...)",
        "get_swa(args, ...)",
        "get_params_options(args, model, ...)",
        "extract_config_mace_model(model, ...)",
        "remove_pt_head(model, ...)",
    ),
    "mace.tools.train": (
        "MACELoss.__init__(loss_fn)",
        "MACELoss.update(batch, output)",
        "MACELoss.compute()",
        "valid_err_log(valid_loss, eval_metrics, logger, log_errors, epoch, valid_loader_name)",
        "evaluate(model, ...)",
        "train(..., model, train_loader, valid_loaders, device, checkpoint_handler)",
        "take_step(model, loss_fn, batch, optimizer, ema, output_args, max_grad_norm, device)",
    ),
    "mace.tools.multihead_tools": ("dict_head_to_dataclass(head, head_name, args)",),
    "mace.data.atomic_data": ("AtomicData.from_config(config, z_table, cutoff, heads, ...)",),
    "mace.tools.tables_utils": ("create_error_table", "evaluate"),
    "mace.tools.checkpoint": (
        "CheckpointBuilder.create_checkpoint(state)",
        "CheckpointBuilder.load_checkpoint(state, checkpoint, strict)",
        "CheckpointHandler.load_latest(state, ...)",
    ),
    "mace.modules.lora": ("inject_LoRAs(model, ...)",),
    "mace.calculators.mace": (
        "MACECalculator.__init__",
        "MACECalculator.calculate(atoms, ...)",
        "MACECalculator.get_property",
        "MACECalculator.export_properties",
        "MACECalculator._atoms_to_batch(atoms)",
    ),
    "mace.cli.eval_configs": (
        "parse_args()",
        "argparse",
        "get_model_output(model, batch, ...)",
        "torch.load",
        "run(args)",
        "main()",
        "ase.io",
    ),
    "mace.cli.plot_train": ("plot(data, ...)", "run"),
}

#: What some releases lack, and what is done without it.
OPTIONAL = {
    "mace.modules.lora": "0.3.15 and later: before, MACE has no LoRA",
    "mace.cli.eval_configs.get_model_output": "0.3.14 and later: before, the loaded model reports its outputs",
}

#: Names that are called and not replaced.
CALLED = {
    "mace.modules.models": (
        "ScaleShiftMACE.forward(data, training, compute_force, compute_virials, compute_stress, compute_displacement, "
        "compute_hessian, compute_edge_forces, compute_atomic_stresses, lammps_mliap)",
    ),
    "mace.modules.blocks": ("RadialEmbeddingBlock.forward(edge_lengths, node_attrs, edge_index, atomic_numbers)",),
    "mace.modules.utils": ("get_edge_vectors_and_lengths(positions, edge_index, shifts, ...)",),
    "mace.tools": ("AtomicNumberTable", "TensorDict"),
    "mace.tools.torch_geometric": ("Batch.from_data_list",),
    "mace.tools.torch_geometric.dataloader": ("DataLoader",),
    "mace.data": (
        "config_from_atoms(atoms, ..., head_name)",
        "AtomicData.from_config(config, z_table, cutoff, heads, ...)",
        "HDF5Dataset.__init__(file_path, r_max, z_table, ...)",
    ),
    "mace.data.lmdb_dataset": ("LMDBDataset.__init__(file_path, r_max, z_table, ...)",),
}

#: What the command `mace.cli.run_train` takes from the defining modules: patched there, it is patched here.
TAKEN = (
    "mace.tools.model_script_utils.configure_model",
    "mace.tools.scripts_utils.get_loss_fn",
    "mace.tools.scripts_utils.get_swa",
    "mace.tools.scripts_utils.get_params_options",
    "mace.tools.scripts_utils.extract_config_mace_model",
    "mace.tools.scripts_utils.remove_pt_head",
    "mace.tools.multihead_tools.dict_head_to_dataclass",
    "mace.tools.tables_utils.create_error_table",
)

#: Modules that have been loaded in this process: an empty string if patched, otherwise why that was not possible.
outcomes: Dict[str, str] = {}


def apply(module) -> None:
    """Patch a freshly loaded module, or leave it stock and note why.

    The parser is patched wherever that is possible, so that ``--readout`` can say what is wrong.
    """
    name = module.__name__
    outcomes[name] = "; ".join(contract.problems_of(module, SEAMS[name], name, OPTIONAL))
    if not outcomes[name]:
        importlib.import_module(f"mace_ext.patches.{name.rpartition('.')[2]}").apply(module)


def problem() -> str:
    """Return why ``--readout`` cannot run here, or an empty string."""
    reasons = list(dict.fromkeys(filter(None, outcomes.values())))
    unpatched = [name for name in SEAMS if name in sys.modules and name not in outcomes]
    if unpatched and not reasons and disabled():
        return "E2IP_DISABLE is set, which turns the plugin off; unset it"
    if unpatched and not reasons:
        reasons = [f"{', '.join(unpatched)} was imported before the plugin's import hook was in place"]
    reasons = reasons or contract.problems(CALLED) or _not_taken()
    return contract.explained(reasons, "mace-torch", contract.installed("mace-torch"), TESTED)


def _not_taken() -> List[str]:
    """Return what is wrong with `TAKEN`, as far as the modules are loaded."""
    command, reasons = sys.modules.get("mace.cli.run_train"), []
    for path in TAKEN:
        source, _, name = path.rpartition(".")
        if command is not None and source in sys.modules:
            if getattr(command, name, None) is not getattr(sys.modules[source], name):
                reasons.append(f"mace.cli.run_train does not take {name} from {source}")
    return reasons


def warn_if_untested() -> None:
    """Warn, once in a process, if mace-torch is none of the releases in `TESTED`."""
    contract.warn_if_untested("mace-torch", contract.installed("mace-torch"), TESTED)
