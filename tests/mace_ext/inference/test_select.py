"""`e2ip md` and `e2ip select` with MACE: features are those of the fit, leverage is that of the calculator."""

import ase.io
import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import molecule
from mace.calculators import MACECalculator
from typer.testing import CliRunner

from e2ip_plugins.active.select import by_leverage
from e2ip_plugins.cli import app
from e2ip_plugins.errors import InputError
from e2ip_plugins.fitting.features import collect
from e2ip_plugins.predictions.labelled import Frame

NAN = np.full((6, 3), np.nan)


def rattled(count, seed, width=0.05):
    frames = []
    for i in range(count):
        atoms = molecule("CH3OH")
        atoms.rattle(width, seed=1000 * seed + i)
        frames.append(atoms)
    return frames


def as_frames(frames):
    return [Frame(atoms, NAN, "frame") for atoms in frames]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, make_model):
    """Folder with a fitted model of two heads, its training set, and a run of frames that go away from it."""
    from mace_ext.fitting.file import fit_file

    folder = tmp_path_factory.mktemp("fitted")
    torch.save(
        make_model(atomic_inter_scale=(20.0, 1.0), heads=("one", "two"), atomic_inter_shift=(0.0, 0.0)),
        folder / "fresh.model",
    )
    torch.save(make_model(readout=None), folder / "stock.model")
    training, validation = rattled(12, 0), rattled(8, 1)
    rng = np.random.default_rng(0)
    labelled = [Frame(atoms, rng.normal(size=(6, 3)), "frame") for atoms in validation]
    fit_file(folder / "fresh.model", as_frames(training), labelled, folder / "fitted.model", head="two", batch_size=12)
    ase.io.write(folder / "train.xyz", training, format="extxyz")
    ase.io.write(folder / "run.xyz", [rattled(1, 7, 0.02 * i)[0] for i in range(1, 9)] * 2, format="extxyz")
    return folder


def test_features_are_those_of_the_fit(folder):
    from mace_ext.inference.features import open_passes

    model = open_passes(folder / "fitted.model", head="two", batch_size=5)
    run = ase.io.read(folder / "run.xyz", ":8")
    training = collect(model, as_frames(ase.io.read(folder / "train.xyz", ":")))
    found = collect(model, as_frames(run), forces=True)
    calculator = MACECalculator(str(folder / "fitted.model"), device="cpu", default_dtype="float64", head="two")
    leverage, forces = [], []
    for atoms in run:
        forces.append(calculator.get_property("forces", atoms))
        leverage.append(calculator.results["e2ip_leverage"])
    np.testing.assert_allclose(found.leverage, np.concatenate(leverage), rtol=1e-9)
    np.testing.assert_allclose(found.forces, np.concatenate(forces), atol=1e-9)
    # Moments made anew of the same training set say the same.
    ((index, score),) = by_leverage(training, found, 1)
    means = np.mean(leverage, axis=1)
    assert index == means.argmax() and score == pytest.approx(means[index], rel=1e-6)
    assert training.leverage.mean() == pytest.approx(1.0, abs=1e-6) and np.isnan(training.forces).all()
    assert torch.get_default_dtype() == torch.float64


def test_a_run_and_what_is_taken_of_it(folder, tmp_path):
    def call(*words):
        return CliRunner().invoke(app, [str(word) for word in words])

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


def test_dynamics(fitted_single, tmp_path):
    words = ["md", fitted_single, tmp_path / "start.xyz", tmp_path / "out.xyz", "--steps", 4, "--interval", 2]
    ase.io.write(tmp_path / "start.xyz", rattled(1, 3), format="extxyz")
    result = CliRunner().invoke(app, [str(w) for w in (*words, "--watch", "e2ip_leverage=1e5", "--check-interval", 1)])
    assert result.exit_code == 0, result.output
    assert "4 steps, 3 frames written\nmonitor: 0 alarms in 5 checks" in result.stdout
    found = ase.io.read(tmp_path / "out.xyz", ":")
    calculator = MACECalculator(str(fitted_single), device="cpu", default_dtype="float64")
    np.testing.assert_allclose(
        found[2].arrays["e2ip_leverage"], calculator.get_property("e2ip_leverage", found[2]), rtol=1e-4
    )


def test_precision_of_a_run(fitted_single, tmp_path):
    """Bond constraints, for example, want float64 of a float32 model."""
    ase.io.write(tmp_path / "start.xyz", rattled(1, 3), format="extxyz")

    def run(name, *options):
        words = ["md", fitted_single, tmp_path / "start.xyz", tmp_path / name, "--steps", 1, *options]
        return CliRunner().invoke(app, [str(word) for word in words])

    for dtype in ("float32", "float64"):
        assert run(f"{dtype}.xyz", "--dtype", dtype).exit_code == 0
        found = ase.io.read(tmp_path / f"{dtype}.xyz", 0)
        calculator = MACECalculator(str(fitted_single), device="cpu", default_dtype=dtype)
        assert next(calculator.models[0].parameters()).dtype == getattr(torch, dtype)
        np.testing.assert_allclose(found.get_forces(), calculator.get_property("forces", found), atol=2e-8)
    single, double = (ase.io.read(tmp_path / f"{dtype}.xyz", 0).get_forces() for dtype in ("float32", "float64"))
    assert 0.0 < np.abs(single - double).max() < 1e-4
    refused = run("half.xyz", "--dtype", "half")
    assert refused.exit_code == 2 and "--dtype half: choose float32 or float64" in refused.stderr


@pytest.fixture(scope="module")
def fitted_single(tmp_path_factory, make_model):
    from mace_ext.fitting.file import fit_file

    folder = tmp_path_factory.mktemp("single")
    torch.save(make_model(), folder / "fresh.model")
    labelled = [Frame(atoms, np.ones((6, 3)), "frame") for atoms in rattled(6, 1)]
    fit_file(folder / "fresh.model", as_frames(rattled(12, 0)), labelled, folder / "fitted.model", batch_size=12)
    return folder / "fitted.model"


def test_what_is_refused(folder, tmp_path):
    from mace_ext.inference.features import open_passes

    with pytest.raises(InputError, match=r"stock\.model: has no readout of e2ip-plugins; e2ip fit gives it one"):
        open_passes(folder / "stock.model")
    with pytest.raises(InputError, match="has 2 heads; give --head"):
        open_passes(folder / "fitted.model")
    model = open_passes(folder / "fitted.model", head="two")
    with pytest.raises(InputError, match=r"here: has N, which the model does not know; it knows"):
        collect(model, [Frame(Atoms("N2", np.eye(3)[:2]), NAN, "here")])
    (tmp_path / "half.model").write_bytes((folder / "fitted.model").read_bytes()[:1000])
    options = ["--train", folder / "train.xyz", "--number", 1, "--output", tmp_path / "a.xyz"]
    for words in (
        ("select", tmp_path / "half.model", folder / "run.xyz", *options),
        ("md", tmp_path / "half.model", folder / "run.xyz", tmp_path / "b.xyz", "--steps", 1),
    ):
        result = CliRunner().invoke(app, [str(word) for word in words])
        assert result.exit_code == 2 and "half.model: " in result.stderr
    result = CliRunner().invoke(
        app, [str(w) for w in ("select", folder / "fresh.model", folder / "run.xyz", "--head", "two", *options)]
    )
    assert result.exit_code == 2 and "leverage of its readout has not been fitted" in result.stderr
