"""Condition numbers of a training with ``e2ip-ablation``, step by step."""

import csv

import pytest
import torch

from e2ip_plugins import families
from e2ip_plugins.families.condition_trace import COLUMNS, VARIABLE, append_line


def test_every_evaluation_is_a_line(tmp_path):
    path, nan, inf = tmp_path / "trace.csv", float("nan"), float("inf")
    for diagonals in (
        [(1.0, 2.0, 4.0), (3.0, 3.0, 30.0)],
        [(-0.5, 1.0, 2.0), (1.0, 1.0, 1.0), (nan, 1.0, 1.0)],
        [(inf, 1.0, 1.0)],
    ):
        append_line(path, torch.diag_embed(torch.tensor(diagonals)).requires_grad_())
    with open(path) as file:
        lines = [[float(line[name]) for name in COLUMNS] for line in csv.DictReader(file)]
    assert lines[0] == [7.0, 4.0, 10.0, 0, 0, 2]
    assert lines[1] == [-1.5, -4.0, 1.0, 1, 1, 3]
    assert lines[2][3:] == [0, 1, 1] and all(number != number for number in lines[2][:3])


@pytest.mark.parametrize("armed, learning, lines", [(True, True, 2), (True, False, 0), (False, True, 0)])
def test_lines_are_written_in_a_training_where_that_is_asked_for(tmp_path, monkeypatch, armed, learning, lines):
    path = tmp_path / "trace.csv"
    monkeypatch.setenv(VARIABLE, str(path) if armed else "")
    family = families.get("e2ip-ablation")
    family = family(family.resolve({}))
    coefficients = torch.randn(4, family.num_columns()).requires_grad_(learning)
    unit = torch.tensor(0.05)
    outputs = family(coefficients, unit) | {"e2ip_coefficients": coefficients, "e2ip_force_unit": unit.expand(4)}
    family.force_loss(torch.ones(4, 3), outputs)
    assert len(path.read_text().splitlines() if path.exists() else []) == lines
