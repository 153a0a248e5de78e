"""``e2ip strip``: NequIP's own model out of a checkpoint or package with a readout."""

import copy
import pickletools
import zipfile
from pathlib import Path

import ase.io
import numpy as np
import pytest
import torch
from hydra.utils import get_class, instantiate
from nequip.model import ModelFromCheckpoint

from e2ip_plugins.errors import InputError
from nequip_ext.compat import NequIPCalculator
from nequip_ext.export.strip import _stock, strip_file
from nequip_ext.model.readout import find_readout

DEMO = Path(__file__).resolve().parents[3] / "demo" / "data"


def predictions(path, files):
    calculator = NequIPCalculator._from_saved_model(path, device="cpu", chemical_species_to_atom_type_map=True)
    found = []
    for atoms in ase.io.read(files["val"], ":"):
        calculator.calculate(atoms)
        found.append(calculator.results)
    return found


def assert_same(one, two, files):
    for theirs, ours in zip(predictions(one, files), predictions(two, files), strict=True):
        assert theirs["energy"] == ours["energy"] and np.array_equal(theirs["forces"], ours["forces"])


def strings(path, ending="data.pkl"):
    with zipfile.ZipFile(path) as archive:
        pickles = [archive.read(name) for name in archive.namelist() if name.endswith(ending)]
    return {str(x) for pickle in pickles for _, x, _ in pickletools.genops(pickle) if isinstance(x, str)}


def test_a_checkpoint_becomes_one_of_stock_nequip(leverage_run, tmp_path, train, train_files):
    stripped = tmp_path / "stock.ckpt"
    strip_file(leverage_run / "best.ckpt", stripped)
    assert_same(leverage_run / "best.ckpt", stripped, train_files)
    assert find_readout(ModelFromCheckpoint(str(stripped))) is None
    # Opens where there is no plugin.
    assert any("nequip_ext" in text for text in strings(leverage_run / "best.ckpt"))
    assert not [text for text in strings(stripped) if "nequip_ext" in text or text.startswith("e2ip_plugins")]
    # Training goes on from it.
    config = {"_target_": "nequip.model.ModelFromCheckpoint", "checkpoint_path": str(stripped)}
    model = "{" + ",".join(f"{name}: '{value}'" for name, value in config.items()) + "}"
    changes = ("~training_module.model", f"+training_module.model={model}")
    train("nequip_baseline", tmp_path / "again", train_files, "max_epochs=1", "run=[train]", *changes)


def test_a_package_becomes_one_of_stock_nequip(leverage_package, tmp_path, train_files):
    packed, stripped = leverage_package, tmp_path / "without.nequip.zip"
    strip_file(packed, stripped)
    assert_same(packed, stripped, train_files)
    with zipfile.ZipFile(packed) as before, zipfile.ZipFile(stripped) as after:
        assert any("/nequip_ext/" in name for name in before.namelist())
        assert not [name for name in after.namelist() if "/nequip_ext/" in name or "/e2ip_plugins/" in name]
    with pytest.raises(InputError, match="has no readout to be stripped of"):
        strip_file(stripped, tmp_path / "again.nequip.zip")
    with pytest.raises(InputError, match=r"must end with \.nequip\.zip"):
        strip_file(packed, tmp_path / "again.ckpt")


@pytest.mark.parametrize("stress", [{}, {"stress": 1.0}])
def test_what_takes_the_place_of_loss_and_metrics_can_be_made(stress):
    """Also of arguments that NequIP's own do not have."""
    shared = {"ignore_nan": {"total_energy": True}, "type_names": ["H"], "readout": "e2ip"}
    loss = {"_target_": "nequip_ext.E2IPLoss", "coeffs": {"total_energy": 1.0, "forces": 2.0, **stress}, **shared}
    errors = {"forces_rmse": 1.0, "e2ip_nll": 1.0, **{f"{name}_rmse": 1.0 for name in stress}}
    metrics = {"_target_": "nequip_ext.E2IPMetrics", "coeffs": errors, **shared}
    for config in (loss, metrics):
        theirs = _stock(config)
        assert theirs["_target_"].startswith("nequip.train.EnergyForce") and "e2ip_nll" not in theirs["coeffs"]
        assert ("stress_mse" in instantiate(theirs)) == (bool(stress) and config is loss)
    # Without a weight of its own there would be nothing to choose checkpoints by.
    assert "coeffs" not in _stock({**metrics, "coeffs": {"e2ip_nll": 1.0, "forces_mae": None}})
    assert _stock([{"_target_": "nequip_ext.E2IPXYZFileWriter"}, {"_target_": "other"}]) == [{"_target_": "other"}]


def test_bad_input(tmp_path):
    (tmp_path / "text.ckpt").write_text("text")
    with pytest.raises(InputError, match="is no checkpoint of nequip-train"):
        strip_file(tmp_path / "text.ckpt", tmp_path / "out.ckpt")
    assert not (tmp_path / "out.ckpt").exists()


#: Changes energies: one that a checkpoint must keep.
SHIFTS = {"modifier": "modify_PerTypeScaleShift", "shifts": {"H": -1.0, "C": -2.0, "N": -3.0, "O": -4.0}}


@pytest.fixture
def nested(unpack, tmp_path):
    """Function that writes a checkpoint whose model is built by a config, with weights of its own; its path."""
    template = torch.load(unpack("nequip", "best.ckpt"), weights_only=False)

    def write(name, config):
        checkpoint, path = copy.deepcopy(template), tmp_path / name
        hparams = checkpoint["hyper_parameters"]
        hparams["model"] = hparams["info_dict"]["training_module"]["model"] = config
        module = get_class(hparams["info_dict"]["training_module"]["_target_"])(**copy.deepcopy(dict(hparams)))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in (*module.model.parameters(), *module.ema.ema_weights):
                weight.add_(0.01 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype))
        torch.save({**checkpoint, "state_dict": module.state_dict()}, path)
        return path

    return write


def modified(config):
    return {"_target_": "nequip.model.modify", "modifiers": [SHIFTS], "model": config}


def from_file(path):
    if path.suffix == ".zip":
        return {"_target_": "nequip.model.ModelFromPackage", "package_path": str(path)}
    return {"_target_": "nequip.model.ModelFromCheckpoint", "checkpoint_path": str(path)}


def test_the_readout_is_found_at_any_depth(nested, unpack, tmp_path):
    """Fine-tuned packages and checkpoints, with modifiers around them: the weights are those of the checkpoint."""
    files = {"val": tmp_path / "val.xyz"}
    ase.io.write(files["val"], ase.io.read(DEMO / "test.extxyz", ":2"))
    of_training = torch.load(unpack("nequip", "best.ckpt"), weights_only=False)["hyper_parameters"]["model"]
    package = from_file(unpack("nequip", "model.nequip.zip"))
    configs = {"package": package, "modified": modified(of_training), "deep": modified(modified(package))}
    paths = {name: nested(f"{name}.ckpt", config) for name, config in configs.items()}
    for name, path in paths.items():
        strip_file(path, tmp_path / f"{name}_stock.ckpt")
    frozen = {"_target_": "nequip_ext.E2IPModel", "seed": 1, "forces": "fixed"}
    frozen["model"] = modified(from_file(tmp_path / "modified_stock.ckpt"))
    for name, config in {"again": modified(from_file(paths["deep"])), "fixed": modified(frozen)}.items():
        paths[name] = nested(f"{name}.ckpt", config)
        strip_file(paths[name], tmp_path / f"{name}_stock.ckpt")
    for name, path in paths.items():
        stripped = tmp_path / f"{name}_stock.ckpt"
        assert find_readout(ModelFromCheckpoint(str(path))) and find_readout(ModelFromCheckpoint(str(stripped))) is None
        assert_same(path, stripped, files)
        assert not [text for text in strings(stripped) if "nequip_ext" in text]
    with pytest.raises(InputError, match="has no readout to be stripped of"):
        strip_file(tmp_path / "deep_stock.ckpt", tmp_path / "again.ckpt")


def test_a_package_that_is_no_longer_there_is_named(nested, unpack, tmp_path):
    package = unpack("nequip", "model.nequip.zip")
    path = nested("package.ckpt", from_file(package))
    package.unlink()
    with pytest.raises(InputError, match=r"package\.ckpt: its model comes from .*model\.nequip\.zip, which does not"):
        strip_file(path, tmp_path / "stock.ckpt")
