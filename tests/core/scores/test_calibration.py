"""A calibration as a file, what it does to parameters, and the predictions that it is not for."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from e2ip_plugins import families
from e2ip_plugins.errors import InputError
from e2ip_plugins.scores.calibration import Calibration, CalibrationConstant

E2IP = families.get("e2ip")


@pytest.fixture
def calibration():
    return Calibration(
        methods=("species-scale", "conformal"),
        uq_family="niw",
        factor={"H": CalibrationConstant(2.0, (1.5, 2.5)), "O": CalibrationConstant(0.5, (0.4, 0.6))},
        floor=CalibrationConstant(1e-4, (0.0, 2e-4)),
        radii={0.5: 1.5, 0.99: math.inf},
        configurations=4,
        atoms=12,
        frames=("aa", "bb"),
        file="valid.xyz",
        scores={when: {"nll": -5.0, "calibration_error": 0.01, "coverage90": 0.9} for when in ("before", "after")},
        notes=["few configurations"],
        uq_model="readout-0123456789ab",
    )


@pytest.fixture
def path(calibration, tmp_path):
    calibration.write(tmp_path / "calibration.json")
    return tmp_path / "calibration.json"


def changed(path, **values):
    """The file with other entries; None leaves one out."""
    content = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))
    return path


def parameters(n, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(n, 8, generator=generator, dtype=dtype)
    return {"e2ip_log_sigma0": drawn[:, :6] - 5.0, "e2ip_nu": 6.0 + drawn[:, 6], "e2ip_kappa": 0.1 + drawn[:, 7]}


def test_file_keeps_everything(calibration, path):
    found = Calibration.read(path)
    assert found.path == str(path)
    assert {**vars(found), "path": calibration.path} == vars(calibration)
    assert found.species == ("H", "O")


def test_every_atom_gets_its_species_factor_and_the_floor(calibration):
    before = parameters(3)
    after = calibration.apply(E2IP, before, ["O", "H", "O"])
    covariance, wide = (E2IP.derive(p)["forces_cov"] for p in (before, after))
    factor = torch.tensor([0.5, 2.0, 0.5], dtype=torch.float64)[:, None, None]
    torch.testing.assert_close(wide, factor * covariance + 1e-4 * torch.eye(3, dtype=torch.float64))
    as_numpy = calibration.apply_numpy(E2IP, {name: v.numpy() for name, v in before.items()}, ["O", "H", "O"])
    assert all(np.array_equal(as_numpy[name], value) for name, value in after.items())


def test_units_come_first(calibration):
    """A calibration is for eV/Å, whatever the model was trained in."""
    outputs = calibration.in_units(E2IP, parameters(2), 10.0, ["H", "H"])
    covariance = E2IP.derive(parameters(2))["forces_cov"]
    expected = 2.0 * 100.0 * covariance + 1e-4 * torch.eye(3, dtype=torch.float64)
    torch.testing.assert_close(outputs["forces_cov"], expected)
    assert set(outputs) == {key.name for key in E2IP.output_keys()}


def test_dtype_of_the_model_stays(calibration):
    for value in calibration.apply(E2IP, parameters(2, torch.float32), ["H", "O"]).values():
        assert value.dtype == torch.float32


# What it is not for


@pytest.mark.parametrize(
    ("family", "species", "message"),
    [
        ("mve", ["H"], r"is for predictions of family 'niw', but x\.xyz has family 'gaussian'"),
        ("e2ip", ["Si", "H", "C"], r"was fitted to H, O and knows nothing of C, Si, which x\.xyz has"),
        (None, ["H"], r"x\.xyz: has no predicted distribution"),
    ],
)
def test_other_predictions_are_refused(calibration, family, species, message):
    calibration.check(E2IP, ["H", "H"], "x.xyz")
    with pytest.raises(InputError, match=message):
        calibration.check(None if family is None else families.get(family), species, "x.xyz")


def test_another_model_is_refused_and_an_unknown_one_is_told(calibration):
    known = replace(calibration, uq_model="readout-a")
    for given in ("readout-a", None):
        known.check(E2IP, ["H"], "x.xyz", given)
    with pytest.raises(InputError, match=r"another model \(readout-a\) than x\.xyz has \(readout-b\)"):
        known.check(E2IP, ["H"], "x.xyz", "readout-b")
    unknown = replace(calibration, uq_model=None)
    unknown.check(E2IP, ["H"], "x.xyz", "readout-b")
    assert "predictions without uq_model" in unknown.doubt("readout-b", "x.xyz")
    assert not unknown.doubt(None, "x.xyz") and not known.doubt("readout-a", "x.xyz")


def test_frames_that_it_was_fitted_to_are_refused(calibration):
    calibration.check_frames(["cc", "dd"], "x.xyz")
    with pytest.raises(InputError, match=r"x\.xyz: 2 of its 3 frames are among those .*valid\.xyz"):
        calibration.check_frames(["aa", "cc", "aa"], "x.xyz")


def constant(value, low=0, high=1):
    return {"value": value, "interval95": [low, high]}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"version": None}, "was written before e2ip-plugins 0.2.0"),
        ({"unit": "kcal/mol/Å"}, "is for forces in kcal/mol/Å, not in eV/Å"),
        ({"format": "else"}, "is no calibration; e2ip calibrate writes one"),
        ({"factor": None}, "is damaged"),
        ({"factor": {}}, "is damaged"),
        ({"factor": {"H": constant(-1.0)}}, "is damaged .*factors must be positive"),
        ({"factor": {"H": constant("NaN")}}, "is damaged .*'NaN' is no finite number"),
        ({"factor": {"H": constant(True)}}, "is damaged .*True is no finite number"),
        ({"factor": {"H": constant("2.0", 0, 3)}}, "is damaged .*'2.0' is no finite number"),
        ({"factor": {"H": constant(2.0, 3, 1)}}, "is damaged .*an interval must not end before"),
        ({"floor": constant(-1.0)}, "is damaged .*the floor not negative"),
        ({"floor": 1.0}, "is damaged"),
        ({"radii": ["a"]}, "is damaged"),
        ({"radii": {"0.9": -1.0}}, "is damaged .*radii must not be negative"),
        ({"radii": {"0.9": "NaN"}}, "is damaged .*'NaN' is no finite number"),
        ({"radii": {"0.9": 1.0, "0.5": 2.0}}, "is damaged .*radii must grow with their levels"),
        ({"radii": {"0.9": None, "0.95": 2.0}}, "is damaged .*radii must grow with their levels"),
        ({"radii": {"1.7": 2.0}}, "is damaged .*levels between 0 and 1"),
        ({"methods": "scale"}, "is damaged .*methods must be a list"),
        ({"frames": 3}, "is damaged"),
        ({"frame_maxima": None}, "is damaged .*frame_maxima"),
    ],
)
def test_files_that_mean_nothing_are_refused(path, values, message):
    with pytest.raises(InputError, match=f"calibration.json: {message}"):
        Calibration.read(changed(path, **values))


@pytest.mark.parametrize("text", ["{", "[]", "3", '{"format": "e2ip calibration"}', "\x00"])
def test_broken_files_are_refused(path, text):
    path.write_text(text)
    with pytest.raises(InputError, match=r"calibration\.json: "):
        Calibration.read(path)


def test_files_that_cannot_be_read_are_refused(tmp_path):
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    for name, reason in (("nothing.json", "No such file"), ("", "Is a directory"), ("binary.json", "it is not JSON")):
        with pytest.raises(InputError, match=rf"{name}: cannot be read as a calibration \({reason}"):
            Calibration.read(tmp_path / name)


def test_levels_are_kept_apart(calibration, tmp_path):
    radii = {0.9: 1.0, 0.90000004: 1.5, 0.9999999: 2.0}
    replace(calibration, radii=radii).write(tmp_path / "levels.json")
    assert Calibration.read(tmp_path / "levels.json").radii == radii
