"""Models and checkpoints that earlier versions saved open, and predict what they did then."""

import lzma
from pathlib import Path

import ase.io
import numpy as np
import pytest
import torch
from mace.calculators import MACECalculator

from e2ip_plugins.readout.settings import Settings
from mace_ext.model.readout import find_readout

ROOT = Path(__file__).resolve().parents[3]
SAVED = sorted((ROOT / "tests" / "fixtures").glob("mace_v*"))
EVERY_VERSION = pytest.mark.parametrize("folder", SAVED, ids=lambda folder: folder.name)


def unpack(folder, name, tmp_path):
    (tmp_path / name).write_bytes(lzma.decompress((folder / f"{name}.xz").read_bytes()))
    return tmp_path / name


@EVERY_VERSION
def test_saved_models_predict_what_they_did(folder, tmp_path):
    atoms = ase.io.read(ROOT / "demo" / "data" / "test.extxyz", 0)
    path = unpack(folder, "tiny.model", tmp_path)
    atoms.calc = MACECalculator(model_paths=str(path), device="cpu", default_dtype="float64")
    atoms.get_forces()
    with np.load(folder / "expected.npz") as expected:
        assert atoms.get_potential_energy() == pytest.approx(float(expected["energy"]), rel=1e-9)
        for key in set(expected) - {"energy"}:
            np.testing.assert_allclose(atoms.calc.results[key], expected[key], rtol=1e-7, atol=1e-10, err_msg=key)


@EVERY_VERSION
def test_saved_checkpoints_fit_the_saved_model(folder, tmp_path):
    model = torch.load(unpack(folder, "tiny.model", tmp_path), map_location="cpu", weights_only=False)
    checkpoint = torch.load(unpack(folder, "tiny.pt", tmp_path), map_location="cpu", weights_only=False)
    model.load_state_dict(checkpoint["model"])
    assert Settings.from_dict(checkpoint["e2ip_settings"], "tiny.pt").differences(find_readout(model).settings) == []


def test_there_are_saved_models():
    assert SAVED
