"""The leverage at the end of `mace_run_train`: in all files that it leaves, of every head, on two processes."""

import copy

import ase.io
import pytest
import torch
from ase.build import molecule

from e2ip_plugins import families
from e2ip_plugins.errors import InputError

FLAGS = ("--readout=e2ip", "--e2ip_evidence=leverage")
NAMES = [key.name for key in families.get("e2ip").output_keys()] + ["e2ip_leverage"]


def of_training_atoms(model, make_batch, data_files):
    frames = ase.io.read(data_files["train"], ":")
    species = [int(z) for z in model.atomic_numbers]
    # The cutoff of `training_options`; the molecules lie within it and that of `make_batch` alike.
    return model(make_batch(frames, species=species))["e2ip_leverage"]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-6), ("float32", 1e-4)])
def test_a_training_leaves_fitted_models(train, make_batch, data_files, predict, tmp_path, dtype, tolerance):
    from e2ip_plugins.report.compare import compare, load_models

    torch.set_default_dtype(getattr(torch, dtype))
    run = train(*FLAGS, "--ema", "--swa", "--start_swa=1", default_dtype=dtype, num_radial_basis=4)
    found = {}
    for path in (
        "run.model",
        "run_stagetwo.model",
        "checkpoints/run_run-1.model",
        "checkpoints/run_run-1_stagetwo.model",
    ):
        model = torch.load(run.folder / path, weights_only=False)
        assert model.e2ip_readout.leverage.fitted, path
        leverage = of_training_atoms(model, make_batch, data_files)
        assert leverage.mean().item() == pytest.approx(1.0, abs=tolerance)
        found[path] = leverage
    assert not torch.allclose(found["run.model"], found["run_stagetwo.model"])
    for stage in ("", "_stagetwo"):
        compiled = torch.jit.load(run.folder / f"run{stage}_compiled.model")
        of_compiled = of_training_atoms(compiled, make_batch, data_files)
        torch.testing.assert_close(of_compiled, found[f"run{stage}.model"], rtol=1e-2 * tolerance, atol=1e-6)
    assert run.text.count("Fitting the leverage") == run.text.count("leverage: growth") == 2
    # The last table is that of the fitted model.
    predict(run.folder / "run_stagetwo.model", data_files["valid"], tmp_path / "out.xyz", default_dtype=dtype)
    nll = compare(load_models([tmp_path / "out.xyz"]))["models"][0]["overall"]["nll"]
    table = run.text.split("Error-table on TRAIN and VALID")[2]
    cells = next(line for line in table.splitlines() if "valid_Default" in line).split("|")
    heading = next(line for line in table.splitlines() if "e2ip NLL" in line).split("|")
    column = next(i for i, cell in enumerate(heading) if "e2ip NLL" in cell)
    assert float(cells[column]) == pytest.approx(nll, abs=2e-4)


@pytest.mark.parametrize("evidence", ["coupled", "independent"])
def test_every_mode_has_a_leverage_and_else_predicts_as_it_was_trained(train, make_batch, data_files, evidence):
    model = train("--readout=e2ip", f"--e2ip_evidence={evidence}", max_num_epochs=1).model
    assert of_training_atoms(model, make_batch, data_files).mean().item() == pytest.approx(1.0, abs=1e-6)
    other = copy.deepcopy(model)
    other.e2ip_readout.leverage.reset()
    batch = make_batch([molecule("H2O")], species=(1, 8))
    found, expected = model({**batch}), other({**batch})
    assert all(torch.equal(found[name], expected[name]) for name in NAMES[:-1])
    assert (expected["e2ip_leverage"] == -1).all()


def test_a_restart_begins_unfitted_and_fits_again(restart):
    run = restart(*FLAGS)
    assert run.model.e2ip_readout.leverage.fitted
    assert "Fitting the leverage" in run.text.split("Training complete")[1]
    assert "Fitting the leverage" not in run.text.split("Training complete")[0]
    (path,) = (run.folder / "checkpoints").glob("*.pt")
    state = torch.load(path, weights_only=False)["model"]
    assert not state["e2ip_readout.leverage.fitted"]


def test_a_fit_that_is_impossible_leaves_the_model_unfitted(train, monkeypatch):
    """A training in two stages leaves two models; the fit of each fails for another reason."""
    errors = [MemoryError("full"), InputError("there is nothing to fit to")]

    def fail(*_, **__):
        raise errors.pop()

    monkeypatch.setattr("mace_ext.fitting.passes.fit_leverage", fail)
    run = train(*FLAGS, "--swa", "--start_swa=1")
    for text in ("there is", "MemoryError: full; what is wrong put right, fit it: e2ip"):
        assert f"The leverage was not fitted: {text}" in run.text
    for stage in ("", "_stagetwo"):
        model = torch.load(run.folder / f"run{stage}.model", weights_only=False)
        assert not model.e2ip_readout.leverage.fitted and (run.folder / f"run{stage}_compiled.model").exists()


def test_every_head_of_a_training_is_fitted(train, data_files, make_batch):
    heads = {
        name: {"train_file": str(data_files["train"]), "valid_file": str(data_files["valid"]), "E0s": "average"}
        for name in ("one", "two")
    }
    run = train(*FLAGS, f"--heads={heads}", train_file=None, valid_file=None, max_num_epochs=1)
    assert len(run.model.e2ip_readout.trunks) == 2
    assert {line["head"] for line in run.validation} == {"one", "two"} and "valid_two" in run.text
    assert "leverage (head one): growth" in run.text and "leverage (head two): growth" in run.text
    batches = [make_batch([molecule("H2O")], ["one", "two"], head, species=(1, 8)) for head in ("one", "two")]
    # The same data for both.
    one, two = (run.model(batch)["e2ip_leverage"] for batch in batches)
    torch.testing.assert_close(one, two)
    assert one.max() < 1e5


def test_two_processes_fit_what_one_does(train, tmp_path, start_two_processes, data_files, make_batch):
    """Seven training and three validation frames: each process has another number of them."""
    for name, count in (("train", 7), ("valid", 3)):
        ase.io.write(tmp_path / f"{name}.xyz", ase.io.read(data_files[name], f":{count}"))
    files = {f"{name}_file": tmp_path / f"{name}.xyz" for name in ("train", "valid")}
    # Nothing is learned, so that what is fitted does not depend on the share of the frames that was trained on.
    shared = {**files, "max_num_epochs": 1, "lr": 1e-30, "avg_num_neighbors": 2.0, "weight_decay": 0.0}
    flags = (*FLAGS, "--scaling=no_scaling", "--compute_avg_num_neighbors=False")
    wait = start_two_processes(*flags, name="two", batch_size=2, valid_batch_size=1, **shared)
    one = train(*flags, name="one", batch_size=4, valid_batch_size=2, **shared)
    wait()
    two = torch.load(tmp_path / "two.model", weights_only=False)
    assert two.e2ip_readout.leverage.fitted
    batch = make_batch([molecule("H2O"), molecule("H2")], species=(1, 8))
    found, expected = two({**batch}), one.model({**batch})
    torch.testing.assert_close(found["e2ip_leverage"], expected["e2ip_leverage"], rtol=1e-6, atol=1e-6)
    # The search for the constants stops within a tolerance.
    torch.testing.assert_close(found["forces_cov"], expected["forces_cov"], rtol=1e-3, atol=1e-6)
