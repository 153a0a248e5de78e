"""`mace_run_train --readout e2ip` in every mode of training that MACE has."""

import ase.io
import numpy as np
import pytest
import torch

from e2ip_plugins.report.compare import compare, load_models

E2IP = ("--readout=e2ip",)
FIGURES = tuple(f"e2ip_{name}" for name in ("nll", "coverage95", "spearman", "condition", "condition_max", "plateau"))


def path_of(run):
    return f"--foundation_model={run.folder / 'foundation.model'}"


def readout_state(model):
    """Weights; what is counted, the leverage, is in test_fit.py."""
    state = {key: value for key, value in model.state_dict().items() if key.startswith("e2ip_readout.")}
    return {key: value for key, value in state.items() if ".leverage." not in key}


def test_a_plain_run_learns_logs_and_saves(train, data_files):
    run = train(*E2IP, "--ema", "--e2ip_force_unit=auto", max_num_epochs=3)
    assert run.validation[-1]["loss"] < run.validation[0]["loss"]
    assert all(np.isfinite([line[key] for key in FIGURES]).all() for line in run.validation)
    # Beside the stock keys and lines, not in their place.
    assert {"rmse_f", "mae_e_per_atom", "loss"} <= set(run.validation[-1])
    assert "Epoch 2: head: Default, loss=" in run.text
    assert "Epoch 2: head: Default, e2ip_nll=" in run.text
    last = run.validation[-1]
    assert 1.0 < last["e2ip_condition"] < last["e2ip_condition_max"] < 1177.0
    assert "e2ip NLL / nats" in run.text and "RMSE F / meV / A" in run.text
    # Energies have error bars from the fit on: in the final tables, not in those of epochs.
    assert "e2ip energy NLL / nats" in run.text and "e2ip energy coverage @ 95 %" in run.text
    assert not any("e2ip_energy_nll" in line for line in run.validation)
    assert type(run.model).__name__ == "ScaleShiftMACE"
    # MACE swallows the error of a failed compilation.
    assert (run.folder / "run_compiled.model").exists()
    # The automatic force unit is a fraction of the RMS of all components.
    forces = np.concatenate([atoms.arrays["REF_forces"] for atoms in ase.io.read(data_files["train"], ":")])
    assert run.model.e2ip_readout.settings.force_unit == pytest.approx(0.03 * np.sqrt((forces**2).mean()), rel=1e-9)


def test_settings_from_a_yaml_file(train, tmp_path):
    """The file names the paper's preset and changes two of its options."""
    config = tmp_path / "config.yaml"
    lines = ["readout: e2ip", "e2ip_preset: paper", "e2ip_evidence: independent", "e2ip_evidence_weight: 0.2"]
    config.write_text("\n".join([*lines, "e2ip_force_unit: 0.1"]))
    run = train(f"--config={config}", max_num_epochs=1)
    settings = run.model.e2ip_readout.settings
    assert settings.options["preset"] == "paper" and settings.options["evidence"] == "independent"
    assert run.model.e2ip_readout.family.scalar_damper == (4.0, 5.0)
    assert settings.force_unit == 0.1
    assert "evidence_weight=0.2" in run.text


@pytest.mark.nightly
@pytest.mark.parametrize("loss", ["stress", "virials", "huber", "l1l2energyforces", "ef"])
def test_losses(train, loss):
    """Values are checked in test_loss.py; here, that each loss of MACE's gets through a run; one more below."""
    run = train(*E2IP, f"--loss={loss}", max_num_epochs=1)
    assert np.isfinite([line["loss"] for line in run.validation]).all()


def test_stage_two_trains_the_readout_with_its_own_loss(train):
    """Without EMA, which would move the weights of a readout that no gradient reaches any more."""
    run = train(*E2IP, "--swa", "--start_swa=1", max_num_epochs=4)
    # The model of stage one is that of epoch 0, the last before stage two: what differs was learned in stage two.
    second = torch.load(run.folder / "run_stagetwo.model", weights_only=False)
    before, after = readout_state(run.model), readout_state(second)
    assert all(not torch.equal(before[key], after[key]) for key in before if not key.endswith("force_unit"))
    end_of_first, *stage_two = run.validation[1:]
    assert all("e2ip_nll" in line for line in stage_two)
    assert stage_two[-1]["e2ip_nll"] < end_of_first["e2ip_nll"]
    assert (run.folder / "run_stagetwo_compiled.model").exists()


def test_single_precision(train, predict, tmp_path, data_files):
    """Training in float32; what is logged is what the saved model's predictions score, where no fit comes between."""
    run = train(*E2IP, "--e2ip_evidence=coupled", default_dtype="float32", max_num_epochs=3)
    assert {value.dtype for value in run.model.state_dict().values() if value.is_floating_point()} == {torch.float32}
    assert all(np.isfinite([line[key] for key in (*FIGURES, "loss")]).all() for line in run.validation)
    best = min(run.validation[1:], key=lambda line: line["loss"])
    assert best["loss"] < run.validation[0]["loss"] and best["e2ip_nll"] < run.validation[0]["e2ip_nll"]
    predict(run.folder / "run.model", data_files["valid"], tmp_path / "out.xyz", default_dtype="float32")
    found = compare(load_models([tmp_path / "out.xyz"]))["models"][0]["overall"]
    assert found["nll"] == pytest.approx(best["e2ip_nll"], rel=1e-4)
    assert found["coverage95"] == pytest.approx(best["e2ip_coverage95"])


def test_freezing_everything_trains_the_readout_alone(train, foundation):
    run = train(*E2IP, "--freeze=7", path_of(foundation), name="frozen", max_num_epochs=2)
    before, after = foundation.model.state_dict(), run.model.state_dict()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed and all(key.startswith("e2ip_readout.") for key in changed)
    assert run.validation[-1]["loss"] < run.validation[0]["loss"]


def test_lora_trains_the_readout_as_a_whole(train, foundation):
    run = train(*E2IP, "--lora=True", "--lora_rank=2", path_of(foundation), name="lora", lr=0.001)
    before, after = readout_state(foundation.model), readout_state(run.model)
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[key], after[key]) for key in before if not key.endswith("force_unit"))


def test_multihead_fine_tuning(train, foundation, data_files):
    flags = (f"--pt_train_file={data_files['train']}", "--multiheads_finetuning=True", "--atomic_numbers=[1, 8]")
    run = train(*E2IP, path_of(foundation), *flags, name="fine", E0s="{1: 0.0, 8: 0.0}", max_num_epochs=1)
    assert run.model.heads == ["pt_head", "Default"]
    assert len(run.model.e2ip_readout.trunks) == 2
    assert "readout taken over from the foundation model" in run.text


def test_stock_fine_tuning_of_an_evidential_model(train, foundation):
    run = train(path_of(foundation), name="stock", max_num_epochs=1)
    assert not hasattr(run.model, "e2ip_readout") and type(run.model).__module__ == "mace.modules.models"


def masked(path, folder):
    """A copy of a file in which one atom has NaN and one an infinite reference force, in different frames."""
    frames = ase.io.read(path, ":")
    frames[0].arrays["REF_forces"][1, 0] = np.nan
    frames[1].arrays["REF_forces"][2] = np.inf
    ase.io.write(folder / path.name, frames)
    return folder / path.name


def test_nan_and_infinite_references_are_masked_and_counted(train, tmp_path, data_files):
    folder = tmp_path / "masked"
    folder.mkdir()
    paths = {f"{name}_file": masked(data_files[name], folder) for name in ("train", "valid")}
    run = train(*E2IP, test_file=paths["valid_file"], max_num_epochs=2, **paths)
    for name, atoms in (("training", 36), ("validation", 12), ("test", 12)):
        assert f"2 of {atoms} atoms of the {name}" in run.text
    for line in run.validation:
        assert np.isfinite([line[key] for key in (*FIGURES, "loss", "rmse_f", "mae_f", "rel_rmse_f", "q95_f")]).all()
    assert all(torch.isfinite(value).all() for value in run.model.state_dict().values())
    # MACE scales the energies by the force RMS, here that of the finite components.
    forces = np.concatenate([atoms.arrays["REF_forces"] for atoms in ase.io.read(paths["train_file"], ":")])
    rms = np.sqrt((forces[np.isfinite(forces)] ** 2).mean())
    assert run.model.scale_shift.scale.item() == pytest.approx(rms, rel=1e-9)


def test_figures_reach_wandb(train, monkeypatch, data_files):
    """The validation frames are training frames here; a warning says so before the first validation."""
    import sys
    from types import SimpleNamespace

    logged = []
    stub = SimpleNamespace(
        init=lambda **_: None,
        log=lambda figures, commit=True: logged.append(figures),
        run=SimpleNamespace(summary={}),
    )
    monkeypatch.setitem(sys.modules, "wandb", stub)
    wandb = ("--wandb", "--wandb_log_hypers=lr")
    run = train(*E2IP, *wandb, "--loss=universal", max_num_epochs=1, valid_file=data_files["train"])
    warned = run.text.index("validation frames are training frames: error bars come out too small")
    assert warned < run.text.index("Initial:")
    assert np.isfinite([line["loss"] for line in run.validation]).all()
    keys = {key for figures in logged for key in figures}
    assert {f"Default_valid_{name}" for name in FIGURES} <= keys
    assert {f"valid_Default_final_{name}" for name in FIGURES} <= keys
