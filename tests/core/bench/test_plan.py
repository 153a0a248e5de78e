"""What `e2ip bench` would train, and the commands for it."""

import json

import pytest
from typer.testing import CliRunner

from e2ip_plugins import families
from e2ip_plugins.bench import commands, plan, runs
from e2ip_plugins.cli import app
from e2ip_plugins.readout.settings import Settings


def test_methods_are_what_the_families_take():
    for method in plan.METHODS.values():
        if method.readout:
            settings = Settings.of(method.readout, method.options, 0.05)
            assert settings.family in families.table()


def test_every_table_has_data_and_methods():
    for name, benchmark in plan.BENCHMARKS.items():
        assert set(benchmark.methods) <= set(plan.METHODS), name
        for chosen in benchmark.sets:
            assert plan.dataset(chosen).tests


def test_members_and_seeds():
    cpu = plan.PRESETS["cpu"]
    found = plan.runs("mace", cpu, ("aspirin",), ("stock", "e2ip"))
    assert sum(run.method == "stock" for run in found) == cpu.members
    assert sum(run.method == "e2ip" for run in found) == cpu.seeds
    assert len({run.name for run in found}) == len(found)


@pytest.mark.parametrize("host", plan.HOSTS)
def test_commands_name_method_seed_and_files(host, tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "_tool", lambda name: name)
    chosen = plan.dataset("silica")
    files = {label: tmp_path / f"{label}.extxyz" for label in ("train", *plan.labels(chosen))}
    for method in plan.METHODS:
        run = plan.Run("silica", host, method, 7)
        given = tmp_path / f"silica_{host}_{plan.METHODS[method].base}_s7" / commands.MODELS[plan.framework(host)]
        given.parent.mkdir(exist_ok=True)
        given.touch()
        stages = commands.stages(run, chosen, plan.PRESETS["cpu"], files, tmp_path / run.name)
        train = " ".join(stages[0].command)
        assert (str(given) in train and "forces=fixed" in train) == bool(plan.METHODS[method].base)
        assert ("--seed=7" if host == "mace" else "seed=7") in train and str(files["train"]) in train
        readout = plan.METHODS[method].readout
        if plan.backbone(host):
            assert f"nequip_{host.partition('-')[2]}" in train if readout else "_target_:nequip_ext." in train
        assert (f"readout={readout}" in train) if readout else ("readout" not in train)
        written = [name for stage in stages for name in stage.writes]
        if plan.METHODS[method].early:
            rate = f"lr={plan.METHODS[method].learning_rate:g}" if host == "mace" else "learning_rate="
            assert len(stages) == 1 and commands.TRACE in written and rate in train
            continue
        assert {commands.prediction(run, chosen, label) for label in plan.labels(chosen)} <= set(written)


def message(*arguments, **environment):
    result = CliRunner().invoke(app, ["bench", *map(str, arguments)], env={"E2IP_DATA": None, **environment})
    assert result.exit_code == 2
    return " ".join(result.output.split())


def test_bad_input(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "unknown benchmark 'rmd18'; choose from: rmd17" in message("rmd18", "--host", "mace")
    assert "--sets: unknown 'water'" in message("rmd17", "--host", "mace", "--sets", "water")
    assert "--methods: unknown 'magic'" in message("rmd17", "--host", "mace", "--methods", "stock,magic")
    assert "--backbone painn: networks of NequIP; give --host nequip" in message(
        "rmd17", "--host", "mace", "--backbone", "painn"
    )
    monkeypatch.setattr(commands, "find_spec", lambda name: None if "geometric" in name else True)
    monkeypatch.setattr(commands, "entry_points", lambda **group: ["there"])
    assert 'pip install "e2ip-plugins[nequip,backbones]"' in message(
        "rmd17", "--host", "nequip", "--backbone", "alphanet"
    )
    monkeypatch.setattr(commands, "find_spec", lambda name: None)
    assert "--host mace: not installed here" in message("rmd17", "--host", "mace")
    monkeypatch.setattr(commands, "find_spec", lambda name: True)
    monkeypatch.setattr(commands, "entry_points", lambda **group: [])
    assert "older than its code: install it anew" in message("rmd17", "--host", "mace")
    monkeypatch.setattr(commands, "entry_points", lambda **group: ["there"])
    assert "no file rmd17/aspirin_split01_train.extxyz in" in message("rmd17", "--host", "mace")
    assert "no run of these sets and methods is finished" in message("rmd17", "--host", "mace", "--tables")
    assert not list(tmp_path.iterdir())


def test_longer_trainings_want_a_folder_of_their_own(tmp_path):
    run = plan.Run("aspirin", "mace", "stock", 1)
    folder = tmp_path / "runs" / run.name
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(runs.settings(run, plan.PRESETS["smoke"], [])))
    (folder / "train.done").touch()
    words = ("rmd17", "--host", "mace", "--sets", "aspirin", "--methods", "stock", "--tables", "--out", tmp_path)
    assert "no run of these sets and methods is finished" in message(*words)
    assert "was made with other settings (epochs: 3, now 6)" in message(*words, "--epochs", 2)
