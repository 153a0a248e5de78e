"""`e2ip md` and `e2ip select` with NequIP: features are those of the fit, leverage is that of the calculator."""

import ase.io
import numpy as np
import pytest
from typer.testing import CliRunner

from e2ip_plugins.cli import app
from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.labelled_files import read_frames
from nequip_ext.inference.batches import open_passes
from nequip_ext.inference.calculator import open_model


@pytest.fixture(scope="module")
def run(tmp_path_factory, train, train_files):
    """A short training in double precision."""
    folder = tmp_path_factory.mktemp("run") / "leverage"
    options = ("max_epochs=1", "run=[train]", "training_module.model.model.model_dtype=float64")
    return train("nequip_e2ip", folder, train_files, *options)


@pytest.fixture(scope="module")
def calculator(run):
    return open_model(run / "best.ckpt")


def test_features_are_those_of_the_fit(run, calculator, train_files, check_features):
    training, others = (read_frames([train_files[name]]) for name in ("train", "test"))
    check_features(open_passes(run / "best.ckpt", batch_size=5), calculator, training, [*others, *training[3:5]])


def test_a_run_and_what_is_taken_of_it(run, calculator, train_files, tmp_path):
    def call(*words):
        result = CliRunner().invoke(app, [str(word) for word in words])
        assert result.exit_code == 0, result.output
        return result

    model, out = run / "best.ckpt", tmp_path / "run.xyz"
    words = ("--steps", 6, "--interval", 1, "--temperature", "300:900", "--thermostat", "bussi")
    result = call("md", model, train_files["train"], out, *words, "--watch", "e2ip_leverage=1e5", "--check-interval", 1)
    assert "6 steps, 7 frames written\nmonitor: 0 alarms in 7 checks" in result.stdout
    frames = ase.io.read(out, ":")
    leverage = calculator.get_property("e2ip_leverage", frames[3])
    np.testing.assert_allclose(frames[3].arrays["e2ip_leverage"], leverage, rtol=1e-4)
    assert not {"REF_energy", "REF_forces"} & {*frames[0].info, *frames[0].arrays}
    refused = CliRunner().invoke(
        app, ["md", str(model), str(out), str(tmp_path / "half.xyz"), "--steps", "1", "--dtype", "float32"]
    )
    assert refused.exit_code == 2 and "models of NequIP cannot be converted" in refused.stderr
    taken = tmp_path / "taken.xyz"
    result = call("select", model, out, out, "--train", train_files["train"], "--number", 2, "--output", taken)
    # The first frame is the last one of the training set, and the run is given twice.
    assert "14 frames, 6 candidates (6 copies of others, 2 in the training set); 2 taken" in result.stdout
    assert [atoms.info["select_rank"] for atoms in ase.io.read(taken, ":")] == [0, 1]
    # Frames of a run have a calculator's results, those of other files have not.
    words = ("--train", train_files["train"], "--number", 2, "--output", taken, "--overwrite")
    assert "2 taken" in call("select", model, train_files["test"], out, *words).stdout


def test_what_is_refused(run, tmp_path):
    (tmp_path / "half.ckpt").write_bytes((run / "best.ckpt").read_bytes()[:1000])
    with pytest.raises(InputError, match=r"half\.ckpt: cannot be opened as a model of NequIP"):
        open_passes(tmp_path / "half.ckpt")
    with pytest.raises(InputError, match="models of NequIP have no heads"):
        open_passes(run / "best.ckpt", head="one")
