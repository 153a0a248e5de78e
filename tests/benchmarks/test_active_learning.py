"""The example of active learning: what is finished is skipped, and the table is that of the raw results."""

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def study(load_script, monkeypatch):
    """benchmarks/active_learning.py as a module."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return load_script("benchmarks/active_learning.py")


def test_what_is_finished_is_skipped_and_what_was_stopped_begins_anew(study, tmp_path):
    code = "import pathlib; p = pathlib.Path('out'); assert not p.exists(); p.write_text('x')"
    step = study.Step("write", [sys.executable, "-c", code], ("out",))
    (tmp_path / "out").write_text("half")
    study.run(tmp_path, step)
    study.run(tmp_path, step)
    assert (tmp_path / "out").read_text() == "x"
    with pytest.raises(SystemExit, match="made with other settings"):
        study.run(tmp_path, step._replace(command=[*step.command, "more"]))
    with pytest.raises(SystemExit, match="status 3"):
        study.run(tmp_path, study.Step("fails", [sys.executable, "-c", "raise SystemExit(3)"], ()))


def test_table_and_figure_of_unfinished_results(study, tmp_path):
    for seed, values in ((0, (200.0, 150.0)), (1, (220.0,))):
        rounds = [
            {"labels": 40 + 15 * i, "errors": {test: {"mae": value, "rmse": value} for test in study.TESTS}}
            for i, value in enumerate(values)
        ]
        content = {"seed": seed, "method": "leverage", "rounds": rounds}
        (tmp_path / f"s{seed}_leverage.json").write_text(json.dumps(content))
    lines = study.table(tmp_path, tmp_path / "figure.png").splitlines()
    assert "| 40 | 210 (200, 220) |  |  |" in lines and "| 55 | 150 (150) |  |  |" in lines
    assert (tmp_path / "figure.png").stat().st_size > 5000
    with pytest.raises(SystemExit, match="has no results"):
        study.table(tmp_path / "nothing", tmp_path / "figure.png")
