"""Files that former releases wrote for NequIP: every one of them opens, and predicts what it did."""

import functools

import pytest
import torch
from frozen_files import RELEASES, ROUNDING
from typer.testing import CliRunner

from e2ip_plugins import cli
from nequip_ext import E2IPCalculator
from nequip_ext.compat import IS_0_16

pytestmark = pytest.mark.skipif(IS_0_16, reason="NequIP 0.16 opens no checkpoint of later releases")


@pytest.fixture(scope="module", params=RELEASES)
def kept(request, unpack_all):
    """Release, and folder of its files."""
    return request.param, unpack_all("nequip", request.param)


def calculator(path, **options):
    return E2IPCalculator.from_saved_model(str(path), **options)


def run(*words):
    result = CliRunner().invoke(cli.app, [str(word) for word in words])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("name", ["best.ckpt", "model.nequip.zip", "fitted.ckpt"])
def test_models_predict_what_they_did(kept, check_saved, check_predicted, name):
    release, folder = kept
    opened = calculator(folder / name)
    check_saved("nequip", "fitted" if name == "fitted.ckpt" else "best", opened, release)
    check_predicted(opened, folder / ("predictions.extxyz" if name == "fitted.ckpt" else "host.extxyz"))


def test_packages_compute_on_request(kept, frames, request_checks):
    request_checks.check_same(functools.partial(calculator, kept[1] / "model.nequip.zip"), frames[:1])


def test_readout_files_attach(kept, check_saved, tmp_path):
    release, folder = kept
    run("attach", folder / "stock.ckpt", folder / "readout.e2ip", "--output", tmp_path / "attached.ckpt")
    check_saved("nequip", "fitted", calculator(tmp_path / "attached.ckpt"), release)


def test_parts_of_a_fit_merge(kept, tmp_path):
    folder = kept[1]
    for path in folder.glob("fitted.ckpt.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    frames = ["--train", folder / "train.extxyz", "--valid", folder / "valid.extxyz"]
    run("fit", folder / "stock.ckpt", *frames, "--merge", 2, "--output", tmp_path / "fitted.ckpt")
    merged, fitted = (
        torch.load(path / "fitted.ckpt", map_location="cpu", weights_only=False)["state_dict"]
        for path in (tmp_path, folder)
    )
    for name, values in merged.items():
        if isinstance(values, torch.Tensor):
            torch.testing.assert_close(values, fitted[name], **ROUNDING)
