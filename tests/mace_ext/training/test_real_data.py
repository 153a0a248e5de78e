"""DFT frames of periodic silica through the stock commands: train, predict, compare."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from e2ip_plugins.report.compare import compare, load_models


def run(folder, command, *arguments):
    tool = Path(sys.executable).with_name(command)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(tool), *map(str, arguments)], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_zeolites_from_training_to_scores(reference_frames, tmp_path):
    train = reference_frames("silica/zeolite_train.extxyz", 4)
    test = reference_frames("silica/zeolite_test.extxyz", 3)
    options = "--num_channels 4 --max_L 0 --max_ell 1 --correlation 1 --r_max 3.5 --batch_size 2 --max_num_epochs 1"
    options += " --E0s average --energy_key REF_energy --forces_key REF_forces --device cpu --seed 1 --readout e2ip"
    run(tmp_path, "mace_run_train", "--name", "m", "--train_file", train, "--valid_file", test, *options.split())
    run(tmp_path, "mace_eval_configs", "--configs", test, "--model", "m.model", "--output", "out.xyz")
    scores = compare(load_models([tmp_path / "out.xyz"]))["models"][0]
    assert scores["frames"] == 3 and set(scores["species"]) == {"O", "Si"}
    assert all(np.isfinite(scores["overall"][key]) for key in ("nll", "calibration_error", "energy_score"))
