"""DFT frames of periodic silica through the stock commands: train, predict, compare."""

import numpy as np

from e2ip_plugins.report.compare import compare, load_models


def test_zeolites_from_training_to_scores(reference_frames, tmp_path, run_tool):
    train = reference_frames("silica/zeolite_train.extxyz", 4)
    test = reference_frames("silica/zeolite_test.extxyz", 3)
    options = "--num_channels 4 --max_L 0 --max_ell 1 --correlation 1 --r_max 3.5 --batch_size 2 --max_num_epochs 1"
    options += " --E0s average --energy_key REF_energy --forces_key REF_forces --device cpu --seed 1 --readout e2ip"
    files = ("--name", "m", "--train_file", train, "--valid_file", test)
    run_tool("mace_run_train", *files, *options.split(), cwd=tmp_path)
    run_tool("mace_eval_configs", "--configs", test, "--model", "m.model", "--output", "out.xyz", cwd=tmp_path)
    scores = compare(load_models([tmp_path / "out.xyz"]))["models"][0]
    assert scores["frames"] == 3 and set(scores["species"]) == {"O", "Si"}
    assert all(np.isfinite(scores["overall"][key]) for key in ("nll", "calibration_error", "energy_score"))
