"""Formats of files: those of former releases are read, whichever framework they are of, and newer ones are refused."""

import json
import shutil

import ase.io
import numpy as np
import pytest
import torch
from frozen_files import RELEASES
from typer.testing import CliRunner

from e2ip_plugins import __version__, cli
from e2ip_plugins.energies.differences import difference
from e2ip_plugins.errors import InputError
from e2ip_plugins.fitting.readout_file import ReadoutFile
from e2ip_plugins.fitting.records import Records, Work
from e2ip_plugins.formats import CALIBRATIONS, FIT_PARTS, JOURNALS, READOUTS, Format
from e2ip_plugins.md.heldout import HeldOut
from e2ip_plugins.predictions.prediction_files import read_predictions
from e2ip_plugins.readout.settings import Settings
from e2ip_plugins.report.compare import compare, load_models
from e2ip_plugins.scores.calibration import Calibration
from e2ip_plugins.unfinished import Unfinished

ENDINGS = {"mace": ".model", "nequip": ".ckpt"}


@pytest.fixture(scope="module", params=[(release, host) for release in RELEASES for host in ENDINGS], ids="-".join)
def kept(request, unpack_all):
    """Folder with the files of a release of one framework, and the ending of its models."""
    release, host = request.param
    return unpack_all(host, release), ENDINGS[host]


def run(*words):
    result = CliRunner().invoke(cli.app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.output


# Files of former releases


@pytest.mark.parametrize("name", ["host", "predictions"])
def test_predictions_are_read(kept, name):
    path = kept[0] / f"{name}.extxyz"
    p = read_predictions(path)
    assert p.family.uq_family == "niw" and p.labelled and p.uq_model.startswith("readout-")
    assert len(p.sizes) == 10 and np.isfinite(p.leverage).all() and np.isfinite(p.energy_uncertainty).all()
    parameters = {name: torch.as_tensor(values, dtype=torch.float64) for name, values in p.parameters.items()}
    covariance = p.family.derive(parameters)["forces_cov"].numpy()
    frames = ase.io.read(path, ":")
    (column,) = (column for column in frames[0].arrays if column.endswith("forces_cov"))
    stored = np.concatenate([frame.arrays[column].reshape(-1, 3, 3) for frame in frames])
    # A κ of 0.002 has five digits behind eight decimals.
    np.testing.assert_allclose(covariance, stored, rtol=1e-5, atol=1e-7)


def test_commands_take_predictions(kept, tmp_path):
    folder, _ = kept
    path = folder / "predictions.extxyz"
    again = tmp_path / "again.json"
    run("calibrate", path, "--method", "scale", "--method", "conformal", "--output", again)
    frozen, now = (Calibration.read(path) for path in (folder / "calibration.json", again))
    assert now.radii == pytest.approx(frozen.radii, rel=1e-6) and now.frames == frozen.frames
    assert now.factor["H"].value == pytest.approx(frozen.factor["H"].value, rel=1e-6)
    assert now.energies.radii == pytest.approx(frozen.energies.radii, rel=1e-6)
    scored = compare(load_models([folder / "host.extxyz", path]))["models"]
    assert all(np.isfinite(model["overall"]["nll"]) for model in scored)
    value, deviation = difference(ase.io.read(path, ":2"), np.array([1.0, -1.0]))
    assert np.isfinite(value) and 0.0 < deviation


def test_calibrations_are_read(kept):
    folder, _ = kept
    calibration = Calibration.read(folder / "calibration.json")
    predictions = read_predictions(folder / "predictions.extxyz")
    calibration.check(predictions.family, predictions.species, "predictions.extxyz", predictions.uq_model)
    assert sorted(calibration.factor) == ["C", "H", "N", "O"] and calibration.radii[0.9] > 0.0
    assert HeldOut.read(folder / "calibration.json").quantile("forces_epistemic_std", "all", 0.9) > 0.0


def test_readout_files_are_read(kept):
    folder, _ = kept
    file = ReadoutFile.read(folder / "readout.e2ip")
    assert file.settings.options["evidence"] == "leverage" and file.base.species == ("H", "C", "N", "O")
    assert file.name == read_predictions(folder / "predictions.extxyz").uq_model


# Other formats


def with_number(content, number):
    return {**content, "version": number, "e2ip_version": "0.9.0"}


def settings(folder, ending, number):
    saved = {**Settings.of("e2ip", {}, 0.05).to_dict(), "version": number, "release": "0.9.0"}
    return READOUTS, lambda: Settings.from_dict(saved, "x.model:"), "x.model"


def readout_file(folder, ending, number):
    path = folder / "readout.e2ip"
    content = torch.load(path, weights_only=True)
    torch.save({**content, "e2ip_readout": number, "versions": {"e2ip-plugins": "0.9.0"}}, path)
    return READOUTS, lambda: ReadoutFile.read(path), path


def calibration(folder, ending, number):
    path = folder / "calibration.json"
    path.write_text(json.dumps(with_number(json.loads(path.read_text()), number)))
    return CALIBRATIONS, lambda: Calibration.read(path), path


def fit_part(folder, ending, number):
    path = folder / f"fitted{ending}.1-of-2"
    header, _, records = path.read_bytes().partition(b"\n")
    path.write_bytes(json.dumps(with_number(json.loads(header), number)).encode() + b"\n" + records)
    return FIT_PARTS, lambda: Records(Work(folder / f"fitted{ending}", {}, merge=2)), path


def journal(folder, ending, number):
    output = folder / "out.xyz"
    with Unfinished(output, {}) as file:
        file.write(b"one\n", {"frame": 1})
    path = output.with_name("out.xyz.part.json")
    path.write_text(json.dumps(with_number(json.loads(path.read_text()), number)))
    return JOURNALS, Unfinished(output, {}).__enter__, path


@pytest.mark.parametrize("number", [0, 99])
@pytest.mark.parametrize("make", [settings, readout_file, calibration, fit_part, journal])
def test_newer_and_unreleased_formats_are_refused_alike(kept, tmp_path, make, number):
    folder = shutil.copytree(kept[0], tmp_path / "copy")
    known, read, path = make(folder, kept[1], number)
    with pytest.raises(InputError) as refused:
        read()
    text = f"{path}: was written before e2ip-plugins 0.2.0, whose formats are the first that are read: make it anew"
    if number:
        text = f"{path}: was written by e2ip-plugins 0.9.0 in format 99 of {known.files}, and e2ip-plugins "
        text += f"{__version__}, which is installed, reads formats up to {known.number}: update e2ip-plugins"
    assert str(refused.value) == text


def test_all_numbers_since_the_first_release_are_read():
    known = Format("models", 7, 5)
    assert [known.check(number, "x") for number in (5, 6, 7)] == [5, 6, 7]
    for number in (4, 8, None, "6"):
        with pytest.raises(InputError, match=r"^x was written b"):
            known.check(number, "x")
