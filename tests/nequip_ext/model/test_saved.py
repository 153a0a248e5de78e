"""Checkpoints and packages that were saved: they predict what they did, and earlier formats are refused."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from e2ip_plugins import cli
from e2ip_plugins.errors import InputError
from e2ip_plugins.readout.settings import outdated
from nequip_ext import E2IPCalculator

FRAMES = Path(__file__).resolve().parents[3] / "demo" / "data" / "test.extxyz"
REFUSED = outdated("this checkpoint")


@pytest.mark.parametrize("name", ["last.ckpt", "model.nequip.zip"])
def test_saved_models_predict_what_they_did(unpack, check_saved, name):
    check_saved("nequip", E2IPCalculator.from_saved_model(str(unpack("nequip", name))))


def test_checkpoints_of_an_earlier_format_are_refused_with_one_message(unpack, tmp_path):
    path = unpack("nequip", "last.ckpt", 2)
    with pytest.raises(InputError, match=f"^{re.escape(outdated(str(path)))}$"):
        E2IPCalculator.from_saved_model(str(path))
    for command in (
        ["evaluate", path, FRAMES, tmp_path / "out.xyz"],
        ["fit", path, "--train", FRAMES, "--valid", FRAMES, "--output", tmp_path / "new.ckpt"],
        ["strip", path, "--output", tmp_path / "new.ckpt"],
    ):
        done = CliRunner().invoke(cli.app, list(map(str, command)))
        assert done.exit_code == 2 and "last.ckpt was saved by another version" in " ".join(done.stderr.split())


def test_a_readout_takes_the_weights_of_its_format_alone(make_model):
    _, model = make_model()
    state = model.state_dict()
    model.load_state_dict(state)
    for version in (1, 99):
        state._metadata["model.func.e2ip_readout.readout"]["version"] = version
        with pytest.raises(InputError, match=f"^{re.escape(REFUSED)}$"):
            model.load_state_dict(state)
