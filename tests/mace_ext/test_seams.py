"""The contract with MACE: every seam of the table is where it was, and an unknown MACE stays stock."""

import importlib
import inspect
import pkgutil
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path

import pytest

from mace_ext import seams

#: Parameters of the host's functions that the patches pass on or rely on, by position or by name.
SIGNATURES = {
    "mace.tools.arg_parser.build_default_arg_parser": [],
    "mace.tools.model_script_utils.configure_model": [
        "args",
        "train_loader",
        "atomic_energies",
        "model_foundation",
        "heads",
        "z_table",
        "head_configs",
    ],
    "mace.tools.scripts_utils.get_loss_fn": ["args", "dipole_only", "compute_dipole"],
    "mace.tools.scripts_utils.get_swa": ["args", "model", "optimizer", "swas", "dipole_only"],
    "mace.tools.scripts_utils.get_params_options": ["args", "model"],
    "mace.tools.scripts_utils.extract_config_mace_model": ["model"],
    "mace.tools.train.take_step": [
        "model",
        "loss_fn",
        "batch",
        "optimizer",
        "ema",
        "output_args",
        "max_grad_norm",
        "device",
    ],
    "mace.tools.checkpoint.CheckpointHandler.load_latest": ["self", "state", "swa", "device", "strict"],
    "mace.tools.train.evaluate": ["model", "loss_fn", "data_loader", "output_args", "device"],
    "mace.tools.train.valid_err_log": [
        "valid_loss",
        "eval_metrics",
        "logger",
        "log_errors",
        "epoch",
        "valid_loader_name",
    ],
    "mace.tools.train.MACELoss.update": ["self", "batch", "output"],
    "mace.tools.tables_utils.create_error_table": [
        "table_type",
        "all_data_loaders",
        "model",
        "loss_fn",
        "output_args",
        "log_wandb",
        "device",
        "distributed",
        "skip_heads",
    ],
    "mace.tools.checkpoint.CheckpointBuilder.create_checkpoint": ["state"],
    "mace.tools.checkpoint.CheckpointBuilder.load_checkpoint": ["state", "checkpoint", "strict"],
    "mace.modules.lora.inject_LoRAs": ["model", "rank", "alpha"],
    "mace.modules.models.ScaleShiftMACE.forward": [
        "self",
        "data",
        "training",
        "compute_force",
        "compute_virials",
        "compute_stress",
        "compute_displacement",
        "compute_hessian",
        "compute_edge_forces",
        "compute_atomic_stresses",
        "lammps_mliap",
    ],
    "mace.modules.loss.reduce_loss": ["raw_loss", "ddp"],
}


def stock(path):
    """The host's own object: what a patch wraps, or the base of a class that replaces it."""
    found = pkgutil.resolve_name(path)
    if not inspect.getmodule(inspect.unwrap(found)).__name__.startswith("mace."):
        owner, _, name = path.rpartition(".")
        found = getattr(pkgutil.resolve_name(owner).__bases__[0], name)
    return inspect.unwrap(found)


def test_installed_mace_is_a_supported_release():
    assert metadata.version("mace-torch") in seams.SUPPORTED_MACE


@pytest.mark.parametrize("seam", seams.SEAMS, ids=lambda seam: seam.module)
def test_every_seam_is_found_and_patched(seam):
    importlib.import_module(seam.module)
    assert seam.module in seams.applied, seams.refused.get(seam.module)


@pytest.mark.parametrize("path", SIGNATURES)
def test_signatures(path):
    parameters = list(inspect.signature(stock(path)).parameters)
    assert parameters == SIGNATURES[path]


def test_the_fit_finds_what_it_needs_in_the_arguments_of_train():
    needed = {"model", "train_loader", "valid_loaders", "device", "checkpoint_handler"}
    assert needed <= set(inspect.signature(stock("mace.tools.train.train")).parameters)


def test_the_command_takes_patched_names_from_the_defining_modules():
    from mace.cli import run_train
    from mace.tools import model_script_utils, scripts_utils, tables_utils

    assert run_train.configure_model is model_script_utils.configure_model
    for name in ("get_loss_fn", "get_swa", "get_params_options", "extract_config_mace_model", "remove_pt_head"):
        assert getattr(run_train, name) is getattr(scripts_utils, name)
    assert run_train.create_error_table is tables_utils.create_error_table


def run_in(folder, change, *options):
    """`mace_run_train` in a MACE changed by ``change``, run before MACE is imported."""
    code = f"""
    import sys
    import mace_ext.seams as seams
    {change}
    sys.argv = ["mace_run_train", "--name=x", *{options!r}]
    from mace.cli import run_train
    run_train.main()
    """
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            "seams.SUPPORTED_MACE = ('0.9.9',)",
            [f"mace-torch {metadata.version('mace-torch')} is installed", "supported: mace-torch 0.9.9"],
        ),
        (
            "seams.MODULES['mace.tools.train'] = seams.MODULES['mace.tools.train']._replace(names=('gone',))",
            ["mace.tools.train has no gone", f"supported: mace-torch {metadata.version('mace-torch')}"],
        ),
    ],
    ids=["version", "missing name"],
)
def test_an_unknown_mace_refuses_the_readout_and_nothing_else(tmp_path, change, words):
    refused = run_in(tmp_path, change, "--readout=e2ip")
    assert refused.returncode == 2
    last = refused.stderr.strip().splitlines()[-1]
    assert last.startswith("mace_run_train: error: --readout e2ip does not work with this installation")
    assert all(word in last for word in words), last
    # Without the option, MACE gets as far as its own complaint about missing data.
    plain = run_in(tmp_path, change)
    assert plain.returncode == 1 and "train file is not set" in plain.stderr


def test_the_documented_table_is_the_one_in_force():
    page = Path(__file__).parents[2].joinpath("docs", "mace-training.md").read_text()
    for seam in seams.SEAMS:
        names = ", ".join(f"`{name}`" for name in seam.names)
        assert f"| `{seam.module}` | {names} | {seam.what} |" in page
