"""Runs that are killed and restarted, and restarts of checkpoints that do not fit."""

import re
import signal
import sys
from types import SimpleNamespace

import pytest
import torch
from forked_commands import run_command
from omegaconf import OmegaConf

from e2ip_plugins.errors import InputError
from nequip_ext.training import restarts

# NequIP 0.19.1 does not save the state of the shuffling generator: with shuffling a restarted run, stock
# or ours, sees the frames in another order and ends close by, not at the same figures.
LONG = ("max_epochs=8", "run=[train]", "data.train_dataloader.shuffle=false")

#: Stock ``nequip-train`` up to the second batch of the sixth epoch.
KILLED = """
    import os, signal
    from nequip.train import NequIPLightningModule
    step = NequIPLightningModule.training_step

    def until_killed(self, batch, batch_idx, *rest):
        if (self.trainer.current_epoch, batch_idx) == (5, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, batch, batch_idx, *rest)

    NequIPLightningModule.training_step = until_killed
    from nequip.scripts.train import main
    main()
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory, train, train_files):
    """Function that gives the folder of a finished short run of a ready config."""
    folders = {}

    def get(config):
        if config not in folders:
            folders[config] = train(config, tmp_path_factory.mktemp("run") / config, train_files, "run=[train]")
        return folders[config]

    return get


@pytest.mark.parametrize("config", [pytest.param("nequip_baseline", marks=pytest.mark.nightly), "nequip_e2ip"])
def test_restart_after_kill(tmp_path, command, environment, train, train_files, logged, config):
    """Ends where an uninterrupted run ends, for the stock model and for ours."""
    whole = train(config, tmp_path / "whole", train_files, *LONG)
    broken = tmp_path / "broken"
    script = "\n".join(line[4:] for line in KILLED.splitlines())
    killed = [sys.executable, "-c", script, *command(config, broken, train_files, *LONG)[1:]]
    run = run_command(killed, env=environment)
    assert run.returncode == -signal.SIGKILL, run.stderr[-3000:]
    assert "TRAIN RUN END" not in run.stdout
    checkpoint = torch.load(broken / "last.ckpt", weights_only=False)
    assert checkpoint["epoch"] == 4, "killed in the sixth epoch, the last checkpoint is of the fifth"
    train(config, broken, train_files, *LONG, f"++ckpt_path={broken / 'last.ckpt'}")
    resumed = logged(broken, version=1)
    assert list(resumed) == [5, 6, 7], "the epoch that was cut off, and those after it"
    expected, got = logged(whole)[7], resumed[7]
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, rel=1e-6, abs=1e-9), name
    if config == "nequip_e2ip":  # and with the same leverage
        expected, got = (torch.load(f / "best.ckpt", weights_only=False)["state_dict"] for f in (whole, broken))
        centres = next(name for name in expected if name.endswith("readout.leverage.centres"))
        assert expected[centres.replace("centres", "fitted")] and got[centres.replace("centres", "fitted")]
        assert torch.allclose(got[centres], expected[centres], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("split", [*(pytest.param(s, marks=pytest.mark.nightly) for s in ("train", "val")), "test"])
def test_missing_forces_key_ends_before_training(tmp_path, train_files, failure, split):
    renamed = tmp_path / "renamed.xyz"
    renamed.write_text(train_files[split].read_text().replace("REF_forces", "dft_forces"))
    message = failure("nequip_e2ip", tmp_path / "run", {**train_files, split: renamed})
    assert "no reference forces" in message and "key_mapping" in message
    assert {"train": "training data", "val": "validation data", "test": "test data"}[split] in message
    assert split == "train" or "renamed.xyz" in message


@pytest.mark.parametrize(
    ("checkpoint", "config", "override", "message"),
    [
        pytest.param(
            *("nequip_e2ip", "nequip_e2ip", "evidence=independent"),
            "evidence independent.*trained with evidence leverage",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            *("nequip_e2ip", "nequip_baseline", "seed=1", "readout stock.*trained with.*readout e2ip"),
            marks=pytest.mark.nightly,
        ),
        ("nequip_baseline", "nequip_e2ip", "seed=1", "readout e2ip.*trained with.*readout stock"),
    ],
)
def test_restart_of_a_checkpoint_with_another_readout(
    tmp_path, train_files, finished, failure, checkpoint, config, override, message
):
    path = finished(checkpoint) / "last.ckpt"
    line = failure(config, tmp_path / "run", train_files, f"++ckpt_path={path}", override)
    assert re.search(message, line), line
    assert str(path) in line


def test_restart_with_the_same_readout_in_other_words(tmp_path, finished, train, train_files, logged):
    """Stating the default is no change, and neither is all that is not readout or loss; overrides may interpolate."""
    changes = ["evidence=leverage", "force_unit=0.0433641", "++training_module.ema_decay=0.9"]
    changes.append("training_module.model.model.per_type_energy_scales=${training_data_stats:forces_rms}")
    restart = (f"++ckpt_path={finished('nequip_e2ip') / 'last.ckpt'}", "max_epochs=4", "run=[train]")
    folder = train("nequip_e2ip", tmp_path / "run", train_files, *restart, *changes)
    assert list(logged(folder)) == [3]


E2IP = {"_target_": "nequip_ext.E2IPModel", "forces_rms": 2.0, "model": {"_target_": "nequip.model.NequIPGNNModel"}}
AUTO = {"force_unit": "auto"}
INDEPENDENT = {"evidence": "independent"}


def section(model, loss):
    wrapped = E2IP["model"] if model is None else {**E2IP, **model}
    return {"model": wrapped, "loss": {"_target_": "nequip_ext.E2IPLoss", **loss}}


@pytest.mark.parametrize(
    ("saved", "saved_loss", "asked", "asked_loss", "differing"),
    [
        ({}, {}, {"preset": "default", "evidence": "leverage"}, {"preset": "default"}, None),
        (AUTO, {}, {**AUTO, "forces_rms": "${training_data_stats:forces_rms}"}, {}, None),
        (AUTO, {}, {"force_unit": 0.06}, {}, None),
        (INDEPENDENT, {"evidence_weight": 0.01}, INDEPENDENT, {}, None),
        ({"evidence": "leverage"}, {}, {"evidence": "leverage"}, {}, None),
        ({"forces": "host"}, {}, {"forces": "host"}, {}, None),
        (None, {}, None, {}, None),
        ({}, {}, {"force_unit": 0.1}, {}, ("force_unit 0.1", "force_unit 0.0433641")),
        ({}, {}, AUTO, {}, ("force_unit 0.06", "force_unit 0.0433641")),
        (
            {},
            {},
            {"preset": "paper"},
            {},
            (
                "preset paper, evidence independent, evidence_weight 0.1",
                "preset default, evidence leverage, evidence_weight 0.0.",
            ),
        ),
        (INDEPENDENT, {}, INDEPENDENT, {"evidence_weight": 0.5}, ("evidence_weight 0.5", "evidence_weight 0.01.")),
        ({}, {}, {"evidence": "coupled"}, {}, ("evidence coupled", "evidence leverage.")),
        ({}, {}, {"forces": "host"}, {}, ("forces host", "forces likelihood.")),
        (None, {}, {}, {}, ("readout e2ip", "readout stock")),
    ],
)
def test_what_a_restart_may_change(monkeypatch, saved, saved_loss, asked, asked_loss, differing):
    """The message names what is asked for, then what the checkpoint has."""
    config = OmegaConf.create({"ckpt_path": "last.ckpt", "training_module": section(asked, asked_loss)})
    monkeypatch.setattr(restarts, "_running_config", lambda: config)
    module = SimpleNamespace(hparams={"info_dict": {"training_module": section(saved, saved_loss)}})
    if differing is None:
        restarts.check_restart(module)
        return
    requested, used = map(re.escape, differing)
    with pytest.raises(InputError, match=f"{requested}, but .* trained with {used}"):
        restarts.check_restart(module)
