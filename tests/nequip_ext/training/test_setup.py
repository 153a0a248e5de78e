"""What happens before the first batch, without a line in the user's config."""

import subprocess
import sys
from importlib.metadata import entry_points

import lightning
import pytest
import torch
from nequip.train import EnergyForceLoss
from nequip.train.callbacks import LinearLossCoefficientScheduler, LossCoefficientScheduler, SoftAdapt

from e2ip_plugins.errors import InputError
from e2ip_plugins.readout.layout import Layout
from e2ip_plugins.readout.readout import Readout
from e2ip_plugins.readout.settings import Settings
from nequip_ext import E2IPInputCheck, E2IPLoss, E2IPMetrics, setup
from nequip_ext.model.readout import find_readout
from nequip_ext.training import checks

LOSS = {"_target_": "nequip_ext.E2IPLoss"}
STOCK_LOSS = {"_target_": "nequip.train.EnergyForceLoss"}
METRICS = {"_target_": "nequip_ext.E2IPMetrics"}


@pytest.fixture
def make_module(gnn_config, default_dtype):
    """Function that builds a training module; options go to E2IPModel, or None for a stock model."""
    from nequip.train import EMALightningModule

    def make(options, loss=LOSS, metrics=METRICS):
        wrapped = {"_target_": "nequip_ext.E2IPModel", "seed": 1, "model": gnn_config(), **(options or {})}
        return EMALightningModule(
            model=wrapped["model"] if options is None else wrapped,
            num_datasets={"train": 1, "val": 1, "test": 1, "predict": 0},
            loss=loss,
            val_metrics=metrics,
            test_metrics=metrics,
            info_dict={"runs": ["train"]},
        )

    return make


@pytest.fixture
def trainer(tmp_path):
    """A Trainer as ``nequip-train`` makes it, with the callback that older configs name, too."""
    return lightning.Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        callbacks=[E2IPInputCheck()],
    )


def set_up(trainer, module, stage="fit"):
    for callback in trainer.callbacks:
        callback.setup(trainer, module, stage)


def test_every_trainer_has_the_set_up_of_which_the_first_acts(trainer, make_module, monkeypatch):
    assert [point.value for point in entry_points(group="lightning.pytorch.callbacks_factory", name="e2ip")] == [
        "nequip_ext.setup:callbacks"
    ]
    assert sum(isinstance(callback, E2IPInputCheck) for callback in trainer.callbacks) == 2
    calls = []
    monkeypatch.setattr(checks, "bind", lambda module: calls.append(module))
    set_up(trainer, make_module({}))
    assert len(calls) == 1


def test_loss_and_model_get_the_same_settings(trainer, make_module):
    """The model's, with what the loss alone was told."""
    module = make_module({"preset": "paper", "evidence_weight": 0.3, "force_unit": 0.1})
    told = make_module({"evidence": "independent"}, {**LOSS, "evidence_weight": 0.3})
    for stage in ("fit", "test"):
        set_up(trainer, module, stage)
        family = module.loss["forces_e2ip"].family
        assert (family.coupled, family.mse_like, family.evidence_weight) == (False, False, 0.3)
        set_up(trainer, told, stage)
        assert told.loss["forces_e2ip"].family.evidence_weight == 0.3
        assert find_readout(told).settings.options["evidence_weight"] == 0.3


class GraphReadout(torch.nn.Module):
    """Stands for the readout in a model: it is found by its name, because packages carry a class of their own."""

    def __init__(self, family="e2ip", **options):
        super().__init__()
        layout = Layout(scalars=[(0, 4)], vectors=[(0, 3)], tensors=[(9, 2)])
        self.readout = Readout(Settings.of(family, options, 0.05), layout)


@pytest.mark.parametrize(
    ("options", "loss", "metrics", "message"),
    [
        ({}, {"evidence": "independent"}, {}, "E2IPLoss has evidence independent, the model leverage"),
        ({"preset": "paper"}, {"preset": "default"}, {}, "E2IPLoss has preset default, the model paper"),
        ({}, {"evidence_weight": 0.1}, {}, "evidence mode 'leverage' has no regulariser"),
        ({"evidence": "independent"}, {"evidence": "coupled"}, {}, "has evidence coupled, the model independent"),
        ({"preset": "paper", "evidence_weight": 0.1}, {"evidence_weight": 0.2}, {}, r"weight 0\.2, the model 0\.1"),
        ({"family": "isotropic"}, {}, {}, "E2IPLoss has readout 'e2ip', the model 'isotropic'"),
        ({}, {"readout": "isotropic"}, {}, "E2IPLoss has readout 'isotropic', the model 'e2ip'"),
        ({}, {}, {"readout": "isotropic"}, "E2IPMetrics has readout 'isotropic', the model 'e2ip'"),
        (None, {}, {}, r"E2IPLoss needs a model with a readout.*nequip_ext\.E2IPModel"),
        (None, None, {}, r"E2IPMetrics needs a model with a readout.*nequip_ext\.E2IPModel"),
    ],
    ids=str,
)
def test_what_does_not_go_together(toy_family, options, loss, metrics, message):
    parts = [torch.nn.Linear(1, 1) if options is None else GraphReadout(**options)]
    parts += [] if loss is None else [E2IPLoss(**loss)]
    with pytest.raises(InputError, match=message):
        checks.bind(torch.nn.ModuleList([*parts, E2IPMetrics(**metrics)]))


@pytest.mark.parametrize("kind", ["loss", "metrics"])
def test_unknown_names_of_what_is_ignored(trainer, make_module, kind):
    """NequIP would look at the NaN after all."""
    section = {"loss": LOSS, "metrics": METRICS}[kind]
    for name in ("total_energy", "forces", "stress"):
        set_up(trainer, make_module({}, **{kind: {**section, "ignore_nan": {name: True}}}))
    named = {"loss": "loss", "metrics": "val_metrics"}[kind]
    for name in ("energy", "per_atom_energy"):
        module = make_module({}, **{kind: {**section, "ignore_nan": {"forces": True, name: True}}})
        message = f"ignore_nan of {named} names {name}, .*may name total_energy, forces, stress"
        with pytest.raises(InputError, match=message):
            set_up(trainer, module)
        set_up(trainer, module, "test")  # a finished training is tested


def linear(**final):
    return LinearLossCoefficientScheduler(final, transition_epochs=2, start_epoch=3)


@pytest.mark.parametrize("scheduler", [lambda **final: LossCoefficientScheduler({3: final}), linear])
def test_a_schedule_must_name_terms_of_the_loss(scheduler):
    """NequIP would switch off the rest: with the names of a stock loss, all that the readout learns from."""
    loss = E2IPLoss()
    for name in ("forces_e2ip", "per_atom_energy_mse"):
        checks.check_callbacks([scheduler(**{name: 1.0})], loss)
    schedule = scheduler(per_atom_energy_mse=1.0, forces_mse=5.0)
    with pytest.raises(
        InputError, match=r"names forces_mse, which the loss does not have: its terms are .*forces_e2ip"
    ):
        checks.check_callbacks([lightning.Callback(), schedule], loss)
    checks.check_callbacks([schedule], EnergyForceLoss({"total_energy": 1.0, "forces": 1.0}))


def test_schedulers_that_start_from_null():
    loss = E2IPLoss({"total_energy": None, "forces": 1.0})
    soft = SoftAdapt(1.1, "epoch", 2)
    for scheduler in (linear(per_atom_energy_mse=1.0, forces_e2ip=1.0), soft):
        with pytest.raises(InputError, match=r"starts from .*, but that of per_atom_energy_mse is null: give 0\.0"):
            checks.check_callbacks([scheduler], loss)
        checks.check_callbacks([scheduler], E2IPLoss({"total_energy": 0.0, "forces": 1.0}))
        before = LossCoefficientScheduler({1: {"per_atom_energy_mse": 1.0, "forces_e2ip": 1.0}})
        checks.check_callbacks([scheduler, before], loss)


def test_weights_are_averaged_by_nequip_alone():
    averaging = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging")
    with pytest.raises(InputError, match=r"WeightAveraging tests other weights.*EMALightningModule"):
        checks.check_callbacks([averaging.WeightAveraging()], E2IPLoss())


def test_stock_losses_and_modules_of_others_are_left_alone(trainer, make_module, monkeypatch):
    told = []
    monkeypatch.setattr(checks.logger, "warning", told.append)
    set_up(trainer, make_module(None, STOCK_LOSS, {"_target_": "nequip.train.EnergyForceMetrics"}))
    assert not told
    set_up(trainer, make_module({}, STOCK_LOSS, {"_target_": "nequip.train.EnergyForceMetrics"}))
    assert len(told) == 1 and "the readout of the model learns nothing" in told[0]
    monkeypatch.setattr(checks, "bind", None)
    set_up(trainer, lightning.LightningModule())


def test_the_readout_is_found_wherever_it_is(make_module):
    module = make_module({})
    assert find_readout(module.model) is find_readout(module) is find_readout(module.model["sole_model"])
    assert find_readout(torch.nn.Linear(1, 1)) is None


def test_no_callback_where_nequip_is_not_in_use(monkeypatch):
    assert len(setup.callbacks()) == 2
    monkeypatch.setattr(setup.contract, "problem", lambda: "something is missing")
    assert setup.callbacks() == []
    monkeypatch.undo()
    monkeypatch.delitem(sys.modules, "nequip")
    assert setup.callbacks() == []


@pytest.mark.parametrize("installed", [True, False])
def test_lightning_of_other_projects_does_not_get_nequip(installed):
    """Neither where it is installed nor where it is not."""
    script = """
import importlib.metadata, sys
original = importlib.metadata.version
def version(name):
    if name == "nequip":
        raise importlib.metadata.PackageNotFoundError(name)
    return original(name)
if not {installed}:
    importlib.metadata.version = version
import lightning
trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
assert not any("e2ip" in type(callback).__module__ for callback in trainer.callbacks)
assert not any("nequip_ext" in type(callback).__module__ for callback in trainer.callbacks)
assert "nequip" not in sys.modules and "nequip_ext" in sys.modules
import nequip_ext
try:
    nequip_ext.E2IPModel
except ValueError as error:
    assert "NequIP is not installed" in str(error) and not {installed}
else:
    assert {installed}
    from nequip.data._key_registry import _NODE_FIELDS
    assert "forces_cov" in _NODE_FIELDS
"""
    done = subprocess.run(
        [sys.executable, "-c", script.replace("{installed}", str(installed))], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_nequip_train_ends_before_training(tmp_path, failure, train_files):
    text = failure("nequip_e2ip", tmp_path / "run", train_files, "++training_module.loss.evidence=independent")
    assert "InputError: E2IPLoss has evidence independent, the model leverage: give them the same" in text


def test_a_validation_set_of_training_frames_is_told_before_the_training(tmp_path, train, train_files):
    folder = train("nequip_e2ip", tmp_path / "run", {**train_files, "val": train_files["train"]}, "max_epochs=1")
    text = (folder / "train.log").read_text()
    assert "validation frames are training frames: error bars come out too small" in text
