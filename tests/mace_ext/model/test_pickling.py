"""Saved models: they come back whole, other formats are refused, and without the plugin they say what to install."""

import copy
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from forked_commands import run_command
from mace.calculators import MACECalculator
from mace.cli import eval_configs
from typer.testing import CliRunner

from e2ip_plugins import __version__, cli
from e2ip_plugins.errors import InputError
from e2ip_plugins.formats import FIRST_RELEASE, READOUTS

FRAMES = Path(__file__).resolve().parents[3] / "demo" / "data" / "test.extxyz"
REFUSED = (
    f"this model was written before e2ip-plugins {FIRST_RELEASE}, whose formats are the first that are read: make it "
    "anew"
)


def test_models_of_an_earlier_format_are_refused_with_one_message(unpack, tmp_path, capsys):
    path = unpack("mace", "tiny.model", "unreleased")
    for opened in (lambda: torch.load(path, weights_only=False), lambda: MACECalculator(str(path), device="cpu")):
        with pytest.raises(InputError, match=f"^{re.escape(REFUSED)}$"):
            opened()
    for command in (
        ["evaluate", path, FRAMES, tmp_path / "out.xyz"],
        ["fit", path, "--train", FRAMES, "--valid", FRAMES, "--output", tmp_path / "new.model"],
        ["strip", path, "--output", tmp_path / "new.model"],
    ):
        done = CliRunner().invoke(cli.app, list(map(str, command)))
        assert done.exit_code == 2 and f"tiny.model: {REFUSED}" in " ".join(done.stderr.split()), done.stderr
    sys.argv = ["mace_eval_configs", f"--configs={FRAMES}", f"--model={path}", f"--output={tmp_path}/out.xyz"]
    with pytest.raises(SystemExit):
        eval_configs.main()
    assert f"mace_eval_configs: error: --model {path}: {REFUSED}" in capsys.readouterr().err


def test_models_of_a_newer_format_are_refused_before_anything_else(make_model, tmp_path, monkeypatch):
    model = make_model()
    model.e2ip_readout.settings = model.e2ip_readout.settings._replace(version=99)
    with monkeypatch.context() as newer:
        newer.setattr("e2ip_plugins.readout.settings.__version__", "0.9.0")
        torch.save(model, tmp_path / "new.model")
    message = (
        f"this model was written by e2ip-plugins 0.9.0 in format 99 of models and readouts, and e2ip-plugins "
        f"{__version__}, which is installed, reads formats up to {READOUTS.number}: update e2ip-plugins"
    )
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        torch.load(tmp_path / "new.model", weights_only=False)


def test_opening_a_model_without_the_plugin_says_what_to_install(model_files, without_plugin):
    run = without_plugin(
        "import mace.calculators; mace.calculators.MACECalculator(model_paths=sys.argv[1], device='cpu')",
        model_files["e2ip"],
    )
    assert run.returncode != 0
    assert "install e2ip-plugins to open it (pip install" in run.stderr.strip().splitlines()[-1]


def test_saved_and_copied_models_are_whole(model_files, make_model, make_batch, frames):
    model, batch = make_model(), make_batch(frames)
    model({**batch})  # TorchScript optimises after the first call, and rounds differently from then on.
    expected = model({**batch})
    for other in (torch.load(model_files["e2ip"], weights_only=False), copy.deepcopy(model), copy.copy(model)):
        assert type(other) is type(model) and other.__class__.__name__ == "ScaleShiftMACE"
        other({**batch})
        output = other({**batch})
        for key in ("energy", "forces", "forces_cov", "e2ip_log_sigma0"):
            assert torch.equal(output[key], expected[key])
    assert copy.deepcopy(model).e2ip_readout.trunks[0].out.weight is not model.e2ip_readout.trunks[0].out.weight


def test_opening_a_model_where_mace_is_not_patched_warns(model_files):
    code = "import mace.calculators.mace, sys, torch; torch.load(sys.argv[1], weights_only=False)"
    command = [sys.executable, "-c", code, str(model_files["e2ip"])]
    for change, warned in (({"E2IP_DISABLE": "1"}, True), ({}, False)):
        done = run_command(command, env={**os.environ, **change})
        assert done.returncode == 0, done.stderr
        assert ("predicts uncertainties" in done.stderr) == warned
        assert ("E2IP_DISABLE is set, which turns the plugin off; unset it" in done.stderr) == warned
