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
from mace_ext.compat import observe_outputs

INSTALLED = metadata.version("mace-torch")
PRESENT = [module for module in seams.SEAMS if importlib.util.find_spec(module)]
NAMES = {module: [contract.name_of(term) for term in terms] for module, terms in seams.SEAMS.items()}


@pytest.mark.parametrize("module", PRESENT)
def test_every_seam_is_found_and_patched(module):
    importlib.import_module(module)
    assert seams.outcomes[module] == ""


def test_installed_release_was_tested_and_lacks_only_what_is_optional():
    assert contract.installed("mace-torch") in seams.TESTED and seams.problem() == ""
    assert set(seams.OPTIONAL) <= set(NAMES) | {f"{module}.{name}" for module in NAMES for name in NAMES[module]}
    assert not contract.problems({module: () for module in seams.SEAMS if module not in PRESENT}, seams.OPTIONAL)


def test_everything_that_the_adapter_imports_is_a_term():
    called = {module: [contract.name_of(term) for term in terms] for module, terms in seams.CALLED.items()}
    # Modules whose names are terms.
    known = {**NAMES, **called, "mace": ["data"], "mace.modules": ["models"]}
    for path in sorted(Path(seams.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "mace":
                names = {name.partition(".")[0] for name in known.get(node.module, ())} | {"MACECalculator"}
                assert {alias.name for alias in node.names} <= names, (path.name, node.module)


def run_in(folder, change, *options):
    """`mace_run_train` without options and then with some, in a MACE changed by ``change``, which is run before MACE is
    imported: what either prints on standard error, of which the status is the last line."""
    code = f"""
    import sys, traceback
    import mace_ext.seams as seams
    {change}
    from mace.cli import run_train
    for options in ((), {options!r}):
        sys.argv = ["mace_run_train", "--name=x", *options]
        try:
            run_train.main()
        except SystemExit as end:
            status = end.code
        except Exception:
            status = 1
            traceback.print_exc()
        print("status", status, file=sys.stderr)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    text = subprocess.run(command, capture_output=True, text=True, cwd=folder).stderr
    plain, between, with_options = text.partition("status 1\n")
    assert between, text
    return plain, with_options


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            "seams.SEAMS['mace.tools.train'] = ('gone',)",
            ["mace.tools.train has no gone", f"mace-torch {INSTALLED} is installed; tested: 0.3.13, "],
        ),
        pytest.param(
            "seams.CALLED['mace.modules.blocks'] = ('RadialEmbeddingBlock.forward(edge_lengths, node_attrs)',)",
            ["forward takes (edge_lengths, node_attrs, edge_index, atomic_numbers), not (edge_lengths, node_attrs)"],
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "import mace.cli.run_train as r; r.get_swa = lambda *args: None",
            ["mace.cli.run_train does not take get_swa from mace.tools.scripts_utils"],
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["missing name", "other parameters", "name not taken"],
)
def test_a_mace_outside_the_contract_refuses_the_readout_and_nothing_else(tmp_path, change, words):
    plain, refused = run_in(tmp_path, change, "--readout=e2ip")
    *_, last, status = refused.strip().splitlines()
    assert status == "status 2"
    assert last.startswith("mace_run_train: error: --readout e2ip does not work with this installation")
    assert all(word in last for word in words), last
    # Without the option, MACE gets as far as its own complaint about missing data.
    assert "train file is not set" in plain


def test_an_untested_release_with_everything_is_used_with_one_warning(tmp_path):
    change = "seams.TESTED = ('0.1.0', '0.2.0')"
    plain, text = run_in(tmp_path, change, "--readout=e2ip", "--train_file=none.xyz")
    warning = f"mace-torch {INSTALLED} was not tested with e2ip-plugins (tested: 0.1.0, 0.2.0)"
    assert text.count("was not tested") == 1 and warning in text
    # The run goes on to what is wrong with the options.
    assert "none.xyz: there is no such file" in text
    # Runs without a readout get no warning.
    assert "was not tested" not in plain


def test_outputs_are_observed_where_no_function_returns_them(make_model, make_batch, frames):
    """As in 0.3.13, whose `mace_eval_configs` calls the loaded model directly."""
    model, batch, calls = make_model(), make_batch(frames), []
    module = SimpleNamespace(torch=SimpleNamespace(load=lambda f: model, other=1))
    observe_outputs(module, calls.append, lambda *call: calls.append(call))
    loaded = module.torch.load(f="a.model").to("cpu")
    assert list(loaded.parameters()) == list(model.parameters()) and module.torch.other == 1
    output = loaded(batch, compute_stress=False)
    assert calls[0] is model and calls[1][0] is model and calls[1][1] is batch and calls[1][2] is output


def test_the_documented_table_is_the_one_in_force():
    page = Path(__file__).parents[2].joinpath("docs", "develop", "mace-patches.md").read_text()
    for module, names in NAMES.items():
        assert f"| `{module}` | {', '.join(f'`{name}`' for name in names)} | " in page
