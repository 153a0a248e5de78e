"""What the adapter relies on in NequIP: moves in a new release show up here first."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import lightning
import pytest
import torch
from nequip.data import _key_registry, to_ase
from nequip.scripts import _compile_utils
from nequip.scripts._package_utils import _INTERNAL_MODULES
from nequip.train import NequIPLightningModule, metrics_manager
from nequip.train.callbacks import write_xyz

import nequip_ext
from e2ip_plugins import families
from e2ip_plugins.contract import name_of
from e2ip_plugins.errors import InputError
from e2ip_plugins.keys import LEVERAGE
from nequip_ext import contract, registration, setup
from nequip_ext.compat import XYZFileWriter
from nequip_ext.inference.batches import transforms_of
from nequip_ext.model.checkpoints import explained
from nequip_ext.training.writers import mend_writers

KEYS = (*families.get(families.DEFAULT).output_keys(), LEVERAGE)
OF_FRAMES = ["energy_uncertainty", "energy_error_vector", "stress_uncertainty", "stress_cov"]


def test_installed_release_was_tested_and_has_everything():
    assert contract.contract.installed("nequip") in contract.TESTED
    assert contract.problem() == ""


def test_torch_sim_has_everything():
    pytest.importorskip("torch_sim")
    pytest.importorskip("nequip.integrations.torchsim")
    assert contract.problem("torchsim") == ""


def test_optional_names_are_terms():
    terms = {f"{module}.{name_of(term)}" for module, names in contract.TERMS.items() for term in names}
    assert set(contract.OPTIONAL) <= terms | set(contract.TERMS)


def test_everything_that_the_adapter_imports_is_a_term():
    """What is imported from NequIP anywhere but in compat.py, which knows the releases that lack it."""
    root = Path(nequip_ext.__file__).parent
    for path in sorted(root.rglob("*.py")):
        of_part = contract.PARTS.get(path.parent.name) or contract.PARTS.get(path.stem, {})
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "nequip":
                for alias in node.names:
                    terms = (*contract.TERMS.get(node.module, ()), *of_part.get(node.module, ()))
                    names = [name_of(term).partition(".")[0] for term in terms]
                    submodule = f"{node.module}.{alias.name}" in contract.TERMS
                    assert submodule or alias.name in names or path.name == "compat.py", (path.name, alias.name)


def test_fields_are_registered():
    for family in families.table().values():
        for key in family.output_keys():
            assert _key_registry.get_field_type(key.name) == "node"
            assert (key.name in _key_registry._CARTESIAN_TENSOR_FIELDS) == (key.shape == (3, 3))


def test_every_family_is_registered(toy_family):
    registration.register()
    assert _key_registry.get_field_type("isotropic_log_std") == "node"
    target = _compile_utils.COMPILE_TARGET_DICT.pop("isotropic_ase")
    of_atoms, of_frames = target["output"][:-4], target["output"][-4:]
    assert of_atoms[-2:] == ["forces_epistemic_std", "e2ip_leverage"] and "isotropic_log_std" in of_atoms
    assert of_frames == OF_FRAMES
    for name in [name for name in _compile_utils.COMPILE_TARGET_DICT if name.startswith("isotropic_")]:
        del _compile_utils.COMPILE_TARGET_DICT[name]


def test_packaged_models_carry_adapter_and_core():
    assert {"nequip_ext", "e2ip_plugins"} <= _INTERNAL_MODULES


@pytest.mark.parametrize("name", ["ase", "pair_nequip", "batch", "pair_allegro"])
def test_compile_targets_add_outputs(name):
    if name == "pair_allegro":
        pytest.importorskip("allegro", reason="Allegro is not installed (pip install nequip-allegro)")
        assert "shallow_pair_nequip" in _compile_utils.COMPILE_TARGET_DICT
        assert "shallow_pair_allegro" not in _compile_utils.COMPILE_TARGET_DICT
    stock, ours = (_compile_utils.COMPILE_TARGET_DICT[n] for n in (name, f"e2ip_{name}"))
    of_frames = [] if name.startswith("pair") else OF_FRAMES
    assert ours["output"] == [*stock["output"], *(key.name for key in KEYS), *of_frames]
    assert ours["input"] == stock["input"]
    assert not any(key.name in stock["output"] for key in KEYS)


def test_writers_of_xyz_files():
    """The stock callback calls `to_ase` of its module with the columns by name."""
    source = inspect.getsource(XYZFileWriter)
    assert re.search(r"to_ase\([^)]*extra_fields=self\.extra_fields", source)
    assert inspect.unwrap(write_xyz.to_ase) is to_ase
    mend_writers()
    wrapped = write_xyz.to_ase
    mend_writers()
    assert write_xyz.to_ase is wrapped and inspect.unwrap(wrapped) is to_ase


def test_set_up_of_lightning():
    """Callbacks are set up before weights are restored, and hear of checkpoints that are loaded."""
    assert {"setup", "on_load_checkpoint"} <= set(vars(lightning.Callback))
    assert issubclass(NequIPLightningModule, lightning.LightningModule)
    assert {"name", "metric", "field", "coeff", "ignore_nan"} <= set(metrics_manager._METRICS_MANAGER_INPUT_KEYS)


@pytest.fixture
def newer_release(monkeypatch):
    """An installed NequIP that nobody has tested."""
    monkeypatch.setattr(contract.contract, "installed", lambda _: "0.99.0")
    contract.contract.warn_if_untested.cache_clear()


def test_an_untested_release_with_everything_is_used_with_one_warning(newer_release):
    with pytest.warns(
        UserWarning, match=r"NequIP 0\.99\.0 was not tested with e2ip-plugins \(tested: .*0\.19\.1\)"
    ) as warned:
        for name, module in nequip_ext._EXPORTS.items():
            if "backbones" not in module:  # they need more than NequIP
                getattr(nequip_ext, name)
    assert len([warning for warning in warned if "not tested" in str(warning.message)]) == 1


@pytest.fixture
def looked_at_anew():
    """The release is looked at anew, in the test and after it."""
    contract._problems.cache_clear()
    yield
    contract._problems.cache_clear()


def test_a_release_that_lacks_something_says_what(newer_release, looked_at_anew, monkeypatch):
    monkeypatch.delattr(NequIPLightningModule, "evaluation_model")
    lacks = "nequip.train has no NequIPLightningModule.evaluation_model"
    message = rf"{lacks} \(NequIP 0\.99\.0 is installed; tested: 0\.16\.2.*pip install nequip==0\.19\.1"
    with pytest.raises(InputError, match=message):
        _ = nequip_ext.E2IPModel
    assert setup.callbacks() == []


def test_a_part_that_a_release_lacks_leaves_the_rest(looked_at_anew, monkeypatch):
    """NequIP 0.16 lacks what the backbones are made of."""
    monkeypatch.setitem(contract.PARTS, "backbones", {"nequip.model.no_such_module": ("name",)})
    with pytest.raises(InputError, match=r"there is no nequip\.model\.no_such_module \(NequIP "):
        _ = nequip_ext.PaiNNModel
    assert nequip_ext.E2IPModel and contract.holds()


def test_a_checkpoint_that_does_not_fit_names_the_release_it_is_of(tmp_path):
    path = tmp_path / "a.ckpt"
    for versions, expected in (({"nequip": "0.1.0"}, InputError), ({}, RuntimeError)):
        torch.save({"hyper_parameters": {"info_dict": {"versions": versions}}}, path)
        with pytest.raises(expected) as raised, explained(path):
            torch.nn.Linear(2, 1).load_state_dict({})
        assert type(raised.value) is expected
        assert ("a.ckpt: was written with NequIP 0.1.0, and NequIP " in str(raised.value)) == (expected is InputError)


def test_types_that_are_no_elements(make_model, gnn_config):
    metadata = make_model(gnn_config())[1].metadata
    with (
        pytest.raises(InputError, match=r"a\.ckpt: the model has types that are no elements .*Hy"),
        explained("a.ckpt"),
    ):
        transforms_of(metadata, ["Hy", "C", "O"], {"Hy": "Hy", "C": "C", "O": "O"})


def test_a_broken_release_stays_stock():
    """Where not even the registration finds what it needs."""
    script = (
        "import sys, types; from nequip.scripts import _compile_utils; del _compile_utils.register_compile_targets;"
        "import nequip_ext, nequip_ext.contract as c; from nequip.model import NequIPGNNModel;"
        "assert 'has no register_compile_targets' in c.problem(); import lightning;"
        "assert not any('nequip_ext' in type(x).__module__ for x in lightning.Trainer(logger=False).callbacks)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_unknown_names():
    with pytest.raises(AttributeError, match="no attribute 'E2IP'"):
        _ = nequip_ext.E2IP
