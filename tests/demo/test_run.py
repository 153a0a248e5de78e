"""The demo's runner, with small commands in place of trainings."""

import json
import sys
from pathlib import Path

import pytest


@pytest.fixture
def demo(load_script, tmp_path, monkeypatch):
    """demo/run.py as a module, working below ``tmp_path``."""
    module = load_script("demo/run.py")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / "out").mkdir()
    return module


OUT = Path("out")


def step(demo, name, code, **options):
    return demo.Step(name, [sys.executable, "-c", code], **options)


def test_finished_steps_are_skipped(demo, tmp_path, capfd):
    stages = [[step(demo, n, f"open('{n}', 'a').write('x')") for n in ("a", "b")]]
    demo.run("host", stages, OUT)
    demo.run("host", stages, OUT)
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text() == "x"
    assert "[host a] already done: out/a.log" in capfd.readouterr().out


def test_a_changed_step_runs_again_with_all_that_follow(demo, tmp_path):
    last = step(demo, "last", "open('last', 'a').write('x')")
    demo.run("host", [[step(demo, "first", "1")], [last]], OUT)
    demo.run("host", [[step(demo, "first", "2")], [last]], OUT)
    assert (tmp_path / "last").read_text() == "xx"


def test_a_failure_names_its_log_and_ends_the_others(demo, tmp_path):
    bad = step(demo, "bad", "import sys; print('the reason'); sys.exit(4)")
    slow = step(demo, "slow", "import time; time.sleep(600)")
    with pytest.raises(SystemExit) as error:
        demo.run("host", [[bad, slow], [step(demo, "never", "open('never', 'w')")]], OUT)
    assert "the reason" in str(error.value)
    assert "[host bad] failed with status 4" in str(error.value)
    assert "out/bad.log" in str(error.value)
    assert not (tmp_path / "never").exists()
    assert not (tmp_path / "out" / "slow.done").exists()


def test_an_interrupted_step_starts_clean(demo, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "left").touch()
    demo.run("host", [[step(demo, "train", "1", clears="model")]], OUT)
    assert not (tmp_path / "model").exists()


def test_progress_is_shown_as_it_comes(demo, capfd):
    demo.run("host", [[step(demo, "train", "1", progress=lambda: ["Epoch 0: good", "Epoch 1: better"])]], OUT)
    out = capfd.readouterr().out
    assert "[host train] Epoch 0: good\n[host train] Epoch 1: better\n" in out
    assert out.count("Epoch 0") == 1


def test_epoch_lines_of_both_hosts(demo, tmp_path):
    log = tmp_path / "log"
    log.write_text("x INFO: Loading\n2026-01-01 00:00:00.000 INFO: Epoch 0: head: Default, RMSE_F=  363.16 meV / A\n")
    assert demo.mace_epochs(log) == ["Epoch 0: head: Default, RMSE_F=  363.16 meV / A"]
    metrics = tmp_path / "metrics.csv"
    metrics.write_text("epoch,val0_epoch/forces_mae,val0_epoch/e2ip_nll\n0,,\n0,0.25,-1.5\n")
    assert demo.nequip_epochs(metrics) == ["Epoch 0: force MAE (eV/Å) 0.2500, NLL -1.5000"]
    assert demo.nequip_epochs(tmp_path / "none") == demo.mace_epochs(tmp_path / "none") == []


def test_summary_is_of_the_evidential_model(demo, tmp_path):

    def models(rmse, leverage):
        scores = {"force_rmse": rmse, "total_std": 0.04, "coverage95": 0.9, "leverage": leverage}
        return [{"label": "baseline", "overall": {}}, {"label": "e2ip", "overall": scores}]

    auroc = {"label": "e2ip", "mean_leverage": None, "max_epistemic_std": 0.875, "mean_epistemic_std": 1.0}
    ood = {"models": models(0.2, None), "frame_auroc": [{"label": "baseline"}, auroc]}
    (tmp_path / "out" / "compare").mkdir()
    (tmp_path / "out" / "compare" / "compare.json").write_text(json.dumps({"models": models(0.05, 1.25), "ood": ood}))
    _, trained, outside, frames = demo.in_and_out_of_distribution(OUT)
    assert trained.split() == "300 K, in distribution 50 meV/Å 40 meV/Å 0.90 1.25".split()
    assert outside.split() == "900 K, OOD 200 meV/Å 40 meV/Å 0.90 none".split()
    assert frames.endswith("none by mean leverage, 0.88 by largest epistemic std, 1.00 by mean epistemic std")


@pytest.mark.parametrize("host", ["nequip", "mace"])
def test_one_comparison_of_both_sets(demo, host):
    """Every file is a prediction of the model whose place it has, and no other step compares."""
    *before, (compare,) = getattr(demo, f"{host}_stages")(OUT, 1)
    assert not any("compare" in step.command for stage in before for step in stage)
    files = [word for word in compare.command if word.endswith(".xyz")]
    assert [Path(f).parent.name for f in files] == ["baseline", "e2ip"] * 2
    names = ["test_dataset0", "test_dataset1"] if host == "nequip" else ["test", "ood"]
    assert [Path(f).stem for f in files] == [names[0]] * 2 + [names[1]] * 2
    assert [compare.command[compare.command.index(f) - 1] for f in files[2:]] == ["--ood"] * 2
