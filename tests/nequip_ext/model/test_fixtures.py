"""Checkpoints and packages that earlier versions saved open and predict what they did then."""

import lzma
from pathlib import Path

import ase.io
import numpy as np
import pytest

from nequip_ext import E2IPCalculator

ROOT = Path(__file__).resolve().parents[3]
SAVED = sorted((ROOT / "tests" / "fixtures").glob("nequip_v*"))


@pytest.mark.parametrize("name", ["last.ckpt", "model.nequip.zip"])
@pytest.mark.parametrize("folder", SAVED, ids=lambda folder: folder.name)
def test_saved_models_predict_what_they_did(folder, name, tmp_path):
    (tmp_path / name).write_bytes(lzma.decompress((folder / f"{name}.xz").read_bytes()))
    atoms = ase.io.read(ROOT / "demo" / "data" / "test.extxyz", 0)
    atoms.calc = E2IPCalculator.from_saved_model(str(tmp_path / name))
    atoms.get_forces()
    with np.load(folder / "expected.npz") as expected:
        assert atoms.get_potential_energy() == pytest.approx(float(expected["energy"]), rel=1e-9)
        for key in set(expected) - {"energy"}:
            np.testing.assert_allclose(atoms.calc.results[key], expected[key], rtol=1e-7, atol=1e-10, err_msg=key)


def test_there_are_saved_models():
    assert SAVED
