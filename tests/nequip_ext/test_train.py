"""Stock ``nequip-train`` and ``nequip-package`` with the ready configs, end to end."""

import csv
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import ase.io
import numpy as np
import pytest
import torch

from e2ip_plugins.families.e2ip import derive_niw
from e2ip_plugins.keys import OUTPUT_KEYS
from nequip_ext import E2IPCalculator

CONFIGS = Path(__file__).parents[2] / "configs"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
SMALL = ["num_features=4", "l_max=1", "radial_mlp_width=8"]


def command(config, folder, files, *overrides):
    inner = "training_module.model" if config == "nequip_baseline" else "training_module.model.model"
    small = [f"{'++' if 'width' in s else ''}{inner}.{s}" for s in SMALL]
    data = [f"{name}_file={path}" for name, path in files.items()]
    tool = Path(sys.executable).with_name("nequip-train")
    run = [str(tool), "-cp", str(CONFIGS), "-cn", config, f"hydra.run.dir={folder}", *data, *small]
    return [*run, "max_epochs=3", "cutoff_radius=3.0", *overrides]


def train(config, folder, files, *overrides):
    done = subprocess.run(
        command(config, folder, files, *overrides), env=ENVIRONMENT, cwd=folder.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return folder


def validation(folder):
    """Validation figures by epoch, over all logs of a run; later logs win."""
    rows = {}
    for log in sorted(folder.glob("logs/version_*/metrics.csv"), key=lambda path: int(path.parent.name[8:])):
        for row in csv.DictReader(log.open()):
            if row.get("val0_epoch/forces_rmse"):
                rows[int(row["epoch"])] = {k: float(v) for k, v in row.items() if k.startswith("val0_epoch") and v}
    return rows


@pytest.fixture(scope="module")
def trained(tmp_path_factory, train_files):
    return train("nequip_e2ip", tmp_path_factory.mktemp("run") / "e2ip", train_files)


@pytest.fixture(scope="module")
def baseline(tmp_path_factory, train_files):
    return train("nequip_baseline", tmp_path_factory.mktemp("run") / "baseline", train_files)


def test_validation_log_has_our_figures_beside_the_stock_ones(trained, baseline):
    ours, stock = validation(trained), validation(baseline)
    assert sorted(ours) == sorted(stock) == [0, 1, 2]
    names = {f"val0_epoch/e2ip_{name}" for name in ("nll", "coverage95", "spearman", "plateau")}
    assert set(ours[2]) == set(stock[2]) | names


def test_writer_puts_uncertainties_into_xyz(trained, baseline, train_files):
    frames = ase.io.read(trained / "test_dataset0.xyz", ":")
    reference = ase.io.read(train_files["test"], ":")
    stock = ase.io.read(baseline / "test_dataset0.xyz", ":")
    assert len(frames) == len(reference) == len(stock) == 4
    for frame, expected, plain in zip(frames, reference, stock, strict=True):
        number = len(frame)
        shapes = {"e2ip_log_sigma0": (number, 6), "e2ip_nu": (number,), "forces_cov": (number, 9)}
        for name, shape in shapes.items():
            assert frame.arrays[name].shape == shape
        assert set(frame.arrays) - set(plain.arrays) == {
            *shapes,
            "e2ip_kappa",
            "forces_uncertainty",
            "forces_epistemic_std",
        }
        assert np.allclose(frame.arrays["original_dataset_forces"], expected.arrays["REF_forces"], atol=1e-7)
        parameters = {k: torch.tensor(frame.arrays[k]) for k in ("e2ip_log_sigma0", "e2ip_nu", "e2ip_kappa")}
        derived = derive_niw(parameters)
        assert np.allclose(derived["forces_cov"].reshape(-1, 9), frame.arrays["forces_cov"], atol=2e-8)
        assert np.isfinite(frame.get_forces()).all()


def test_calculator_gives_what_the_writer_wrote(trained):
    calculator = E2IPCalculator._from_saved_model(trained / "best.ckpt", chemical_species_to_atom_type_map=True)
    atoms = ase.io.read(trained / "test_dataset0.xyz")
    written = {name: atoms.arrays[name] for name in ("forces_cov", "e2ip_nu", "forces_epistemic_std")}
    forces = atoms.get_forces()
    atoms.calc = calculator
    assert np.allclose(atoms.get_forces(), forces, atol=1e-5)
    for name, value in written.items():
        assert np.allclose(calculator.results[name].reshape(value.shape), value, rtol=1e-4, atol=1e-7), name
    std, gradient = calculator.uncertainty_gradient(atoms)
    assert np.allclose(std, written["forces_epistemic_std"], rtol=1e-4, atol=1e-7)
    assert gradient.shape == (len(atoms), 3) and np.isfinite(gradient).all()


WITHOUT_PLUGIN = """
    import importlib.metadata, sys

    original = importlib.metadata.entry_points
    importlib.metadata.entry_points = lambda **k: [] if k.get("group") == "nequip.extension" else original(**k)

    class Uninstalled:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in ("nequip_ext", "e2ip_plugins"):
                raise ModuleNotFoundError(name)

    sys.meta_path.insert(0, Uninstalled())
    import ase.io, numpy
    from nequip.integrations.ase import NequIPCalculator

    package, frame, target = sys.argv[1:]
    calculator = NequIPCalculator._from_saved_model(package, chemical_species_to_atom_type_map=True)
    output = calculator.call_model(calculator.atoms_to_data(ase.io.read(frame)))
    numpy.save(target, output["forces_cov"].detach().numpy())
    assert "nequip_ext" not in sys.modules and "e2ip_plugins" not in sys.modules
"""


@pytest.fixture(scope="module")
def package(trained):
    path = trained / "model.nequip.zip"
    tool = Path(sys.executable).with_name("nequip-package")
    subprocess.run([tool, "build", trained / "best.ckpt", path], env=ENVIRONMENT, check=True, capture_output=True)
    return path


def test_packaged_model_needs_no_plugin(trained, package):
    frame, target = trained / "test_dataset0.xyz", trained / "cov.npy"
    script = textwrap.dedent(WITHOUT_PLUGIN)
    done = subprocess.run(
        [sys.executable, "-c", script, package, frame, target], env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    calculator = E2IPCalculator._from_saved_model(trained / "best.ckpt", chemical_species_to_atom_type_map=True)
    # the frame that `ase.io.read` gives without an index is the last one
    calculator.calculate(ase.io.read(frame))
    assert np.allclose(np.load(target), calculator.results["forces_cov"], rtol=1e-6)


def test_calculator_results_scale_with_units(package):
    from ase.build import molecule

    results = []
    for energy, length in ((1.0, 1.0), (2.0, 0.5)):
        calculator = E2IPCalculator._from_saved_model(
            package, chemical_species_to_atom_type_map=True, energy_units_to_eV=energy, length_units_to_A=length
        )
        calculator.calculate(molecule("CH3OH"))
        results.append(calculator.results)
    for key in OUTPUT_KEYS:
        if key.name != "e2ip_log_sigma0":
            assert np.allclose(results[1][key.name], 4.0**key.force_power * results[0][key.name]), key.name
    difference = results[1]["e2ip_log_sigma0"] - results[0]["e2ip_log_sigma0"]
    assert np.allclose(difference, [2 * np.log(4.0)] * 3 + [0.0] * 3)
    assert results[0]["forces_cov"].shape == (6, 3, 3)
    assert E2IPCalculator.implemented_properties[:2] == ["energy", "energies"]


def test_packaged_models_can_be_trained_on_and_wrapped(package, baseline, tmp_path_factory, train_files):
    """Fine-tuning: an evidential package as it is, a stock checkpoint with a readout added."""
    from nequip_ext import E2IPModel

    with pytest.raises(ValueError, match="already has an e2ip readout"):
        inner = {"_target_": "nequip.model.ModelFromPackage", "package_path": str(package)}
        E2IPModel(model=inner, seed=1)
    folder = tmp_path_factory.mktemp("run") / "tuned"
    model = {"_target_": "nequip.model.ModelFromCheckpoint", "checkpoint_path": str(baseline / "best.ckpt")}
    wrapped = E2IPModel(model=model, seed=1)["sole_model"]
    assert "forces_cov" in wrapped.irreps_out
    override = f"training_module.model={{_target_: nequip.model.ModelFromPackage, package_path: '{package}'}}"
    config = command("nequip_e2ip", folder, train_files, "max_epochs=1", "run=[train]")
    config = [argument for argument in config if "training_module.model." not in argument]
    done = subprocess.run([*config, f"~{override.split('=')[0]}", f"+{override}"], env=ENVIRONMENT, capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:].decode()


# NequIP 0.19.1 does not save the state of the shuffling generator: with shuffling a restarted run, stock
# or ours, sees the frames in another order and ends close by, not at the same figures.
LONG = ("max_epochs=20", "run=[train]", "data.train_dataloader.shuffle=false")


def killed_and_restarted(config, folder, files):
    """SIGKILL as soon as a checkpoint is there, then restart from it."""
    run = subprocess.Popen(
        command(config, folder, files, *LONG),
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.time() + 120
    while not (folder / "last.ckpt").exists() and run.poll() is None and time.time() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)  # the file may still be being written
    run.send_signal(signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    return train(config, folder, files, *LONG, f"++ckpt_path={folder / 'last.ckpt'}")


@pytest.mark.parametrize("config", ["nequip_baseline", "nequip_e2ip"])
def test_restart_after_kill(tmp_path, train_files, config):
    """Ends where an uninterrupted run ends, for the stock model and for ours."""
    whole = train(config, tmp_path / "whole", train_files, *LONG)
    broken = killed_and_restarted(config, tmp_path / "broken", train_files)
    expected, got = validation(whole)[19], validation(broken)[19]
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, rel=1e-6, abs=1e-9), name


def last_line_of_failure(*arguments):
    """The last line that a command prints which must fail before it trains."""
    done = subprocess.run(command(*arguments), env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode != 0
    assert "TRAIN RUN END" not in done.stdout and "Epoch 0" not in done.stdout
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_missing_forces_key_ends_before_training(tmp_path, train_files, split):
    renamed = tmp_path / "renamed.xyz"
    renamed.write_text(train_files[split].read_text().replace("REF_forces", "dft_forces"))
    message = last_line_of_failure("nequip_e2ip", tmp_path / "run", {**train_files, split: renamed})
    assert "no reference forces" in message and "key_mapping" in message
    assert {"train": "training data", "val": "validation data", "test": "test data"}[split] in message
    assert split == "train" or "renamed.xyz" in message


@pytest.mark.parametrize(
    ("checkpoint", "config", "override", "message"),
    [
        ("trained", "nequip_e2ip", "evidence=independent", "evidence independent.*trained with evidence coupled"),
        ("trained", "nequip_e2ip", "force_unit=0.1", r"force_unit 0\.1.*trained with force_unit 0\.0433641"),
        ("trained", "nequip_baseline", "seed=1", "readout stock.*trained with.*readout e2ip"),
        ("baseline", "nequip_e2ip", "seed=1", "readout e2ip.*trained with.*readout stock"),
    ],
)
def test_restart_of_a_checkpoint_with_another_readout(
    tmp_path, train_files, request, checkpoint, config, override, message
):
    """From the project's YAML; without the callback in it, a stock checkpoint cannot be noticed."""
    path = request.getfixturevalue(checkpoint) / "last.ckpt"
    line = last_line_of_failure(config, tmp_path / "run", train_files, f"++ckpt_path={path}", override)
    assert re.search(message, line), line
    assert str(path) in line


def test_restart_with_the_same_readout_in_other_words(tmp_path, trained, train_files):
    """Stating the default is no change, and neither is all that is not readout or loss."""
    restart = (f"++ckpt_path={trained / 'last.ckpt'}", "evidence=coupled", "max_epochs=4", "run=[train]")
    for change in ("++training_module.ema_decay=0.9", "force_unit=0.0433641"):
        done = subprocess.run(
            command("nequip_e2ip", tmp_path / "run", train_files, *restart, change),
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
        )
        assert "was trained with" not in done.stderr
