"""On a GPU: what a model predicts, learns, is fitted to and written by is what the CPU gives."""

import ase.io
import numpy as np
import pytest
import torch
from mace.calculators import MACECalculator
from typer.testing import CliRunner

from e2ip_plugins import cli, families

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def results(path, atoms, device, dtype="float64"):
    calculator = MACECalculator(model_paths=str(path), device=device, default_dtype=dtype)
    calculator.calculate(atoms)
    return calculator, calculator.results


def assert_same(found, expected, rtol, atol):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, (float, np.ndarray)):
            scale = np.abs(value).max()
            np.testing.assert_allclose(found[name], value, rtol=rtol, atol=atol * scale, err_msg=name)


def learned(run):
    """Everything that the validations of a training found."""
    return [
        [line[key] for key in sorted(line) if isinstance(line[key], float) and key != "time"] for line in run.validation
    ]


@pytest.fixture
def on_both(train):
    """Function that trains on CPU and GPU with the same settings; the runs by device."""
    return lambda *flags, **settings: {
        device: train(*flags, device=device, name=device, **settings) for device in ("cpu", DEVICE)
    }


@pytest.mark.parametrize("family", sorted(families.table()))
def test_a_training_is_that_of_the_cpu(on_both, data_files, family):
    """With the fit of the leverage at its end, in float64; then the GPU's model on both devices, in both precisions."""
    runs = on_both(f"--readout={family}", "--ema", test_file=data_files["valid"])
    np.testing.assert_allclose(learned(runs[DEVICE]), learned(runs["cpu"]), rtol=1e-6)
    atoms = ase.io.read(data_files["valid"], 1)
    predicted = {device: results(run.folder / f"{device}.model", atoms, "cpu")[1] for device, run in runs.items()}
    assert_same(predicted[DEVICE], predicted["cpu"], 1e-4, 1e-5)  # constants of the fit: where a search ends
    path = runs[DEVICE].folder / f"{DEVICE}.model"
    for dtype, tolerance in (("float64", 1e-9), ("float32", 2e-4)):
        (here, found), (there, expected) = (results(path, atoms, device, dtype) for device in (DEVICE, "cpu"))
        assert_same(found, expected, tolerance, tolerance)
        gradients = (calculator.uncertainty_gradient(atoms, "forces_uncertainty") for calculator in (here, there))
        for a, b in zip(*gradients, strict=True):
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max())


def test_single_precision_and_two_stages(train):
    run = train("--readout=e2ip", "--swa", "--start_swa=1", device=DEVICE, default_dtype="float32", max_num_epochs=3)
    assert np.isfinite(learned(run)).all()
    for stage in ("", "_stagetwo"):
        assert torch.load(run.folder / f"run{stage}.model", weights_only=False).e2ip_readout.leverage.fitted


def test_commands(on_both, data_files, tmp_path):
    """`e2ip fit` and `e2ip evaluate` of a model without readout."""
    model = on_both(max_num_epochs=1)["cpu"].folder / "cpu.model"
    written = {}
    for device in ("cpu", DEVICE):
        fitted, output = tmp_path / f"{device}-e2ip.model", tmp_path / f"{device}.xyz"
        data = ["--train", str(data_files["train"]), "--valid", str(data_files["valid"])]
        for command in (
            ["fit", str(model), *data, "--output", str(fitted), "--device", device],
            ["evaluate", str(tmp_path / "cpu-e2ip.model"), data[3], str(output), "--device", device],
        ):
            done = CliRunner().invoke(cli.app, command)
            assert done.exit_code == 0, (command, done.output, done.exception)
        written[device] = ase.io.read(output, ":")
    atoms = written["cpu"][0]
    (_, found), (_, expected) = (results(tmp_path / f"{d}-e2ip.model", atoms, "cpu") for d in (DEVICE, "cpu"))
    assert_same(found, expected, 1e-4, 1e-5)
    for a, b in zip(written[DEVICE], written["cpu"], strict=True):
        assert a.arrays.keys() == b.arrays.keys()
        for name in ("forces_cov", "e2ip_nu", "e2ip_leverage", "forces_epistemic_std"):
            np.testing.assert_allclose(a.arrays[name], b.arrays[name], rtol=1e-6, atol=2e-8, err_msg=name)


def test_torchscript(train, make_batch, data_files):
    run = train("--readout=e2ip", device=DEVICE)
    batch = make_batch(ase.io.read(data_files["valid"], ":"), species=(1, 8))
    batch = {key: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    compiled = torch.jit.load(run.folder / "run_compiled.model", map_location=DEVICE)
    eager, scripted = run.model.to(DEVICE)({**batch}), compiled({**batch})
    for key in families.get("e2ip").output_keys():
        torch.testing.assert_close(scripted[key.name], eager[key.name], rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("irreps", ["8x0e", "8x0e+8x1o+8x2e"])
def test_cuequivariance(make_model, make_batch, frames, irreps):
    pytest.importorskip("cuequivariance_torch", reason="cuequivariance_torch is not installed")
    from mace.cli import convert_e3nn_cueq

    model, batch = make_model(hidden_irreps=irreps), make_batch(frames)
    batch = {key: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    expected = model.to(DEVICE)({**batch})
    found = convert_e3nn_cueq.run(model.cpu(), device=DEVICE)({**batch})
    for key in families.get("e2ip").output_keys():
        torch.testing.assert_close(found[key.name], expected[key.name], rtol=1e-8, atol=1e-12)
