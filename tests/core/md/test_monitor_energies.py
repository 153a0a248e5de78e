"""`Monitor` of the uncertainty of the energy per atom: a number of the frame."""

import ase.io
import numpy as np
import pytest

from e2ip_plugins.md import Monitor, MonitorStop, Quantile, UncertaintyWarning
from e2ip_plugins.md.watch import parse_watch
from e2ip_plugins.scores.calibration import Calibration
from e2ip_plugins.scores.frame_maxima import ALL_ATOMS

ENERGY, STD, LEVERAGE = "energy_uncertainty_per_atom", "forces_epistemic_std", "e2ip_leverage"


@pytest.fixture
def uncertain(make_atoms):
    """Function that gives four atoms whose calculator has an uncertainty of its energy, in eV."""
    return lambda value, *stds: make_atoms(*stds, extra={"energy_uncertainty": value})


@pytest.fixture
def held_out(held_out):
    """Predictions for 40 frames with uncertainties of 0.04, 0.08, … 1.6 eV, and energies that err as much."""
    frames, rng = ase.io.read(held_out, ":"), np.random.default_rng(0)
    for i, frame in enumerate(frames):
        std = 0.04 * (i + 1)
        frame.info |= {"MACE_energy_uncertainty": std, "MACE_energy": 0.0, "REF_energy": 3.0 * std * rng.normal()}
    ase.io.write(held_out, frames, format="extxyz")
    return held_out


def test_above_in_words(uncertain):
    atoms = uncertain(0.4)
    monitor = Monitor(atoms, {ENERGY: 0.2, STD: 1.0})
    monitor()
    assert monitor.values[ENERGY].tolist() == [0.1] and monitor.thresholds[ENERGY].tolist() == [0.2]
    assert monitor.excursions == 0
    atoms.calc.extra["energy_uncertainty"] = 1.2
    atoms.positions[0] += 0.1
    with pytest.warns(UncertaintyWarning, match=f"check 1: {ENERGY} is 0.3 eV/atom, threshold 0.2$"):
        monitor()
    assert monitor.excursions == 1


def test_frames_are_written_with_it(uncertain):
    atoms = uncertain(1.2)
    with pytest.raises(MonitorStop, match=rf"{ENERGY} is 0\.3 eV/atom"):
        Monitor(atoms, {ENERGY: 0.2}, action="stop", frames="last.xyz")()
    assert ase.io.read("last.xyz").info["energy_uncertainty"] == pytest.approx(1.2)


def test_median_over_checks(uncertain):
    atoms = uncertain(1.2)
    monitor = Monitor(atoms, {ENERGY: 0.2}, window=2)
    monitor()
    with pytest.warns(UncertaintyWarning, match=r"threshold 0.2 \(median of 2 checks\)"):
        monitor()


def test_not_a_number_ends_the_run(uncertain):
    atoms = uncertain(0.4)
    monitor = Monitor(atoms, {ENERGY: 0.2})
    atoms.calc.extra["energy_uncertainty"] = float("nan")
    atoms.positions[0] += 0.1
    with pytest.raises(MonitorStop, match=f"{ENERGY} is not a number"):
        monitor()


def test_quantiles_of_held_out_frames(uncertain, held_out):
    monitor = Monitor(uncertain(0.1), {ENERGY: Quantile(0.5)}, held_out=held_out)
    # The 21st of 40.
    assert monitor.thresholds[ENERGY] == pytest.approx([0.01 * 21])


def test_quantiles_of_a_calibration_are_calibrated(uncertain, calibrated, refused):
    path = calibrated("scale")
    calibration = Calibration.read(path)
    assert calibration.energy_factor == pytest.approx(3.0, rel=0.3)
    assert set(calibration.frame_maxima[ENERGY]) == {ALL_ATOMS}
    atoms, limits = uncertain(0.1), {ENERGY: Quantile(0.5)}
    refused("has the calibration valid.json, the calculator's none", Monitor, atoms, limits, held_out=path)
    atoms.calc.extra["uq_calibration"] = path.name
    atoms.positions[0] += 0.1
    monitor = Monitor(atoms, limits, held_out=path)
    assert monitor.thresholds[ENERGY] == pytest.approx([0.01 * 21 * calibration.energy_factor])


def test_refused(make_atoms, uncertain, held_out, refused):
    refused(
        "gives no energy_uncertainty: it needs a model .* fitted to validation energies",
        Monitor,
        make_atoms(),
        {ENERGY: 1.0},
    )
    refused("a number of the whole frame; give one threshold", Monitor, uncertain(0.4), {ENERGY: {"H": 1.0}})
    frames = ase.io.read(held_out, ":")
    for frame in frames:
        del frame.info["MACE_energy_uncertainty"]
    ase.io.write(held_out, frames, format="extxyz")
    refused(f"its frames have no {ENERGY}", Monitor, uncertain(0.4), {ENERGY: Quantile(0.5)}, held_out=held_out)


def test_option_of_commands():
    assert parse_watch([f"{ENERGY}=0.01"]).thresholds == {ENERGY: 0.01}
