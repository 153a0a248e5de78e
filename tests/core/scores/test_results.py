"""Uncertainties as calculators and prediction files have them: units, calibration, names, columns."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from e2ip_plugins import families
from e2ip_plugins.errors import InputError, UncertaintyWarning
from e2ip_plugins.readout.layout import Layout
from e2ip_plugins.readout.readout import Readout
from e2ip_plugins.readout.settings import Settings
from e2ip_plugins.scores.calibration import Calibration, CalibrationConstant, EnergyCalibration
from e2ip_plugins.scores.results import (
    calibrated_columns,
    committee_results,
    energy_results,
    in_units,
    model_results,
    warn_if_unfitted,
)

E2IP = families.get("e2ip")


@pytest.fixture
def outputs():
    """What a model puts out for three atoms."""
    drawn = torch.rand(3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parameters = {"e2ip_log_sigma0": drawn[:, :6] - 5.0, "e2ip_nu": 6.0 + drawn[:, 6], "e2ip_kappa": 0.1 + drawn[:, 7]}
    return {**parameters, **E2IP.derive(parameters), "e2ip_leverage": torch.tensor([0.5, 1.0, 7.0])}


def test_units_are_squared_on_covariances_and_the_leverage_has_none(outputs):
    results = model_results(E2IP, outputs, 3.0, uq_model="readout-1")
    for name, power in (("forces_cov", 2), ("forces_epistemic_std", 1), ("e2ip_nu", 0), ("e2ip_leverage", 0)):
        np.testing.assert_allclose(results[name], 3.0**power * outputs[name], rtol=1e-12)
    assert (results["uq_family"], results["uq_model"]) == ("niw", "readout-1") and "uq_calibration" not in results
    plain = model_results(E2IP, outputs, 1.0)
    assert all(np.array_equal(plain[name], value) for name, value in outputs.items()) and "uq_model" not in plain


def test_a_calibration_comes_after_the_units_and_says_its_name(outputs, write_calibration):
    calibration = Calibration.read(write_calibration(floor=0.01))
    results = model_results(E2IP, outputs, 3.0, calibration=calibration, species="HOH")
    factor = torch.tensor([2.0, 0.5, 2.0])[:, None, None]
    np.testing.assert_allclose(results["forces_cov"], factor * 9.0 * outputs["forces_cov"] + 0.01 * torch.eye(3))
    assert results["uq_calibration"] == "calibration.json" and results["e2ip_leverage"][2] == 7.0
    with pytest.raises(InputError, match="knows nothing of Si, which this structure has"):
        model_results(E2IP, outputs, 1.0, calibration=calibration, species=["H", "H", "Si"])


def test_a_committee_has_the_views_and_its_members_mean_leverage(outputs):
    forces = np.zeros((2, 3, 3))
    results = committee_results([(E2IP, outputs)] * 2, 2.0, forces)
    np.testing.assert_allclose(results["forces_cov"], 4.0 * outputs["forces_cov"])
    assert np.array_equal(results["e2ip_leverage"], outputs["e2ip_leverage"])
    assert not {"uq_family", "e2ip_nu"} & set(results)


def test_what_is_differentiated_has_the_units_of_the_results(outputs, write_calibration):
    calibration = Calibration.read(write_calibration())
    for options, factor in (((1.0,), 1.0), ((3.0,), 3.0), ((3.0, calibration, "HHH"), 3.0 * 2.0**0.5)):
        for uncertainty in ("forces_epistemic_std", lambda views: views["forces_epistemic_std"]):
            found = in_units(uncertainty, E2IP, *options)
            value = found(outputs) if callable(found) else outputs[found]
            torch.testing.assert_close(value, factor * outputs["forces_epistemic_std"])
    assert in_units("e2ip_leverage", E2IP, 3.0)(outputs) is outputs["e2ip_leverage"]
    with pytest.raises(InputError, match="has a floor"):
        in_units("forces_epistemic_std", E2IP, 1.0, Calibration.read(write_calibration(floor=0.1)), "HHH")


def test_calibrated_columns_keep_their_shapes(outputs, write_calibration):
    columns = {name: value.reshape(3, -1).numpy() for name, value in outputs.items() if name != "forces_uncertainty"}
    found = calibrated_columns(Calibration.read(write_calibration()), E2IP, columns, "HHH")
    assert set(found) == set(columns) - {"e2ip_leverage"}
    np.testing.assert_allclose(found["forces_cov"], 2.0 * columns["forces_cov"])
    assert found["e2ip_nu"].shape == (3, 1)


def test_calibrated_energies(outputs, write_calibration):
    """Those of the frames, by a factor of their own; nothing without one."""
    columns = {name: value.numpy() for name, value in outputs.items()}
    columns |= {"energy_uncertainty": np.array([[0.5]]), "energy_error_vector": np.array([[0.3, -0.4]])}
    calibration = Calibration.read(write_calibration())
    assert not {"energy_uncertainty", "energy_error_vector"} & set(
        calibrated_columns(calibration, E2IP, columns, "HHH")
    )
    energies = EnergyCalibration(CalibrationConstant(3.0, (2.0, 4.0)), {}, 9)
    found = calibrated_columns(replace(calibration, energies=energies), E2IP, columns, "HHH")
    np.testing.assert_allclose(found["energy_uncertainty"], [[1.5]])
    np.testing.assert_allclose(found["energy_error_vector"], [[0.9, -1.2]])
    # A calculator's, after the units.
    outputs |= {name: torch.from_numpy(columns[name].reshape(1, -1)) for name in found if name.startswith("energy")}
    outputs["energy_uncertainty"] = outputs["energy_uncertainty"].reshape(1)
    options = {"calibration": replace(calibration, energies=energies), "species": "HHH", "energy_factor": 10.0}
    results = model_results(E2IP, outputs, 1.0, **options)
    assert results["energy_uncertainty"] == pytest.approx(15.0)
    np.testing.assert_allclose(results["energy_error_vector"], [9.0, -12.0])


def test_an_unfitted_leverage_is_a_warning_about_the_callers_line():
    readout = Readout(Settings.of("e2ip", {"evidence": "leverage"}, 0.04), Layout([(0, 2)], [], [], num_radial=2))
    with pytest.warns(UncertaintyWarning, match="my.model: this model's evidence mode is 'leverage'") as warned:
        warn_if_unfitted(readout, "my.model: ")
    assert warned[0].filename == __file__
    readout.leverage.fitted.fill_(True)
    warn_if_unfitted(readout)
    warn_if_unfitted(None)


@pytest.mark.parametrize(
    ("energy", "stress", "periodic", "count"),
    # Compiled models of NequIP put out zeros where nothing was fitted.
    [(0.2, 0.01, True, 4), (0.2, 0.01, False, 2), (0.2, 0.0, True, 2), (0.0, 0.0, True, 0)],
)
def test_what_was_not_fitted_is_no_result(energy, stress, periodic, count):
    of_frames = {"energy_uncertainty": np.array([0.1, energy]), "energy_error_vector": np.full((2, 4), energy / 2)}
    of_frames["stress_uncertainty"] = np.full((2, 6), stress)
    of_frames["stress_cov"] = np.tile(stress**2 * np.eye(6), (2, 1, 1))
    found = energy_results(of_frames, 1, periodic)
    assert list(found) == ["energy_uncertainty", "energy_error_vector", "stress_uncertainty", "stress_cov"][:count]
    assert found.get("energy_uncertainty", 0.0) == energy
