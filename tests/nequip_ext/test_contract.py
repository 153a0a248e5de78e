"""What the adapter relies on in NequIP: moves in a new release show up here first."""

import inspect
import re
import subprocess
import sys

import lightning
import pytest
from nequip.data import _key_registry, to_ase
from nequip.integrations.ase import NequIPCalculator
from nequip.nn import ConvNetLayer, ForceStressOutput, SequentialGraphNetwork
from nequip.scripts import _compile_utils
from nequip.scripts._package_utils import _INTERNAL_MODULES
from nequip.train import MetricsManager, NequIPLightningModule
from nequip.train.callbacks import write_xyz

import nequip_ext
from e2ip_plugins import families
from e2ip_plugins.errors import InputError
from e2ip_plugins.keys import LEVERAGE
from nequip_ext import compat, registration
from nequip_ext.evaluate import name_family_in_files

KEYS = (*families.get(families.DEFAULT).output_keys(), LEVERAGE)


def test_installed_version_is_supported():
    assert compat.nequip_is_supported()


def test_fields_are_registered():
    for family in families.table().values():
        for key in family.output_keys():
            assert _key_registry.get_field_type(key.name) == "node"
            assert (key.name in _key_registry._CARTESIAN_TENSOR_FIELDS) == (key.shape == (3, 3))


def test_every_family_is_registered(toy_family):
    registration.register()
    assert _key_registry.get_field_type("isotropic_log_std") == "node"
    target = _compile_utils.COMPILE_TARGET_DICT.pop("isotropic_ase")
    assert (
        target["output"][-2:] == ["forces_epistemic_std", "e2ip_leverage"] and "isotropic_log_std" in target["output"]
    )
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
    assert ours["output"] == [*stock["output"], *(key.name for key in KEYS)]
    assert ours["input"] == stock["input"]
    assert not any(key.name in stock["output"] for key in KEYS)


def test_seams():
    assert {"name", "module", "before"} <= set(inspect.signature(SequentialGraphNetwork.insert).parameters)
    assert list(inspect.signature(SequentialGraphNetwork.append).parameters) == ["self", "name", "module"]
    assert "func" in inspect.signature(ForceStressOutput).parameters and ConvNetLayer.__name__ == "ConvNetLayer"
    assert {"save_extra_outputs", "_get_aoti_compile_target"} <= set(dir(NequIPCalculator))
    assert {"name", "metric", "field", "coeff", "ignore_nan"} <= set(
        inspect.getclosurevars(MetricsManager.parse_entry).globals["_METRICS_MANAGER_INPUT_KEYS"]
    )


def test_writers_of_xyz_files():
    """The stock callback calls `to_ase` of its module with the columns by name."""
    source = inspect.getsource(write_xyz.XYZFileWriter._batch_end)
    assert re.search(r"to_ase\([^)]*extra_fields=self\.extra_fields", source)
    assert inspect.unwrap(write_xyz.to_ase) is to_ase
    name_family_in_files()
    wrapped = write_xyz.to_ase
    name_family_in_files()
    assert write_xyz.to_ase is wrapped and inspect.unwrap(wrapped) is to_ase


def test_set_up_of_lightning():
    """Callbacks are set up before weights are restored, and hear of checkpoints that are loaded."""
    assert {"setup", "on_load_checkpoint"} <= set(vars(lightning.Callback))
    assert issubclass(NequIPLightningModule, lightning.LightningModule)


def test_other_versions_of_nequip(monkeypatch):
    monkeypatch.setattr(compat, "_installed", lambda: "0.20.0")
    for name in nequip_ext.__all__:
        with pytest.raises(InputError, match=r"supports NequIP 0\.19\.1, but 0\.20\.0 is installed"):
            getattr(nequip_ext, name)


def test_unsupported_nequip_stays_stock():
    script = (
        "import importlib.metadata as m; o = m.version;"
        "m.version = lambda n: '0.20.0' if n == 'nequip' else o(n);"
        "import nequip; from nequip.data._key_registry import _NODE_FIELDS; assert 'forces_cov' not in _NODE_FIELDS;"
        "from nequip.model import NequIPGNNModel; import sys; assert 'nequip_ext.readout' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_unknown_names():
    with pytest.raises(AttributeError, match="no attribute 'E2IP'"):
        _ = nequip_ext.E2IP
