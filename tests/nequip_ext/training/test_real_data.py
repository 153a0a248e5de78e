"""DFT frames of periodic silica through stock ``nequip-train``: train, predict, compare."""

from pathlib import Path

import numpy as np

from e2ip_plugins.report.compare import compare, load_models

CONFIGS = Path(__file__).parents[3] / "configs"


def test_zeolites_from_training_to_scores(reference_frames, tmp_path, run_tool):
    train = reference_frames("silica/zeolite_train.extxyz", 4)
    test = reference_frames("silica/zeolite_test.extxyz", 3)
    command = ["nequip-train", "-cp", CONFIGS, "-cn", "nequip_e2ip"]
    command += [f"train_file={train}", f"val_file={test}", f"test_file={test}", "chemical_species=[O,Si]"]
    command += ["max_epochs=1", "cutoff_radius=3.5", "batch_size=2", f"hydra.run.dir={tmp_path / 'run'}"]
    command += ["training_module.model.model.num_features=4", "training_module.model.model.l_max=1"]
    run_tool(*command)
    scores = compare(load_models([tmp_path / "run" / "test_dataset0.xyz"]))["models"][0]
    assert scores["frames"] == 3 and set(scores["species"]) == {"O", "Si"}
    assert all(np.isfinite(scores["overall"][key]) for key in ("nll", "calibration_error", "energy_score"))
