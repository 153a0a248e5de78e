"""Quantiles of the largest uncertainty of a frame: by hand, by simulation, and through the file of a calibration."""

import json
import math

import numpy as np
import pytest
import torch

from e2ip_plugins import families
from e2ip_plugins.predictions.prediction_files import Predictions
from e2ip_plugins.scores.calibration import Calibration, CalibrationConstant
from e2ip_plugins.scores.frame_maxima import ALL_ATOMS, QUANTILE_LEVELS, of_predictions, principal_std, quantile, table

E2IP = families.get("e2ip")


def test_table_by_hand():
    values = np.array([1.0, 5.0, 2.0, 3.0, 4.0])
    found = table(values, np.array([0, 0, 1, 1, 2]), np.array(list("HOHHH")), levels=(0.5, 0.75, 0.76, 1.0))
    assert found == {
        ALL_ATOMS: {0.5: 4.0, 0.75: 5.0, 0.76: math.inf, 1.0: 5.0},
        "H": {0.5: 3.0, 0.75: 4.0, 0.76: math.inf, 1.0: 4.0},
        "O": {0.5: 5.0, 0.75: math.inf, 0.76: math.inf, 1.0: 5.0},
    }


@pytest.mark.parametrize("level", [0.5, 0.9])
def test_a_new_frame_is_above_with_the_promised_probability(level):
    rng = np.random.default_rng(0)
    above = [rng.exponential() > quantile(rng.exponential(size=19), level) for _ in range(4000)]
    assert np.mean(above) == pytest.approx(1.0 - level, abs=0.02)


def test_principal_std_of_broken_covariances():
    covariance = np.stack([np.diag([4.0, 1.0, 1.0]), np.full((3, 3), np.nan), np.zeros((3, 3))])
    np.testing.assert_array_equal(principal_std(covariance), [2.0, np.nan, 0.0])


@pytest.fixture
def predictions(draw):
    n = 60
    error, log_sigma0, nu, kappa = draw(n)
    return Predictions(
        path="valid.xyz",
        sizes=np.full(20, 3),
        species=np.resize(np.array(list("OHH")), n),
        positions=np.zeros((n, 3)),
        reference_forces=error,
        forces=0.0 * error,
        reference_energy=np.zeros(20),
        energy=np.zeros(20),
        family=E2IP,
        parameters={"e2ip_log_sigma0": log_sigma0, "e2ip_nu": nu, "e2ip_kappa": kappa},
        leverage=np.linspace(0.5, 2.0, n),
        counted=np.full(20, True),
    )


@pytest.fixture
def calibration():
    """Function that gives a calibration by its factors."""
    nothing = CalibrationConstant(0.0, (0.0, 0.0))

    def make(factors, **options):
        constants = {symbol: CalibrationConstant(value, (value, value)) for symbol, value in factors.items()}
        return Calibration(("species-scale",), "niw", constants, nothing, {}, 20, 60, (), "", **options)

    return make


def test_tables_are_of_the_calibrated_views(predictions, calibration):
    raw, found = of_predictions(predictions), of_predictions(predictions, calibration({"H": 4.0}))
    views = E2IP.derive({name: torch.as_tensor(v) for name, v in predictions.parameters.items()})
    largest = views["forces_epistemic_std"].reshape(20, 3).max(1).values.sort().values
    assert raw["forces_epistemic_std"][ALL_ATOMS][0.5] == pytest.approx(float(largest[10]))
    largest = torch.linalg.eigvalsh(views["forces_cov"]).max().sqrt()
    assert raw["forces_principal_std"][ALL_ATOMS][1.0] == pytest.approx(float(largest))
    for name, factor in (("forces_epistemic_std", 2.0), ("forces_principal_std", 2.0), ("e2ip_leverage", 1.0)):
        assert set(found[name]) == {ALL_ATOMS, "H"} and set(raw[name]) == {ALL_ATOMS, "H", "O"}
        assert found[name]["H"][0.9] == pytest.approx(factor * raw[name]["H"][0.9])
        assert list(raw[name][ALL_ATOMS]) == list(QUANTILE_LEVELS)


def test_leverage_that_some_atoms_lack_has_no_table(predictions):
    predictions.leverage[3] = np.nan
    assert "e2ip_leverage" not in of_predictions(predictions)


def test_tables_are_kept_in_the_file(predictions, calibration, tmp_path):
    maxima = of_predictions(predictions)
    path = tmp_path / "calibration.json"
    calibration({"H": 1.0, "O": 1.0}, frame_maxima=maxima).write(path)
    assert Calibration.read(path).frame_maxima == maxima
    assert math.isinf(maxima["e2ip_leverage"][ALL_ATOMS][0.999])
    assert json.loads(path.read_text())["frame_maxima"]["e2ip_leverage"]["all"]["0.999"] is None
