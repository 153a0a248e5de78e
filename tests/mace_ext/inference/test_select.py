"""`e2ip md` and `e2ip select` with MACE: features are those of the fit, leverage is that of the calculator."""

import ase.io
import numpy as np
import pytest
import torch
from mace.calculators import MACECalculator
from typer.testing import CliRunner

from e2ip_plugins.active.features import collect
from e2ip_plugins.cli import app
from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.labelled_files import read_frames
from mace_ext.fitting.file import fit_file
from mace_ext.inference.batches import open_passes


@pytest.fixture(scope="module")
def folder(tmp_path_factory, make_model, labelled):
    """Folder with a fitted model of two heads, its training set, and a run of frames that go away from it."""
    folder = tmp_path_factory.mktemp("fitted")
    torch.save(
        make_model(atomic_inter_scale=(20.0, 1.0), heads=("one", "two"), atomic_inter_shift=(0.0, 0.0)),
        folder / "fresh.model",
    )
    torch.save(make_model(readout=None), folder / "stock.model")
    training = without_forces(labelled("CH3OH", 12, 0, 0.05))
    validation = labelled("CH3OH", 8, 1, 0.05)
    fit_file(folder / "fresh.model", training, validation, folder / "fitted.model", head="two", batch_size=12)
    ase.io.write(folder / "train.xyz", [frame.atoms for frame in training], format="extxyz")
    run = [labelled("CH3OH", 1, 7, 0.02 * i)[0].atoms for i in range(1, 9)]
    ase.io.write(folder / "run.xyz", run * 2, format="extxyz")
    return folder


def without_forces(frames):
    return [frame._replace(forces=None) for frame in frames]


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_features_are_those_of_the_fit(folder, check_features):
    run, training = (read_frames([folder / name], need_forces=False) for name in ("run.xyz", "train.xyz"))
    calculator = MACECalculator(str(folder / "fitted.model"), device="cpu", default_dtype="float64", head="two")
    passes = open_passes(folder / "fitted.model", head="two", batch_size=5)
    check_features(passes, calculator, training, run[:8])
    assert torch.get_default_dtype() == torch.float64


def test_a_run_and_what_is_taken_of_it(folder, tmp_path):
    model, train = folder / "fitted.model", folder / "train.xyz"
    options = ("--train", train, "--head", "two", "--output", tmp_path / "taken.xyz")
    result = call("select", model, folder / "run.xyz", "--number", 3, *options)
    assert result.exit_code == 0, result.output
    taken = ase.io.read(tmp_path / "taken.xyz", ":")
    assert [atoms.info["select_rank"] for atoms in taken] == [0, 1, 2] and taken[0].info["select_index"] == 7
    assert len({tuple(atoms.positions.ravel()) for atoms in taken}) == 3
    assert taken[0].info["select_source"] == str(folder / "run.xyz")
    assert "16 frames, 8 candidates (8 copies of others); 3 taken" in result.stdout
    for read in (train, folder / "run.xyz"):
        result = call("select", model, folder / "run.xyz", "--number", 3, *options, "--output", read, "--overwrite")
        assert result.exit_code == 2 and "is a file that this command reads" in result.stderr
    assert "taken.xyz: is there already" in call("select", model, folder / "run.xyz", "--number", 3, *options).stderr
    result = call("select", model, folder / "run.xyz", "--number", 3, "--every", 8, *options, "--overwrite")
    assert "2 frames, 1 candidates" in result.stdout and "only 1 of 2 frames are candidates" in result.stderr


@pytest.fixture
def start(labelled, tmp_path):
    """Path of a frame to start from."""
    ase.io.write(tmp_path / "start.xyz", labelled("CH3OH", 1, 3, 0.05)[0].atoms, format="extxyz")
    return tmp_path / "start.xyz"


def test_dynamics(fitted_file, start, tmp_path):
    words = ["md", fitted_file, start, tmp_path / "out.xyz", "--steps", 4, "--interval", 2]
    result = call(*words, "--watch", "e2ip_leverage=1e5", "--check-interval", 1)
    assert result.exit_code == 0, result.output
    assert "4 steps, 3 frames written\nmonitor: 0 alarms in 5 checks" in result.stdout
    last = ase.io.read(tmp_path / "out.xyz", 2)
    calculator = MACECalculator(str(fitted_file), device="cpu", default_dtype="float64")
    expected = calculator.get_property("e2ip_leverage", last)
    np.testing.assert_allclose(last.arrays["e2ip_leverage"], expected, rtol=1e-4)


def test_precision_of_a_run(model_files, start, tmp_path):
    """Bond constraints, for example, want float64 of a float32 model."""

    def run(dtype):
        return call("md", model_files["e2ip"], start, tmp_path / f"{dtype}.xyz", "--steps", 1, "--dtype", dtype)

    found = {}
    for dtype in ("float32", "float64"):
        assert run(dtype).exit_code == 0
        frame = ase.io.read(tmp_path / f"{dtype}.xyz", 0)
        calculator = MACECalculator(str(model_files["e2ip"]), device="cpu", default_dtype=dtype)
        assert next(calculator.models[0].parameters()).dtype == getattr(torch, dtype)
        found[dtype] = frame.get_forces()
        np.testing.assert_allclose(found[dtype], calculator.get_property("forces", frame), atol=2e-8)
    assert 0.0 < np.abs(found["float32"] - found["float64"]).max() < 1e-4
    refused = run("half")
    assert refused.exit_code == 2 and "--dtype half: choose float32 or float64" in refused.stderr


def test_what_is_refused(folder, labelled, tmp_path):
    with pytest.raises(InputError, match=r"stock\.model: has no readout of e2ip-plugins; e2ip fit gives it one"):
        open_passes(folder / "stock.model")
    with pytest.raises(InputError, match="has 2 heads; give --head"):
        open_passes(folder / "fitted.model")
    with pytest.raises(InputError, match=r"N2 0: has N, which the model does not know; it knows"):
        collect(open_passes(folder / "fitted.model", head="two"), labelled("N2", 1, 0))
    (tmp_path / "half.model").write_bytes((folder / "fitted.model").read_bytes()[:1000])
    options = ["--train", folder / "train.xyz", "--number", 1, "--output", tmp_path / "a.xyz"]
    for words, message in (
        (("select", tmp_path / "half.model", folder / "run.xyz", *options), "half.model: "),
        (("md", tmp_path / "half.model", folder / "run.xyz", tmp_path / "b.xyz", "--steps", 1), "half.model: "),
        (
            ("select", folder / "fresh.model", folder / "run.xyz", "--head", "two", *options),
            "leverage of its readout has not been fitted",
        ),
    ):
        result = call(*words)
        assert result.exit_code == 2 and message in result.stderr
