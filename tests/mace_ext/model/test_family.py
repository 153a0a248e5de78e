"""A family in one file, which nothing here knows, through the stock commands."""

import json

import ase.io
import numpy as np


def test_from_training_to_scores(toy_family_environment, training_command, run_one_after_another, data_files, tmp_path):
    _, _, _, *options = training_command("--readout=isotropic", "--ema", "--swa", "--start_swa=1", max_num_epochs=2)
    commands = [["mace_run_train", *options]]
    for name, model in (("eager", "run.model"), ("scripted", "run_compiled.model")):
        files = (f"--configs={data_files['valid']}", f"--model={model}", f"--output={name}.xyz")
        commands.append(["mace_eval_configs", *files])
    commands.append(["e2ip", "compare", "eager.xyz", "--out", "compared"])
    log = run_one_after_another(commands, env=toy_family_environment, cwd=tmp_path)
    assert "Epoch 1: head: Default, isotropic_nll=" in log and "isotropic NLL / nats" in log
    frames = ase.io.read(tmp_path / "eager.xyz", ":")
    scripted = ase.io.read(tmp_path / "scripted.xyz", ":")
    for atoms, other in zip(frames, scripted, strict=True):
        assert atoms.info["MACE_uq_family"] == other.info["MACE_uq_family"] == "isotropic"
        # Whatever the family, the leverage; but nothing of another family's.
        assert [name for name in atoms.arrays if "e2ip_" in name] == ["MACE_e2ip_leverage"]
        variance = np.exp(2 * atoms.arrays["MACE_isotropic_log_std"])
        expected = variance[:, None] * np.eye(3).ravel()
        np.testing.assert_allclose(atoms.arrays["MACE_forces_cov"], expected, rtol=1e-6, atol=1e-7)
        for name in atoms.arrays:
            np.testing.assert_allclose(other.arrays[name], atoms.arrays[name], rtol=1e-6, atol=1e-7)
    (scores,) = json.loads((tmp_path / "compared" / "compare.json").read_text())["models"]
    assert scores["uq_family"] == "isotropic" and np.isfinite(scores["overall"]["nll"])
