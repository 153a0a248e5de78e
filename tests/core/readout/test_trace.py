"""Condition numbers of a training, step by step."""

import csv

import torch

from e2ip_plugins.readout.trace import COLUMNS, VARIABLE, trace


def outputs(*diagonals, learning=True):
    return {"forces_cov": torch.diag_embed(torch.tensor(diagonals)).requires_grad_(learning)}


def test_every_step_of_a_training_is_a_line(tmp_path, monkeypatch):
    path = tmp_path / "trace.csv"
    monkeypatch.setenv(VARIABLE, str(path))
    trace(outputs((1.0, 2.0, 4.0), (3.0, 3.0, 30.0)))
    trace(outputs((1.0, 2.0, 4.0), learning=False))  # validation
    trace(outputs((-0.5, 1.0, 2.0), (1.0, 1.0, 1.0), (float("nan"), 1.0, 1.0)))
    trace(outputs((float("inf"), 1.0, 1.0)))
    with open(path) as file:
        lines = [[float(line[name]) for name in COLUMNS] for line in csv.DictReader(file)]
    assert lines[0] == [7.0, 4.0, 10.0, 0, 0, 2]
    assert lines[1] == [-1.5, -4.0, 1.0, 1, 1, 3]
    assert lines[2][3:] == [0, 1, 1] and all(number != number for number in lines[2][:3])


def test_nothing_is_written_unasked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    trace(outputs((1.0, 2.0, 4.0)))
    assert not list(tmp_path.iterdir())
