"""`e2ip bench` with the commands of the installed framework: one training, its predictions and the table."""

import importlib.util
import json

import pytest

HOST = "mace" if importlib.util.find_spec("mace") else "nequip"

FILE = """\
train: {demo}/train.extxyz
valid: {demo}/valid.extxyz
tests: {{test: {demo}/test.extxyz}}
species: [H, C, N, O]
frames: [10, 4]
epochs: {{mace: 8, nequip: 8}}
"""


@pytest.fixture
def dataset(tmp_path, request):
    path = tmp_path / "mine.yaml"
    path.write_text(FILE.format(demo=request.config.rootpath / "demo" / "data"))
    return path


def test_from_training_to_table(dataset, run_tool, tmp_path):
    out = tmp_path / "out"
    run_tool("e2ip", "bench", dataset, f"--host={HOST}", "--methods=e2ip", f"--out={out}")
    (row,) = json.loads((out / "mine_smoke.json").read_text())
    assert row["title"] == "e²IP" and row["host"] == HOST
    scores = row["cases"][0]["tests"]["test"]["raw"]
    assert scores["force_mae"] > 0.0 and 0.0 < scores["coverage95"] <= 1.0
    assert "e²IP" in (out / "mine_smoke.md").read_text()
