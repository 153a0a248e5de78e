"""Installed and not asked for, the plugin changes nothing, to the last bit."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked_commands import run_command

#: MACE's own tests, as far as its wheel brings them and they need neither a network nor a GPU.
HOST_TESTS = (
    "test_tools.py",
    "test_models.py",
    "test_lora.py",
    "test_run_train.py::test_run_train",
    "test_run_train.py::test_run_train_missing_data",
    "test_run_train.py::test_run_train_multihead",
)


def test_a_stock_run_is_bit_identical(tmp_path, training_command):
    """The whole of `mace_run_train` with EMA, stage two and an error table, with the plugin and without it."""
    flags = ("--ema", "--swa", "--start_swa=1", "--scaling=rms_forces_scaling")
    results, states = [], []
    for disabled in (True, False):
        name = f"disabled{disabled}"
        command = training_command(*flags, name=name, default_dtype="float32", max_num_epochs=3)
        done = run_command(command, env={**os.environ, **({"E2IP_DISABLE": "1"} if disabled else {})})
        assert done.returncode == 0, done.stderr[-3000:]
        assert "e2ip_nll" not in done.stderr + done.stdout
        lines = (tmp_path / "results" / f"{name}_run-1_train.txt").read_text().splitlines()
        results.append([_without_time(line) for line in lines])
        paths = [tmp_path / f"{name}{stage}.model" for stage in ("", "_stagetwo")]
        states.append([torch.load(path, weights_only=False) for path in paths])
    assert results[0] == results[1]
    for stock, ours in zip(*states, strict=True):
        assert type(ours) is type(stock)
        expected, found = stock.state_dict(), ours.state_dict()
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[key], found[key]) for key in expected)


def _without_time(line):
    return {key: value for key, value in json.loads(line).items() if key != "time"}


@pytest.mark.nightly
def test_the_hosts_own_tests_pass(tmp_path):
    """The mace wheel installs its tests beside itself, as a top-level package ``tests``."""
    folder = Path(importlib.util.find_spec("mace").origin).parent.parent / "tests"
    if not (folder / "test_models.py").exists():
        pytest.skip("this installation of mace-torch has no tests")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-W", "ignore"]
    done = subprocess.run(
        [*command, *(str(folder / name) for name in HOST_TESTS)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout[-3000:]
