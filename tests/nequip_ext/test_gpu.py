"""On a GPU: what a model predicts, learns and is fitted to is what the CPU gives; compiled and exported models, too."""

import subprocess
import sys
from pathlib import Path

import ase.io
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from e2ip_plugins import cli, families
from nequip_ext import E2IPCalculator
from nequip_ext.inference.calculator import open_model

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
ACCELERATOR = {"cpu": "cpu", "cuda": "gpu"}
DOUBLE = "training_module.model.model.model_dtype=float64"
NAMES = [key.name for key in families.get("e2ip").output_keys()] + ["e2ip_leverage", "energy", "forces"]


@pytest.fixture(scope="module")
def train_on(tmp_path_factory, train, train_files):
    """Function that trains on a device with a ready config; the run's folder."""

    def run(device, config, *overrides, **settings):
        folder = tmp_path_factory.mktemp("run") / f"{config}-{device}"
        where = (f"++trainer.accelerator={ACCELERATOR[device]}", "++trainer.devices=1")
        return train(config, folder, train_files, *where, *overrides, **settings)

    return run


def results(path, frames, device):
    calculator = E2IPCalculator.from_saved_model(path, device=device)
    found = []
    for atoms in frames:
        calculator.calculate(atoms)
        found.append({name: np.asarray(calculator.results[name]) for name in NAMES})
    return calculator, found


def assert_same(found, expected, rtol, atol):
    for a, b in zip(found, expected, strict=True):
        for name, value in b.items():
            np.testing.assert_allclose(a[name], value, rtol=rtol, atol=atol * np.abs(value).max(), err_msg=name)


@pytest.fixture(scope="module")
def trained(train_on):
    """Run folders by device of the same training in float64, with the fit of the leverage at its end."""
    return {device: train_on(device, "nequip_e2ip", DOUBLE) for device in ("cpu", DEVICE)}


@pytest.fixture(scope="module")
def test_frames(train_files):
    return ase.io.read(train_files["test"], ":")


def test_a_training_is_that_of_the_cpu(trained, logged, test_frames):
    here, there = logged(trained[DEVICE]), logged(trained["cpu"])
    for epoch, expected in there.items():
        for name, value in expected.items():
            assert here[epoch][name] == pytest.approx(value, rel=1e-6, abs=1e-9), (epoch, name)
    (_, found), (_, expected) = (results(trained[d] / "best.ckpt", test_frames, "cpu") for d in (DEVICE, "cpu"))
    assert_same(found, expected, 1e-4, 1e-5)  # constants of the fit: where a search ends
    for device, run in trained.items():
        _, of_run = results(run / "best.ckpt", test_frames, device)
        for frame, values in zip(ase.io.read(run / "test_dataset0.xyz", ":"), of_run, strict=True):
            np.testing.assert_allclose(frame.arrays["e2ip_leverage"], values["e2ip_leverage"], rtol=1e-5)


def test_predictions_are_those_of_the_cpu(trained, test_frames):
    path = trained[DEVICE] / "best.ckpt"
    (here, found), (there, expected) = (results(path, test_frames, device) for device in (DEVICE, "cpu"))
    assert_same(found, expected, 1e-9, 1e-9)
    for a, b in zip(*(c.uncertainty_gradient(test_frames[0]) for c in (here, there)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-8 * np.abs(b).max())


def test_commands(trained, train_files, test_frames, tmp_path):
    """`e2ip fit` and `e2ip evaluate`."""
    model = str(trained["cpu"] / "best.ckpt")
    for device in ("cpu", DEVICE):
        fitted, output = tmp_path / f"{device}.ckpt", tmp_path / f"{device}.xyz"
        data = ["--train", str(train_files["train"]), "--valid", str(train_files["val"])]
        for command in (
            ["fit", model, *data, "--output", str(fitted), "--device", device],
            ["evaluate", model, str(train_files["test"]), str(output), "--device", device],
        ):
            done = CliRunner().invoke(cli.app, command)
            assert done.exit_code == 0, (command, done.output, done.exception)
    (_, found), (_, expected) = (results(tmp_path / f"{d}.ckpt", test_frames, "cpu") for d in (DEVICE, "cpu"))
    assert_same(found, expected, 1e-4, 1e-5)
    for a, b in zip(*(ase.io.read(tmp_path / f"{d}.xyz", ":") for d in (DEVICE, "cpu")), strict=True):
        assert a.arrays.keys() == b.arrays.keys()
        for name in ("forces_cov", "e2ip_nu", "e2ip_leverage", "forces_epistemic_std"):
            np.testing.assert_allclose(a.arrays[name], b.arrays[name], rtol=1e-6, atol=2e-8, err_msg=name)


@pytest.mark.parametrize("kernel", ["auto", "triton"])
def test_compiled_for_training(train_on, trained, logged, environment, kernel):
    """``compile_mode: compile``; with ``E2IP_KERNEL=triton`` the generated code calls our kernels."""
    run = train_on(DEVICE, "nequip_e2ip", DOUBLE, "compile_mode=compile", env={**environment, "E2IP_KERNEL": kernel})
    here, there = logged(run), logged(trained["cpu"])
    for epoch, expected in there.items():
        assert here[epoch]["val0_epoch/e2ip_nll"] == pytest.approx(expected["val0_epoch/e2ip_nll"], rel=1e-5)


@pytest.mark.parametrize("kernel", ["auto", "triton"])
def test_compiled_ahead_of_time(trained, environment, test_frames, tmp_path, kernel):
    """``nequip-compile --device cuda --target e2ip_ase``, from the package as users do it."""
    tools, package, path = Path(sys.executable).parent, tmp_path / "model.nequip.zip", tmp_path / "model.nequip.pt2"
    checkpoint = trained[DEVICE] / "best.ckpt"
    for command in (
        [tools / "nequip-package", "build", checkpoint, package],
        [tools / "nequip-compile", package, path, "--mode", "aotinductor", "--device", DEVICE, "--target", "e2ip_ase"],
    ):
        environ = {**environment, "E2IP_KERNEL": kernel}
        done = subprocess.run(command, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    calculator = open_model(path, device=DEVICE)
    _, expected = results(checkpoint, test_frames, "cpu")
    for atoms, values in zip(test_frames, expected, strict=True):
        calculator.calculate(atoms)
        found = {name: np.asarray(calculator.results[name]) for name in NAMES}
        assert_same([found], [values], 1e-7, 1e-7)


@pytest.mark.parametrize("family", sorted(set(families.table()) - {"e2ip"}))
def test_other_families(train_on, logged, family):
    fields = "trainer.callbacks.3.extra_fields=[forces_cov, e2ip_leverage]"
    overrides = (DOUBLE, f"readout={family}", "max_epochs=2", fields)
    runs = {device: train_on(device, "nequip_e2ip", *overrides, "run=[train]") for device in ("cpu", DEVICE)}
    here, there = (logged(runs[device]) for device in (DEVICE, "cpu"))
    for name, value in there[1].items():
        assert here[1][name] == pytest.approx(value, rel=1e-6, abs=1e-9), name


@pytest.mark.parametrize("backbone", ["nequip_painn", "nequip_alphanet"])
def test_backbones(train_on, test_frames, backbone):
    pytest.importorskip("torch_geometric")
    run = train_on(DEVICE, backbone, DOUBLE)
    (_, found), (_, expected) = (results(run / "best.ckpt", test_frames, device) for device in (DEVICE, "cpu"))
    assert_same(found, expected, 1e-9, 1e-9)
