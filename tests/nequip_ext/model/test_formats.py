"""Checkpoints in formats of earlier and newer versions are refused with one message."""

import re
from pathlib import Path

import pytest
import torch
from frozen_files import RELEASES
from typer.testing import CliRunner

from e2ip_plugins import __version__, cli
from e2ip_plugins.errors import InputError
from e2ip_plugins.formats import FIRST_RELEASE, READOUTS
from nequip_ext import E2IPCalculator

FRAMES = Path(__file__).resolve().parents[3] / "demo" / "data" / "test.extxyz"
OLD = f"was written before e2ip-plugins {FIRST_RELEASE}, whose formats are the first that are read: make it anew"
NEW = (
    f"was written by e2ip-plugins 0.9.0 in format 99 of models and readouts, and e2ip-plugins {__version__}, which is "
    f"installed, reads formats up to {READOUTS.number}: update e2ip-plugins"
)


@pytest.fixture(params=["before the first release", "newer"])
def refused(request, unpack):
    """A checkpoint that cannot be read, and the message without its path."""
    if request.param != "newer":
        return unpack("nequip", "last.ckpt", "unreleased"), OLD
    path = unpack("nequip", "best.ckpt")
    checkpoint = torch.load(path, map_location="cpu", weights_only=False)
    of_readouts = [entry for entry in checkpoint["state_dict"]._metadata.values() if "release" in entry]
    assert of_readouts and all(entry["release"] == RELEASES[-1] for entry in of_readouts)
    for entry in of_readouts:
        entry.update(version=99, release="0.9.0")
    torch.save(checkpoint, path)
    return path, NEW


def test_checkpoints_of_another_format_are_refused_with_one_message(refused, tmp_path):
    path, message = refused
    with pytest.raises(InputError, match=f"^{re.escape(f'{path}: {message}')}$"):
        E2IPCalculator.from_saved_model(str(path))
    for command in (
        ["evaluate", path, FRAMES, tmp_path / "out.xyz"],
        ["fit", path, "--train", FRAMES, "--valid", FRAMES, "--output", tmp_path / "new.ckpt"],
        ["strip", path, "--output", tmp_path / "new.ckpt"],
    ):
        done = CliRunner().invoke(cli.app, list(map(str, command)))
        assert done.exit_code == 2 and f"{path.name}: {message}" in " ".join(done.stderr.split())


def test_a_readout_takes_the_weights_of_its_format_alone(make_model):
    _, model = make_model()
    state = model.state_dict()
    model.load_state_dict(state)
    for saved, message in (({"version": 1}, OLD), ({"version": 99, "release": "0.9.0"}, NEW)):
        state._metadata["model.func.e2ip_readout.readout"] = saved
        with pytest.raises(InputError, match=f"^{re.escape(f'this checkpoint {message}')}$"):
            model.load_state_dict(state)
