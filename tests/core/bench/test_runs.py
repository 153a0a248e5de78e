"""Trainings of `e2ip bench` with stages that only count how often they were run."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from e2ip_plugins.bench import commands, cost, data, plan, runs
from e2ip_plugins.cli import app
from e2ip_plugins.errors import InputError

RUNS = [plan.Run("aspirin", "mace", "e2ip", seed) for seed in (1, 2, 3)]

#: Stand-ins for the stages of a run: `train` notes every start and ends when a gate opens, `test` depends on it.
FAKE = """
import dataclasses, sys
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
    options = plan.Options("rmd17", "mace", out=Path(sys.argv[1]), jobs=2)
    sys.exit(len(runs.execute_all(dataclasses.replace(plan.Plan.of(options), runs=tuple(found)))))
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "fake.py"
    path.write_text(textwrap.dedent(FAKE))
    return path


def starts(out, run):
    log = out / "runs" / run.name / "train.log"
    return len(log.read_text().split()) if log.exists() else 0


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
        assert json.loads((out / "runs" / run.name / "run.json").read_text())["run"]["seed"] == run.seed


def test_a_stage_that_was_killed_itself_is_started_again_without_what_it_wrote(plan_of, no_data, monkeypatch):
    attempts = iter(["echo half > a.xyz; exit 9", "exit 0", "echo whole >> a.xyz"])
    monkeypatch.setattr(
        commands, "stages", lambda *_: [commands.Stage("train", ["/bin/sh", "-c", next(attempts)], ("a.xyz",))]
    )
    told, first = [], plan_of(RUNS[:1])
    assert runs.execute_all(first, told.append) == RUNS[:1]
    assert "train failed with status 9" in told[-1] and "log.txt" in told[-1]
    # As NequIP after SIGTERM: no error, and nothing predicted.
    assert runs.execute_all(first, told.append) == RUNS[:1] and "train failed with status" in told[-1]
    folder = first.out / "runs" / RUNS[0].name
    assert "a.xyz" in (folder / "log.txt").read_text() and not (folder / "train.done").exists()
    assert runs.execute_all(first, told.append) == []
    assert (folder / "a.xyz").read_text() == "whole\n"
    assert list(data.read_json(folder / runs.SECONDS)) == ["train"]


def test_a_folder_of_other_settings_is_refused(plan_of, note_of, monkeypatch):
    monkeypatch.setattr(data, "fingerprints", lambda *arguments: {"train": "a"})
    smoke, cpu = plan_of(RUNS), plan_of(RUNS, preset="cpu")
    folder = note_of(RUNS[0], smoke, with_data=True)
    runs.check_settings(RUNS, cpu)  # no stage is finished
    (folder / "train.done").touch()
    runs.check_settings(RUNS, smoke)
    message = r"aspirin_mace_e2ip_s1 was made with other settings \(epochs: 3, now 24; frames: 20, now None"
    with pytest.raises(InputError, match=message):
        runs.check_settings(RUNS, cpu)
    monkeypatch.setattr(data, "fingerprints", lambda *arguments: {"train": "b"})
    with pytest.raises(InputError, match=r"made with other settings \(data\.train: a, now b\)"):
        runs.check_settings(RUNS, smoke)
    runs.check_settings(RUNS, smoke, with_data=False)  # for tables no data are needed
    (folder / "run.json").write_text("{")
    with pytest.raises(InputError, match="is no JSON"):
        runs.check_settings(RUNS, smoke)


def test_what_a_run_begins_with_is_trained_first(plan_of, no_data, monkeypatch):
    order = []

    def stages(run, *_):
        order.append(run.method)
        return [commands.Stage("train", ["/bin/sh", "-c", "echo > model.model"], ("model.model",))]

    monkeypatch.setattr(commands, "stages", stages)
    run = plan.Run("aspirin", "mace", "e2ip-fixed", 1)
    only, both = plan_of([run]), plan_of([run._replace(method="mve"), run])
    folder, stock = only.out / "runs" / run.name, only.out / "runs/aspirin_mace_stock_s1/model.model"
    assert runs.execute_all(only) == []
    assert order == ["stock", "e2ip-fixed"] and commands.base(run, folder) == stock
    stock.unlink()
    with pytest.raises(InputError, match=r"model\.model is missing.* remove the folder .*aspirin_mace_stock_s1"):
        commands.base(run, folder)
    # Before anything else is trained.
    (folder / "finished").unlink()
    with pytest.raises(InputError, match="is missing, to which aspirin_mace_e2ip-fixed_s1"):
        runs.execute_all(both)
    assert order == ["stock", "e2ip-fixed"]


#: Stands for the commands of MACE: a model, and predictions whose errors have the covariance that comes with them.
HOST = """
import os, shutil, sys
import ase.io, numpy as np
given = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[1:] if "=" in word)
if "train_file" in given:
    shutil.copy(given["train_file"], "model.model")
else:
    frames, rng = ase.io.read(given["configs"], ":"), np.random.default_rng(int(os.getcwd()[-1]))
    for atoms in frames:
        atoms.info |= {"MACE_energy": atoms.info["REF_energy"] + 0.1, "MACE_uq_family": "gaussian"}
        atoms.new_array("MACE_forces", atoms.arrays["REF_forces"] + 0.1 * rng.normal(size=(len(atoms), 3)))
        atoms.new_array("MACE_gaussian_log_cov", np.tile([-4.6, -4.6, -4.6, 0.0, 0.0, 0.0], (len(atoms), 1)))
    ase.io.write(given["output"], frames, format="extxyz")
"""


def test_a_file_of_ones_own_from_the_description_to_the_table(tmp_path, monkeypatch):
    """The whole command with preset smoke, except that other commands train and predict."""
    demo = Path(__file__).parents[3] / "demo" / "data"
    for name in ("train", "valid", "test", "ood"):
        text = (
            (demo / f"{name}.extxyz").read_text().replace("REF_energy=", "e_dft=").replace(":REF_forces:", ":forces:")
        )
        (tmp_path / f"{name}.xyz").write_text(text)
    (tmp_path / "mine.yaml").write_text(
        "{train: train.xyz, valid: valid.xyz, tests: {cold: test.xyz, hot: ood.xyz}, species: [H, C, N, O], "
        "keys: {energy: e_dft, forces: forces}, methods: [mve], about: Mine.}"
    )
    (tmp_path / "host.py").write_text(HOST)
    monkeypatch.setattr(commands, "_tool", lambda name: f"{tmp_path}/{name}")
    monkeypatch.setattr(commands, "check_host", lambda host: None)
    for name in ("mace_run_train", "mace_eval_configs"):
        (tmp_path / name).write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/host.py "$@"\n')
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(cost, "_measure", lambda models, *_: {"models": [r.name for r in models], "ms_per_atom": {}})
    words = ["bench", tmp_path / "mine.yaml", "--host", "mace", "--out", tmp_path / "out", "--jobs", "2"]
    words = [str(word) for word in words]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    page = (tmp_path / "out" / "mine_smoke.md").read_text()
    assert "Mine." in page and "### mine, hot" in page and "| mace | MVE | raw | 2 |" in page
    rows = json.loads((tmp_path / "out" / "mine_smoke.json").read_text())
    assert rows[0]["cases"][0]["tests"]["cold"]["raw"]["calibration_error"] < 0.1
    # A file of results keeps what the folder does not have.
    results = tmp_path / "all.json"
    results.write_text(json.dumps([{**rows[0], "title": "before"}, {**rows[0], "cases": []}]))
    again = CliRunner().invoke(app, [*words, "--tables", "--results", str(results)])
    assert again.exit_code == 0, again.output
    merged = json.loads(results.read_text())
    assert [row["title"] for row in merged] == ["before", "MVE", "MVE-DE, K = 2"] and merged[1] == rows[0]
    assert "| mace | before |" in results.with_suffix(".md").read_text()
