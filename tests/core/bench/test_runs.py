"""Trainings of `e2ip bench` with stages that only count how often they were run."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from e2ip_plugins.bench import commands, data, plan, runs
from e2ip_plugins.errors import InputError

SMOKE = plan.PRESETS["smoke"]
RUNS = [plan.Run("aspirin", "mace", "e2ip", seed) for seed in (1, 2, 3)]

#: Stand-ins for the stages of a run: `train` notes every start and ends when a gate opens, `test` depends on it.
FAKE = """
import sys
from pathlib import Path
from e2ip_plugins.bench import commands, data, plan, runs

def stages(run, dataset, preset, files, folder):
    note = f"echo started >> train.log; while [ ! -e {gate} ]; do sleep 0.05; done; echo model > model.model"
    return [
        commands.Stage("train", ["/bin/sh", "-c", note], ("model.model",)),
        commands.Stage("test", ["/bin/sh", "-c", "cat model.model >> test.xyz"], ("test.xyz",)),
    ]

gate = sys.argv[2] if len(sys.argv) > 2 else "/"
commands.stages = stages
data.prepare = data.fingerprints = lambda *arguments: {}
found = [plan.Run("aspirin", "mace", "e2ip", seed) for seed in (1, 2, 3)]
if __name__ == "__main__":
    failed = runs.execute_all(found, plan.PRESETS["smoke"], [], Path(sys.argv[1]), jobs=2)
    sys.exit(len(failed))
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "fake.py"
    path.write_text(textwrap.dedent(FAKE))
    return path


def starts(out, run):
    log = out / "runs" / run.name / "train.log"
    return len(log.read_text().split()) if log.exists() else 0


def test_all_are_executed_once(script, tmp_path):
    out = tmp_path / "out"
    for _ in range(2):
        assert subprocess.run([sys.executable, script, out]).returncode == 0
    for run in RUNS:
        assert runs.finished(run, out) and starts(out, run) == 1
        assert (out / "runs" / run.name / "test.xyz").read_text() == "model\n"
        assert json.loads((out / "runs" / run.name / "run.json").read_text())["run"]["seed"] == run.seed


def test_killed_in_the_middle_nothing_is_lost_or_trained_twice(script, tmp_path):
    """SIGKILL ends the program, not the trainings that it has started: the next one waits for those."""
    out = tmp_path / "out"
    gate = tmp_path / "gate"
    first = subprocess.Popen([sys.executable, script, out, gate])
    deadline = time.time() + 120
    while sum(starts(out, run) for run in RUNS) < 2 and time.time() < deadline:
        time.sleep(0.05)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert sum(starts(out, run) for run in RUNS) == 2 and not any(runs.finished(run, out) for run in RUNS)
    again = subprocess.Popen([sys.executable, "-u", script, out], stdout=subprocess.PIPE, text=True)
    told = [again.stdout.readline() for _ in range(3)]  # how many there are to go first
    assert sum("waiting" in line for line in told) == 2, told
    gate.touch()
    again.communicate(timeout=120)
    assert again.returncode == 0
    for run in RUNS:
        assert runs.finished(run, out) and starts(out, run) == 1
        assert (out / "runs" / run.name / "test.xyz").read_text() == "model\n"


def test_a_stage_that_was_killed_itself_is_started_again_without_what_it_wrote(script, tmp_path, monkeypatch):
    for name in ("prepare", "fingerprints"):
        monkeypatch.setattr(data, name, lambda *arguments: {})
    attempts = iter(["echo half > a.xyz; exit 9", "echo whole >> a.xyz"])
    monkeypatch.setattr(
        commands, "stages", lambda *_: [commands.Stage("train", ["/bin/sh", "-c", next(attempts)], ("a.xyz",))]
    )
    told = []
    assert runs.execute_all(RUNS[:1], SMOKE, [], tmp_path, tell=told.append) == RUNS[:1]
    assert "train failed with status 9" in told[-1] and "log.txt" in told[-1]
    assert runs.execute_all(RUNS[:1], SMOKE, [], tmp_path, tell=told.append) == []
    assert (tmp_path / "runs" / RUNS[0].name / "a.xyz").read_text() == "whole\n"


def test_a_folder_of_other_settings_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "fingerprints", lambda *arguments: {"train": "a"})
    folder = tmp_path / "runs" / RUNS[0].name
    folder.mkdir(parents=True)
    cpu, roots = plan.PRESETS["cpu"], [tmp_path]
    (folder / "run.json").write_text(json.dumps(runs.settings(RUNS[0], SMOKE, roots)))
    runs.check_settings(RUNS, cpu, roots, tmp_path)  # nothing there that was made
    (folder / "train.done").touch()
    runs.check_settings(RUNS, SMOKE, roots, tmp_path)
    with pytest.raises(InputError, match=r"aspirin_mace_e2ip_s1 was made with other settings \(epochs: 3, now 24"):
        runs.check_settings(RUNS, cpu, roots, tmp_path)
    monkeypatch.setattr(data, "fingerprints", lambda *arguments: {"train": "b"})
    with pytest.raises(InputError, match=r"made with other settings \(data: {'train': 'a'}, now {'train': 'b'}"):
        runs.check_settings(RUNS, SMOKE, roots, tmp_path)
    runs.check_settings(RUNS, SMOKE, [], tmp_path)  # for tables no data are needed
    (folder / "run.json").write_text("{")
    with pytest.raises(InputError, match="is no JSON"):
        runs.check_settings(RUNS, SMOKE, roots, tmp_path)


def test_what_a_run_begins_with_is_trained_first(tmp_path, monkeypatch):
    for name in ("prepare", "fingerprints"):
        monkeypatch.setattr(data, name, lambda *arguments: {})
    order = []

    def stages(run, *_):
        order.append(run.method)
        return [commands.Stage("train", ["/bin/sh", "-c", "echo > model.model"], ("model.model",))]

    monkeypatch.setattr(commands, "stages", stages)
    run = plan.Run("aspirin", "mace", "e2ip-fixed", 1)
    assert runs.execute_all([run], SMOKE, [], tmp_path) == []
    assert order == ["stock", "e2ip-fixed"]
    assert commands.base(run, tmp_path / "runs" / run.name) == tmp_path / "runs/aspirin_mace_stock_s1/model.model"
    (tmp_path / "runs/aspirin_mace_stock_s1/model.model").unlink()
    with pytest.raises(InputError, match=r"model\.model is missing.* remove the folder .*aspirin_mace_stock_s1"):
        commands.base(run, tmp_path / "runs" / run.name)
    # Before anything else is trained.
    (tmp_path / "runs" / run.name / "finished").unlink()
    with pytest.raises(InputError, match="is missing, whose readout aspirin_mace_e2ip-fixed_s1"):
        runs.execute_all([run._replace(method="mve"), run], SMOKE, [], tmp_path)
    assert order == ["stock", "e2ip-fixed"]
