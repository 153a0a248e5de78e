"""``forces: fixed``: the readout of a model that is there is trained, and nothing else."""

import ase.io
import numpy as np
import pytest
import torch

from e2ip_plugins.errors import InputError
from nequip_ext import E2IPMetrics, E2IPModel
from nequip_ext.compat import NequIPCalculator
from nequip_ext.export.strip import strip_file
from nequip_ext.training.checks import check_that_progress_shows


def assert_same(one, two, files):
    calculators = [
        NequIPCalculator._from_saved_model(str(path), device="cpu", chemical_species_to_atom_type_map=True)
        for path in (one, two)
    ]
    for atoms in ase.io.read(files["val"], ":"):
        for calculator in calculators:
            calculator.calculate(atoms)
        theirs, ours = (calculator.results for calculator in calculators)
        assert theirs["energy"] == ours["energy"] and np.array_equal(theirs["forces"], ours["forces"])


def given(checkpoint):
    inner = f"{{_target_: nequip.model.ModelFromCheckpoint, checkpoint_path: '{checkpoint}'}}"
    return ("forces=fixed", "~training_module.model.model", f"+training_module.model.model={inner}")


def test_energies_and_forces_stay_and_the_readout_learns(train, failure, train_files, logged, tmp_path):
    stock = train("nequip_baseline", tmp_path / "stock", train_files, "max_epochs=2", "run=[train]") / "best.ckpt"
    weighted = "+training_module.val_metrics.coeffs.e2ip_nll=1.0"
    options = ("max_epochs=3", "run=[train]", *given(stock), weighted)
    run = train("nequip_e2ip", tmp_path / "fixed", train_files, *options)
    assert_same(stock, run / "best.ckpt", train_files)
    loss = [figures["train_loss_epoch/forces_e2ip"] for figures in logged(run, "train_loss_epoch").values()]
    assert loss[2] < loss[1] < loss[0]
    figures = logged(run)
    assert figures[2]["val0_epoch/forces_rmse"] == figures[0]["val0_epoch/forces_rmse"]
    state = torch.load(run / "best.ckpt", map_location="cpu", weights_only=False)["state_dict"]
    assert next(value for name, value in state.items() if name.endswith("leverage.fitted"))
    # Species in another order would be other atom types.
    text = failure("nequip_e2ip", tmp_path / "other", train_files, *options, "chemical_species=[O,C,H]")
    assert "the data have the atom types [O, C, H], the model has [" in text
    # Gradients that are weighed against one another would be the readout's against none.
    config = "training_module._target_=nequip.train.EMAConFIGLightningModule"
    text = failure("nequip_e2ip", tmp_path / "balanced", train_files, *options, config)
    assert "with 'forces: fixed': EMAConFIGLightningModule weighs" in text
    # And back.
    strip_file(run / "best.ckpt", tmp_path / "back.ckpt")
    assert_same(stock, tmp_path / "back.ckpt", train_files)
    # Which needs no other file, as the model with the readout does.
    moved = stock.rename(tmp_path / "moved.ckpt")
    assert_same(moved, tmp_path / "back.ckpt", train_files)
    with pytest.raises(InputError, match=r"its model comes from .*best\.ckpt, which does not exist"):
        strip_file(run / "best.ckpt", tmp_path / "again.ckpt")


def test_errors_that_never_change_choose_no_checkpoint():
    check_that_progress_shows([E2IPMetrics({"forces_rmse": 1.0, "e2ip_nll": 1.0})])
    with pytest.raises(InputError, match=r"add e2ip_nll: 1\.0"):
        check_that_progress_shows([E2IPMetrics({"forces_rmse": 1.0, "e2ip_nll": None})])


def test_a_new_model_cannot_stay_as_it_is(gnn_config):
    with pytest.raises(InputError, match=r"but the inner model is a new nequip\.model\.NequIPGNNModel"):
        E2IPModel(model=gnn_config(), seed=0, forces="fixed")
