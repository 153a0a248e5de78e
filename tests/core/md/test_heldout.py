"""Thresholds of `Monitor` that come from held-out frames."""

import warnings

import ase.io
import numpy as np
import pytest

from e2ip_plugins.errors import InputError
from e2ip_plugins.md import Monitor, Quantile
from e2ip_plugins.md.heldout import HeldOut
from e2ip_plugins.md.thresholds import Limits
from e2ip_plugins.scores.calibration import Calibration
from e2ip_plugins.scores.frame_maxima import QUANTILE_LEVELS, quantile

STD, LEVERAGE, EXTENT = "forces_epistemic_std", "e2ip_leverage", "forces_conformal_extent"


def test_quantiles_of_predictions(make_atoms, held_out):
    atoms = make_atoms()
    monitor = Monitor(atoms, {STD: Quantile(0.9), LEVERAGE: Quantile(0.97)}, held_out=held_out)
    # The 37th of 40, and the 40th.
    np.testing.assert_allclose(monitor.thresholds[STD], 0.037, rtol=1e-6)
    np.testing.assert_allclose(monitor.thresholds[LEVERAGE], 4.0, rtol=1e-6)
    by_species = Monitor(atoms, {STD: {"H": Quantile(0.5), "O": Quantile(1), "C": 0.002}}, held_out=held_out)
    np.testing.assert_allclose(by_species.thresholds[STD], [0.002, 0.0005, 0.0005, 0.021], rtol=1e-6)


def test_quantiles_of_a_calibration(make_atoms, calibrated):
    path = calibrated("scale", "conformal")
    calibration = Calibration.read(path)
    std = np.sqrt(calibration.factor["H"].value)
    assert std != 1.0 and len(calibration.frames) == 40
    with pytest.raises(
        InputError, match=r"the calibration valid\.json, the calculator's none; give the calculator the"
    ):
        Monitor(make_atoms(), {STD: Quantile(0.9)}, held_out=path)
    # No calibration changes a leverage.
    assert Monitor(make_atoms(), {LEVERAGE: Quantile(0.9)}, held_out=path).thresholds[LEVERAGE][0] == pytest.approx(3.7)
    atoms = make_atoms(extra={"uq_calibration": "valid.json"})
    monitor = Monitor(atoms, {STD: Quantile(0.9), EXTENT: Quantile(0.5)}, held_out=path, level=0.8)
    np.testing.assert_allclose(monitor.thresholds[STD], std * 0.037, rtol=1e-5)
    # Isotropic: the half axis is the radius times the total standard deviation.
    extent = calibration.radii[0.8] * np.sqrt(2.0) * std * 0.021
    np.testing.assert_allclose(monitor.thresholds[EXTENT], extent, rtol=1e-5)
    monitor()
    np.testing.assert_allclose(monitor.values[EXTENT], calibration.radii[0.8] * np.sqrt(2.0) * 0.01)


def of_frames(count, symbols="OH"):
    """Held-out frames whose largest values are 1, 2, …, of every species in thousandths of that."""
    maxima = np.arange(1.0, count + 1.0)
    groups = {"all": maxima, **{symbol: maxima / 1000.0 for symbol in symbols}}
    tables = {group: {level: quantile(values, level) for level in QUANTILE_LEVELS} for group, values in groups.items()}
    return HeldOut("valid.json", "niw", {STD: tables, LEVERAGE: tables}, {}, None, False, frames=count)


@pytest.mark.parametrize(
    ("count", "level", "above"), [(9, 0.9, 1), (18, 0.9, 1), (19, 0.95, 1), (498, 0.95, 24), (499, 0.98, 10)]
)
def test_a_threshold_that_nobody_chose_is_one_that_the_frames_can_tell(count, level, above):
    limits = Limits(STD, Quantile(), ["O", "H"])
    assert limits.resolve(of_frames(count), np.nan, np.ones(2)).tolist() == [count + 1.0 - above] * 2
    (note,) = limits.notes
    assert f"threshold {count + 1 - above} eV/Å, the quantile {level:g} of {count} held-out frames; expect" in note
    assert f"expect {100 * (1 - level):.3g} false alarms in 100 checks" in note
    limits = Limits(LEVERAGE, {"O": Quantile(), "H": np.inf}, ["O", "H"])
    assert limits.resolve(of_frames(count), np.nan, np.ones(2)).tolist() == [(count + 1.0 - above) / 1000.0, np.inf]
    (note,) = limits.notes
    assert note.startswith(f"{LEVERAGE} of O: threshold 0.")


def test_frames_that_are_too_few_for_an_advice_are_refused(make_atoms, held_out):
    with pytest.raises(
        InputError, match=r"valid\.json: has 8 frames, and a threshold that nobody chose for .* needs 9"
    ):
        Limits(STD, Quantile(), ["O"]).resolve(of_frames(8), np.nan, np.ones(1))
    with pytest.raises(InputError, match=r"its frames hold no C"):
        Limits(STD, {"C": Quantile()}, ["C"]).resolve(of_frames(30), np.nan, np.ones(1))
    with pytest.raises(InputError, match=r"quantiles and conformal regions come from held-out frames: give held_out"):
        Monitor(make_atoms(), {STD: Quantile()})
    monitor = Monitor(make_atoms(), {STD: Quantile(), LEVERAGE: 5.0}, held_out=held_out)
    assert monitor.thresholds[STD][0] == pytest.approx(0.039, abs=1e-8) and len(monitor.notes) == 1


def test_conformal_radii_alone_change_no_covariance(make_atoms, calibrated):
    path = calibrated("conformal")
    for extra in ({}, {"uq_calibration": "valid.json"}):
        Monitor(make_atoms(extra=extra), {EXTENT: Quantile(0.9)}, held_out=path)
    with pytest.raises(InputError, match=r"the calibration valid\.json, the calculator's other\.json"):
        Monitor(make_atoms(extra={"uq_calibration": "other.json"}), {EXTENT: Quantile(0.9)}, held_out=path)


@pytest.mark.parametrize(
    "thresholds, message",
    [
        ({STD: Quantile(0.97)}, r"valid\.json: has the quantiles 0\.5, .*, not 0\.97; for others give the predictions"),
        (
            {STD: Quantile(0.99)},
            r"its 40 frames are too few for the quantile 0\.99 of forces_epistemic_std \(all\), which needs 99",
        ),
        ({EXTENT: 0.1}, r"no conformal radius for level 0\.9; it has radii for: none; e2ip calibrate --method"),
    ],
)
def test_what_a_calibration_has_not(make_atoms, calibrated, thresholds, message, refused):
    path = calibrated("scale")
    refused(message, Monitor, make_atoms(extra={"uq_calibration": "valid.json"}), thresholds, held_out=path)


def test_other_held_out_frames(make_atoms, held_out, calibrated, refused):
    with pytest.raises(InputError, match=r"is of family 'niw', the calculator's model of 'gaussian'"):
        Monitor(make_atoms(extra={"uq_family": "gaussian"}), {STD: Quantile(0.9)}, held_out=held_out)
    with pytest.raises(InputError, match=r"of one model of family 'niw', the calculator is a committee: give the file"):
        Monitor(make_atoms(extra={"uq_family": None}), {STD: Quantile(0.9)}, held_out=held_out)
    frames = ase.io.read(held_out, ":")
    for frame in frames:
        frame.info["MACE_uq_model"] = "readout-1"
    ase.io.write("other.xyz", frames, format="extxyz")
    Monitor(make_atoms(extra={"uq_model": "readout-1"}), {STD: Quantile(0.9)}, held_out="other.xyz")
    with pytest.raises(InputError, match=r"of another model \(readout-1\) than the calculator's \(readout-2\)"):
        Monitor(make_atoms(extra={"uq_model": "readout-2"}), {STD: Quantile(0.9)}, held_out="other.xyz")
    atoms = make_atoms()
    atoms.symbols[0] = "N"
    refused("its frames hold no N", Monitor, atoms, {STD: {"N": Quantile(0.9), "O": 0.1, "H": 0.1}}, held_out=held_out)
    refused("its frames hold no N, which the structure has", Monitor, atoms, {STD: Quantile(0.9)}, held_out=held_out)
    Monitor(atoms, {STD: 0.05}, held_out=held_out)  # a number needs none of them
    refused("no such file", Monitor, make_atoms(), {STD: Quantile(0.9)}, held_out="nothing.xyz")
    path = calibrated("conformal")
    path.write_text(path.read_text().replace('"frame_maxima"', '"of_another_version"'))
    with pytest.raises(InputError, match=r"valid\.json: is damaged .*frame_maxima.*; fit it anew with e2ip calibrate"):
        Monitor(make_atoms(), {STD: Quantile(0.9)}, held_out=path)
    frames = ase.io.read(held_out, ":")
    for frame in frames:
        frame.arrays = {
            k: v for k, v in frame.arrays.items() if k in ("numbers", "positions", "MACE_forces", "REF_forces")
        }
        frame.info = {}
    ase.io.write("baseline.xyz", frames, format="extxyz")
    with pytest.raises(InputError, match=r"baseline\.xyz: has no predicted distribution"):
        Monitor(make_atoms(), {STD: Quantile(0.9)}, held_out="baseline.xyz")


@pytest.mark.parametrize("number, doubted", [(20.0, True), (0.001, True), (0.1, False), (0.01, False)])
def test_a_number_far_from_held_out_frames_is_doubted(make_atoms, held_out, number, doubted):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Monitor(make_atoms(), {STD: number}, held_out=held_out)
    texts = [str(warning.message) for warning in caught if "largest values of held-out frames" in str(warning.message)]
    assert len(texts) == doubted and all("0.021 in the median and 0.04 at most" in text for text in texts)
