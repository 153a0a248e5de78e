"""The tables of studies of the leverage."""

import json


def test_tables_that_the_documentation_shows_follow_from_the_results(load_script):
    script = load_script("benchmarks/leverage_tables.py")
    assert script.page(json.loads(script.RESULTS.read_text())) == script.RESULTS.with_suffix(".md").read_text()


def test_a_finished_run_is_studied_on_the_files_of_its_set(load_script, tmp_path, monkeypatch):
    script = load_script("benchmarks/leverage_tables.py")
    run = tmp_path / "runs" / "demo_mace_e2ip-fit_s1"
    run.mkdir(parents=True)
    (run / "run.json").write_text('{"run": {"dataset": "demo", "host": "mace", "method": "e2ip-fit", "seed": 1}}')
    (tmp_path / "data").mkdir()
    for name in ("train", "valid", "test"):
        (tmp_path / "data" / f"demo_{name}.extxyz").touch()
    calls = []

    def called(command, check):
        calls.append([str(word) for word in command[2:]])
        (run / "leverage.json").write_text('{"form": 8}')

    monkeypatch.setattr(script.subprocess, "run", called)
    assert script.study(run) == {"study": "tables", "model": run.name, "form": 8}
    assert f"--set=valid={tmp_path}/data/demo_valid.extxyz" in calls[0] and not any("ood" in word for word in calls[0])
    assert f"--set=nonsense={run}/nonsense.extxyz" in calls[0] and "--untrained" in calls[1]
