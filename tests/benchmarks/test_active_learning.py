"""The example of active learning: finished steps are skipped, and the table is that of the results."""

import sys

import pytest


@pytest.fixture(scope="module")
def study(load_script):
    """benchmarks/active_learning.py as a module."""
    return load_script("benchmarks/active_learning.py")


def test_finished_steps_are_skipped_and_stopped_ones_begin_anew(study, tmp_path):
    code = "import pathlib; p = pathlib.Path('out'); assert not p.exists(); p.write_text('x')"
    step = study.Step("write", [sys.executable, "-c", code], ("out",))
    (tmp_path / "out").write_text("half")
    study.run(tmp_path, step)
    study.run(tmp_path, step)
    assert (tmp_path / "out").read_text() == "x"
    with pytest.raises(SystemExit, match="made with other settings"):
        study.run(tmp_path, step._replace(command=[*step.command, "more"]))
    with pytest.raises(SystemExit, match="status 3"):
        study.run(tmp_path, study.Step("fails", [sys.executable, "-c", "raise SystemExit(3)"]))


def test_table_and_figure_of_unfinished_results(study, tmp_path):
    results = {}
    for seed, values in ((0, (200.0, 150.0)), (1, (220.0,))):
        rounds = [{"labels": 40 + 15 * i, "mae": dict.fromkeys(study.TESTS, value)} for i, value in enumerate(values)]
        results[f"s{seed}_leverage"] = rounds
    lines = study.table(results).splitlines()
    assert "| 40 | 210 (200, 220) |  |  |" in lines and "| 55 | 150 (150) |  |  |" in lines
    study.draw(results, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 5000
