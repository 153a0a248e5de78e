"""Installed and not asked for, the plugin changes nothing, to the last bit."""

import os
import subprocess
from importlib import util
from pathlib import Path

import pytest
import torch

#: MACE's own tests, as far as its wheel brings them and they need neither network nor a GPU.
HOST_TESTS = {
    "test_tools.py": None,
    "test_models.py": None,
    "test_lora.py": None,
    "test_run_train.py": "test_run_train or test_run_train_missing_data or test_run_train_foundation",
}


def test_a_stock_run_is_bit_identical(tmp_path, training_command):
    """The whole of `mace_run_train` with EMA, stage two and an error table, with the plugin and without it."""
    flags = ("--ema", "--swa", "--start_swa=1", "--scaling=rms_forces_scaling")
    results, states = [], []
    for disabled in ("1", "0"):
        name = f"disabled{disabled}"
        command = training_command(*flags, name=name, default_dtype="float32", max_num_epochs=3)
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "E2IP_DISABLE": disabled})
        assert done.returncode == 0, done.stderr[-3000:]
        assert "e2ip" not in done.stderr + done.stdout
        lines = (tmp_path / "results" / f"{name}_run-1_train.txt").read_text().splitlines()
        results.append([_without_time(line) for line in lines])
        states.append([torch.load(tmp_path / f"{name}{stage}.model", weights_only=False) for stage in ("", "_stagetwo")])
    assert results[0] == results[1]
    for stock, ours in zip(*states, strict=True):
        assert type(ours) is type(stock)
        expected, found = stock.state_dict(), ours.state_dict()
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[key], found[key]) for key in expected)


def _without_time(line):
    import json

    return {key: value for key, value in json.loads(line).items() if key != "time"}


@pytest.mark.parametrize("name", HOST_TESTS)
def test_the_hosts_own_tests_pass(tmp_path, name):
    pass
