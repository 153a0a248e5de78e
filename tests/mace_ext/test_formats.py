"""Files that former releases wrote for MACE: every one of them opens, and predicts what it did."""

import pytest
import torch
from frozen_files import RELEASES, ROUNDING
from mace.calculators import MACECalculator
from typer.testing import CliRunner

from e2ip_plugins import cli
from e2ip_plugins.readout.settings import Settings
from mace_ext.model.readout import find_readout


@pytest.fixture(scope="module", params=RELEASES)
def kept(request, unpack_all):
    """Release, and folder of its files."""
    return request.param, unpack_all("mace", request.param)


def calculator(path):
    return MACECalculator(model_paths=str(path), device="cpu", default_dtype="float64")


def run(*words):
    result = CliRunner().invoke(cli.app, [str(word) for word in words])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("name", ["tiny", "fitted"])
def test_models_predict_what_they_did(kept, check_saved, check_predicted, name):
    release, folder = kept
    opened = calculator(folder / f"{name}.model")
    check_saved("mace", name, opened, release)
    predicted, prefix = {"tiny": ("host.extxyz", "MACE_"), "fitted": ("predictions.extxyz", "")}[name]
    check_predicted(opened, folder / predicted, prefix)


def test_checkpoints_fit_the_model(kept):
    paths = (kept[1] / name for name in ("tiny.model", "tiny.pt"))
    model, checkpoint = (torch.load(path, map_location="cpu", weights_only=False) for path in paths)
    model.load_state_dict(checkpoint["model"])
    assert Settings.from_dict(checkpoint["e2ip_settings"], "tiny.pt").differences(find_readout(model).settings) == []


def test_readout_files_attach(kept, check_saved, tmp_path):
    release, folder = kept
    run("attach", folder / "stock.model", folder / "readout.e2ip", "--output", tmp_path / "attached.model")
    check_saved("mace", "fitted", calculator(tmp_path / "attached.model"), release)


def test_parts_of_a_fit_merge(kept, tmp_path):
    folder = kept[1]
    for path in folder.glob("fitted.model.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    frames = ["--train", folder / "train.extxyz", "--valid", folder / "valid.extxyz"]
    run("fit", folder / "stock.model", *frames, "--merge", 2, "--output", tmp_path / "fitted.model")
    merged, fitted = (calculator(path / "fitted.model").models[0].state_dict() for path in (tmp_path, folder))
    for name, values in merged.items():
        torch.testing.assert_close(values, fitted[name], **ROUNDING)
