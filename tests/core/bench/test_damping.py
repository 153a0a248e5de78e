"""The table of condition numbers at the beginning of trainings."""

import json
import sys

import pytest

from e2ip_plugins.bench import commands, runs, tables
from e2ip_plugins.bench.plan import Run
from e2ip_plugins.families.e2ip_ablation import FACTORISATION_FAILED

TRACES = {
    "published-off-0.1": "2,1,4,0,0,10\n90,2,300,0,0,10\n-5,-200,80,3,0,10\n",
    "closed-off-0.1": "2,1,4,0,0,10\n90,2,500,0,0,10\n8,2,30,0,1,10\n4,2,9,0,0,10\n",
}


@pytest.fixture
def out(tmp_path):
    for method, lines in TRACES.items():
        folder = tmp_path / "runs" / Run("aspirin", "mace", method, 1).name
        folder.mkdir(parents=True)
        (folder / commands.TRACE).write_text("mean,least,largest,indefinite,not_finite,atoms\n" + lines)
        if "published" in method:
            (folder / commands.FAILED).touch()
        (folder / "finished").touch()
    return tmp_path


def test_what_ended_when_and_how_ill_conditioned_it_was(out, plan_of):
    page, raw = tables.write(plan_of(name="damping", preset="cpu"))
    text, rows = page.read_text(), {row["numerics"]: row for row in json.loads(raw.read_text())}
    assert "| mace | published | off | 0.1 | 1 of 1 | 3 | 3e+02 | 3 |" in text
    assert "| mace | closed | off | 0.1 | 0 of 1 |  | 5e+02 | 0 |" in text
    assert rows["published"]["first_indefinite"] == 3 and rows["closed"]["first_indefinite"] is None
    assert rows["closed"]["not_finite"] == 1 and rows["closed"]["steps"] == 4
    assert (out / "damping_cpu_aspirin_mace.png").exists()


@pytest.mark.parametrize("says, good", [(f"{FACTORISATION_FAILED} for 1 of 2 atoms", True), ("No space left", False)])
def test_a_failed_factorisation_is_a_result_and_nothing_else_is(says, good, plan_of, no_data, monkeypatch):
    fails = commands.Stage("train", [sys.executable, "-c", f"raise SystemExit({says!r})"])
    monkeypatch.setattr(commands, "stages", lambda *arguments: [fails])
    run, plan = Run("aspirin", "mace", "published-off-0.1", 1), plan_of()
    assert runs.execute(run, plan) is good
    assert runs.finished(run, plan.out) is good
    assert (plan.out / "runs" / run.name / commands.FAILED).exists() is good
    assert not runs.execute(run._replace(method="e2ip"), plan)
