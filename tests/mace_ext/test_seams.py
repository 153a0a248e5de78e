"""The contract with MACE: every seam of the table is where it was, and an unknown MACE stays stock."""

import ast
import importlib
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from e2ip_plugins import contract
from mace_ext import seams
from mace_ext.compat import hear_outputs

INSTALLED = metadata.version("mace-torch")

SEAMS = [seam for seam in seams.SEAMS if importlib.util.find_spec(seam.module)]


def test_installed_release_was_tested_and_has_everything():
    assert contract.installed("mace-torch") in seams.TESTED
    assert seams.problem() == ""


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.module)
def test_every_seam_is_found_and_patched(seam):
    importlib.import_module(seam.module)
    assert seam.module in seams.applied, seams.refused.get(seam.module)


def test_only_what_is_optional_is_missing():
    terms = {seam.module: seam.terms for seam in seams.SEAMS}
    assert set(seams.OPTIONAL) <= set(terms) | {f"{seam.module}.{name}" for seam in seams.SEAMS for name in seam.names}
    assert not contract.problems({seam.module: () for seam in seams.SEAMS if seam not in SEAMS}, seams.OPTIONAL)


def test_everything_that_the_adapter_imports_is_a_term():
    terms = {seam.module: seam.names for seam in seams.SEAMS}
    terms |= {module: [contract.name_of(term) for term in names] for module, names in seams.CALLED.items()}
    # Modules whose names are terms.
    terms |= {"mace": ["data"], "mace.modules": ["models"]}
    root = Path(seams.__file__).parent
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "mace":
                known = {name.partition(".")[0] for name in terms.get(node.module, ())}
                assert {alias.name for alias in node.names} <= known | {"MACECalculator"}, (path.name, node.module)


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
            "seams.MODULES['mace.tools.train'] = seams.MODULES['mace.tools.train']._replace(terms=('gone',))",
            ["mace.tools.train has no gone", f"mace-torch {INSTALLED} is installed; tested: 0.3.13, "],
        ),
        (
            "seams.CALLED['mace.modules.loss'] = ('reduce_loss(raw_loss)',)",
            ["mace.modules.loss.reduce_loss takes (raw_loss, ddp), not (raw_loss)"],
        ),
        (
            "import mace.cli.run_train as r; r.get_swa = lambda *args: None",
            ["mace.cli.run_train does not take get_swa from mace.tools.scripts_utils"],
        ),
    ],
    ids=["missing name", "other parameters", "name not taken"],
)
def test_a_mace_outside_the_contract_refuses_the_readout_and_nothing_else(tmp_path, change, words):
    refused = run_in(tmp_path, change, "--readout=e2ip")
    assert refused.returncode == 2
    last = refused.stderr.strip().splitlines()[-1]
    assert last.startswith("mace_run_train: error: --readout e2ip does not work with this installation")
    assert all(word in last for word in words), last
    # Without the option, MACE gets as far as its own complaint about missing data.
    plain = run_in(tmp_path, change)
    assert plain.returncode == 1 and "train file is not set" in plain.stderr


def test_an_untested_release_with_everything_is_used_with_one_warning(tmp_path):
    change = "seams.TESTED = ('0.1.0', '0.2.0')"
    done = run_in(tmp_path, change, "--readout=e2ip", "--train_file=none.xyz")
    told = f"mace-torch {INSTALLED} was not tested with e2ip-plugins (tested: 0.1.0, 0.2.0)"
    assert done.stderr.count("was not tested") == 1 and told in done.stderr
    # On it goes to what is wrong with the options.
    assert "none.xyz: there is no such file" in done.stderr
    # Who does not use it hears nothing.
    assert "was not tested" not in run_in(tmp_path, change).stderr


def test_outputs_are_heard_where_no_function_gives_them(make_model, make_batch, frames):
    """As in 0.3.13, whose `mace_eval_configs` calls the loaded model as it is."""
    model, batch, heard = make_model(), make_batch(frames), []
    module = SimpleNamespace(torch=SimpleNamespace(load=lambda f: model, other=1))
    hear_outputs(module, heard.append, lambda *call: heard.append(call))
    loaded = module.torch.load(f="a.model").to("cpu")
    assert list(loaded.parameters()) == list(model.parameters()) and module.torch.other == 1
    output = loaded(batch, compute_stress=False)
    assert heard[0] is model and heard[1][0] is model and heard[1][1] is batch and heard[1][2] is output


def test_the_documented_table_is_the_one_in_force():
    page = Path(__file__).parents[2].joinpath("docs", "mace-training.md").read_text()
    for seam in seams.SEAMS:
        names = ", ".join(f"`{name}`" for name in seam.names)
        assert f"| `{seam.module}` | {names} | {seam.what} |" in page
