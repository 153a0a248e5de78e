"""Configs of models in models: what is changed, and what is read from other files."""

from pathlib import Path

import pytest
import torch

from e2ip_plugins.errors import InputError
from nequip_ext.fitting.file import _with_leverage
from nequip_ext.model.configs import MODEL, from_checkpoints, from_packages, sections, source_of

GNN = {"_target_": "nequip.model.NequIPGNNModel", "seed": 1}


def modified(config):
    return {"_target_": "nequip.model.modify", "modifiers": [{"modifier": "enable"}], "model": config}


def wrapped(config, **options):
    return {"_target_": MODEL, "seed": 1, "model": config, **options}


def targets(config):
    return [section["_target_"].rpartition(".")[2] for section in sections(config)]


def test_a_fit_changes_the_readout_at_any_depth():
    changed = _with_leverage(modified(modified(wrapped(GNN, evidence="coupled"))), Path("a.ckpt"))
    assert changed == modified(modified(wrapped(GNN, evidence="leverage")))
    package = {"_target_": "nequip.model.ModelFromPackage", "package_path": "/some/p.nequip.zip"}
    with pytest.raises(InputError, match=r"its readout comes from /some/p\.nequip\.zip.*package it"):
        _with_leverage(modified(package), Path("a.ckpt"))


def test_checkpoints_in_configs(tmp_path):
    """Inside a readout only where nothing else shall be needed; its forces are those of a trained model until then."""
    path = tmp_path / "inner.ckpt"
    hparams = {
        "model": modified(GNN),
        "info_dict": {"training_module": {"_target_": "nequip.train.EMALightningModule"}},
    }
    torch.save({"hyper_parameters": hparams, "state_dict": {}}, path)
    read = {"_target_": "nequip.model.ModelFromCheckpoint", "checkpoint_path": str(path)}
    assert from_checkpoints(modified(read), path) == modified(modified(GNN))
    fixed = modified(wrapped(modified(read), forces="fixed"))
    assert from_checkpoints(fixed, path) == fixed and source_of(fixed) == path
    inlined = from_checkpoints(fixed, path, inside_readout=True)
    assert source_of(inlined) is None and inlined["model"]["forces"] == "likelihood"
    assert targets(inlined) == ["modify", "E2IPModel", "modify", "modify", "NequIPGNNModel"]
    path.unlink()
    with pytest.raises(InputError, match=r"a\.ckpt: its model comes from .*inner\.ckpt, which does not exist"):
        from_checkpoints(read, Path("a.ckpt"))


def test_packages_in_configs(unpack):
    path = unpack("nequip", "model.nequip.zip")
    package = {"_target_": "nequip.model.ModelFromPackage", "package_path": str(path)}
    built = from_packages(modified(package), Path("a.ckpt"))
    assert targets(built) == ["modify", "E2IPModel", "NequIPGNNModel"]
