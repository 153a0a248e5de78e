"""What `e2ip bench` would train, the YAML files that say so, and the commands for it."""

import pytest
from typer.testing import CliRunner

from e2ip_plugins import families
from e2ip_plugins.bench import catalogue, commands, plan
from e2ip_plugins.cli import app
from e2ip_plugins.errors import InputError
from e2ip_plugins.readout.settings import Settings

MINE = {"train": "a.xyz", "valid": "b.xyz", "tests": {"test": "c.xyz"}, "species": ["C"]}


def test_methods_are_what_the_families_take():
    for method in catalogue.METHODS.values():
        if method.readout:
            assert Settings.of(method.readout, method.options, 0.05).family in families.table()
    assert set(catalogue.METHODS["e2ip-paper-undamped"].options.values()) == {"paper", "off"}
    assert len(catalogue.EARLY) == 20


@pytest.mark.parametrize("name", [*catalogue.TABLES, *catalogue.DATASETS])
def test_every_file_of_ours_is_a_table(name):
    _, table, sets, _ = catalogue.read_table(name)
    assert table.about, f"{name}.yaml lacks the key about: one sentence for the page"
    assert set(table.methods) <= set(catalogue.METHODS)
    assert all(next(iter(one.tests)) == "test" for one in sets.values()), f"{name}.yaml: call the first test `test`"


def test_sets_that_are_derived_from_others():
    whole, part = catalogue.dataset("aspirin"), catalogue.dataset("aspirin-30")
    assert part.frames == (135, 50) and catalogue.replace(part, frames=(450, 50)) == whole
    narrow, copper = catalogue.dataset("copper-gold-16"), catalogue.dataset("copper-gold")
    assert narrow.arguments == {"mace": ["--num_channels=16"]} and narrow.script == copper.script


def test_members_and_seeds():
    cpu = catalogue.PRESETS["cpu"]
    found = plan.runs("mace", cpu, ("aspirin",), ("stock", "e2ip"))
    assert [sum(run.method == method for run in found) for method in ("stock", "e2ip")] == [cpu.members, cpu.seeds]
    assert len({run.name for run in found}) == len(found)
    assert [plan.ensemble_size(method, cpu) for method in ("stock", "e2ip", "mve-spd")] == [5, 2, 0]


def test_fewer_seeds(plan_of):
    made = plan_of(name="demo", preset="cpu", methods="stock,e2ip", seeds=1)
    assert [(run.method, run.seed) for run in made.runs] == [("stock", 1), ("e2ip", 1)]


@pytest.mark.parametrize("host", catalogue.HOSTS)
def test_commands_name_method_seed_and_files(host, tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "_tool", lambda name: name)
    chosen, framework = catalogue.replace(catalogue.dataset("silica"), arguments={"mace": ["--x"]}), host[:4]
    files = {label: tmp_path / f"{label}.extxyz" for label in ("train", *chosen.labels)}
    for name, method in catalogue.METHODS.items():
        run = plan.Run("silica", host, name, 7)
        base = tmp_path / f"silica_{host}_{method.base}_s7" / commands.MODELS[catalogue.framework(host)]
        base.parent.mkdir(exist_ok=True)
        base.touch()
        stages = commands.stages(run, chosen, catalogue.PRESETS["cpu"], files, tmp_path / run.name)
        train, written = " ".join(stages[0].command), [name for stage in stages for name in stage.writes]
        assert (str(base) in train) == bool(method.base) and str(files["train"]) in train
        if not method.early:
            assert {commands.prediction(run, chosen, label) for label in chosen.labels} <= set(written)
        if method.fit:
            assert train.startswith("e2ip fit") and stages[1].command[:2] == ["e2ip", "evaluate"]
            continue
        assert ("forces=fixed" in train) == bool(method.base) and ("--x" in train) == (framework == "mace")
        assert ("--seed=7" if host == "mace" else "seed=7") in train
        if catalogue.backbone(host):
            assert f"nequip_{host.partition('-')[2]}" in train if method.readout else "_target_:nequip_ext." in train
        assert (f"readout={method.readout}" in train) if method.readout else ("readout" not in train)
        if method.early:
            rate = f"lr={method.learning_rate:g}" if host == "mace" else "learning_rate="
            assert len(stages) == 1 and commands.TRACE in written and rate in train


def test_lengths_of_a_preset_go_before_those_of_a_set():
    preset, run = catalogue.PRESETS["calibration"], plan.Run("acac", "nequip", "e2ip", 1)
    assert commands.epochs(run, catalogue.dataset("acac"), preset) == 40
    assert commands.epochs(run._replace(dataset="demo"), catalogue.dataset("demo"), preset) == 60


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trian": "a.xyz"}, "unknown key 'trian'; known are: train, tests"),
        ({"species": None}, "key 'species' is missing"),
        ({"species": [False]}, r"species: \[False\] should be a list like .*: write 'No' in quotes"),
        ({"species": "Cu"}, r"species: 'Cu' should be a list like \[Cu, Au\]"),
        ({"epochs": 40}, "epochs: 40 should be a mapping like {mace: 40, nequip: 40}"),
        ({"cutoff": "wide"}, "cutoff: 'wide' should be a number"),
        ({"spread": 1}, "spread: 1 should be true or false"),
        ({"valid": None}, "frames: give `valid: FILE`, or"),
        ({"keys": {"force": "f"}}, "keys: known are energy and forces"),
        ({"tests": {"rotated": "c.xyz"}}, "tests: .* are names of other files"),
        ({"tests": {"a b": "c.xyz"}}, "tests: labels are letters, digits, - and _, not 'a b'"),
        ({"tests": {300: "c.xyz"}}, "tests: .* should be a mapping like .*, labels that are numbers in quotes"),
        ({"species": ["c"]}, "species: 'c' is no chemical symbol"),
        ({"epochs": {"mace": 3}}, "epochs: give both"),
        ({"methods": ["magic"]}, "methods: unknown 'magic'; choose from stock"),
        ({"like": "gold"}, "unknown data set 'gold'"),
    ],
)
def test_a_file_that_says_something_wrong(changes, message, tmp_path):
    values = {key: value for key, value in {**MINE, **changes}.items() if value is not None}
    (tmp_path / "mine.yaml").write_text(catalogue.yaml.safe_dump(values))
    with pytest.raises(InputError, match=f"mine.yaml: {message}" if "like" not in changes else message):
        catalogue.read_table(str(tmp_path / "mine.yaml"))


def test_files_that_are_no_descriptions(tmp_path):
    mine = tmp_path / "mine.yaml"
    with pytest.raises(InputError, match=r"mine\.yaml: no such file"):
        catalogue.read_table(str(mine))
    with pytest.raises(InputError, match=r"mine\.yml: the file of a data set or table ends in \.yaml"):
        catalogue.read_table(str(mine.with_suffix(".yml")))
    for text, message in (
        ("a: [", r"cannot be read as YAML \(.* in mine\.yaml, line 1"),
        ("- a", "a mapping of keys to values should be here"),
    ):
        mine.write_text(text)
        with pytest.raises(InputError, match=message):
            catalogue.read_table(str(mine))
    mine.write_text("{sets: [demo, other], methods: [stock]}")
    with pytest.raises(InputError, match="unknown data set 'other'"):
        catalogue.read_table(str(mine))
    (tmp_path / "other.yaml").write_text(catalogue.yaml.safe_dump(MINE))
    assert catalogue.read_table(str(mine))[1].sets == ("demo", "other")


def message(*arguments, **environment):
    result = CliRunner().invoke(app, ["bench", *map(str, arguments)], env={"E2IP_DATA": None, **environment})
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


def test_bad_input(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mace = ("--host", "mace")
    assert "unknown benchmark 'rmd18'; choose from: calibration, damping" in message("rmd18", *mace)
    assert "--sets: unknown 'water'" in message("rmd17", *mace, "--sets", "water")
    unknown = message("rmd17", *mace, "--methods", "stock,magic")
    assert "--methods: unknown 'magic'; choose from stock, e2ip, e2ip-coupled" in unknown
    assert "--methods names nothing" in message("rmd17", *mace, "--methods", ",")
    assert "--preset tiny: choose from smoke, cpu" in message("rmd17", *mace, "--preset", "tiny")
    assert "--host: give mace or nequip" in message("rmd17")
    assert "--backbone painn: networks of NequIP (painn, alphanet); give --host nequip" in message(
        "rmd17", *mace, "--backbone", "painn"
    )
    monkeypatch.setattr(commands, "find_spec", lambda name: None if name == "torch_geometric" else True)
    monkeypatch.setattr(commands, "entry_points", lambda **group: ["there"])
    assert 'pip install "e2ip-plugins[nequip,backbones]"' in message(
        "rmd17", "--host", "nequip", "--backbone", "alphanet"
    )
    monkeypatch.setattr(commands, "find_spec", lambda name: None)
    assert "--host mace: not installed here" in message("rmd17", *mace)
    monkeypatch.setattr(commands, "find_spec", lambda name: True)
    monkeypatch.setattr(commands, "entry_points", lambda **group: [])
    assert "older than its code: install it anew" in message("rmd17", *mace)
    monkeypatch.setattr(commands, "entry_points", lambda **group: ["there"])
    missing = message("rmd17", *mace, "--sets", "aspirin")
    assert f"aspirin.yaml: train: no file rmd17/aspirin_split01_train.extxyz in {tmp_path}: correct the" in missing
    assert "copper.yaml: script: no file benchmarks/crystals.py" in message("copper", *mace)
    assert "no run of these sets and methods is finished" in message("rmd17", *mace, "--tables")
    assert not list(tmp_path.iterdir())


def test_longer_trainings_want_a_folder_of_their_own(tmp_path, plan_of, note_of):
    (note_of(plan.Run("aspirin", "mace", "stock", 1), plan_of()) / "train.done").touch()
    words = ("rmd17", "--host", "mace", "--sets", "aspirin", "--methods", "stock", "--tables", "--out", tmp_path)
    assert "no run of these sets and methods is finished" in message(*words)
    assert "was made with other settings (epochs: 3, now 6)" in message(*words, "--epochs", 2)
