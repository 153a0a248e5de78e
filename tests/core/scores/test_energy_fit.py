"""Constants of a calibration for energies: the factor of maximum likelihood, conformal radii, files, bad input."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import optimize, stats

from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.prediction_files import Predictions
from e2ip_plugins.scores.calibration import Calibration, CalibrationConstant
from e2ip_plugins.scores.conformal import conformal_radius
from e2ip_plugins.scores.energy_fit import fit_energy_factor, with_energies

NOTHING = CalibrationConstant(0.0, (0.0, 0.0))


def predictions(frames=60, seed=0, size=2.0):
    """Energies of frames of three atoms whose errors are ``size`` times as large as predicted."""
    rng = np.random.default_rng(seed)
    std = 0.1 * np.exp(rng.normal(size=frames))
    return Predictions(
        path=Path("p.xyz"),
        sizes=np.full(frames, 3),
        species=np.tile(["H", "H", "O"], frames),
        positions=np.zeros((3 * frames, 3)),
        reference_forces=np.zeros((3 * frames, 3)),
        forces=np.zeros((3 * frames, 3)),
        reference_energy=size * std * rng.normal(size=frames),
        energy=np.zeros(frames),
        family=None,
        parameters={},
        frames=tuple(f"{i:03d}" for i in rng.permutation(frames)),
        energy_uncertainty=std,
        index=np.arange(frames),
        counted=np.full(frames, True),
    )


def calibration(*methods, **fields):
    one = CalibrationConstant(1.0, (1.0, 1.0))
    scores = {when: {"nll": -5.0, "calibration_error": 0.01, "coverage90": 0.9} for when in ("before", "after")}
    return Calibration(methods, "niw", {"H": one}, NOTHING, {}, 60, 180, ("000",), "v.xyz", scores, **fields)


def test_factor_is_the_most_likely_one():
    z, notes = 2.0 * np.random.default_rng(0).normal(size=200), []
    found = fit_energy_factor(z, notes)

    def loss(scale):
        return -stats.norm.logpdf(z, scale=scale).sum()

    best = optimize.minimize_scalar(loss, bounds=(0.1, 10.0), method="bounded", options={"xatol": 1e-8})
    # Shrunk a little towards 1.
    assert best.x * 0.98 < found.value < best.x and notes == []
    low, high = found.interval
    assert low < best.x < high and np.log(high / low) == pytest.approx(2 * 1.96 / np.sqrt(2 * 200), rel=0.3)


def test_what_frames_hardly_tell_from_1_is_drawn_to_1():
    z, notes = np.random.default_rng(3).normal(size=8) * 1.1, []
    found = fit_energy_factor(z, notes)
    wanted = np.sqrt(np.mean(z**2))
    assert min(1.0, wanted) <= found.value <= max(1.0, wanted)
    assert f"want a factor of {wanted:.3f}" in notes[0] and "8 frames say little" in notes[1]


def test_factor_and_radii():
    p = predictions()
    found = with_energies(calibration("scale", "conformal"), p, (0.5, 0.9))
    energies = found.energies
    assert found.energy_factor == energies.factor.value == pytest.approx(2.0, rel=0.2) and energies.frames == 60
    # The intervals are the same whatever the factor is.
    distance = np.abs(p.reference_energy) / p.energy_uncertainty
    for level, radius in energies.radii.items():
        assert radius * found.energy_factor == pytest.approx(conformal_radius(distance, np.arange(60), level))
    assert list(energies.radii) == [0.5, 0.9]
    assert energies.scores["after"]["nll"] < energies.scores["before"]["nll"]
    assert set(found.frames) == set(p.frames) and found.frames[0] == "000"
    lines = found.lines()
    assert "energies of 60 frames" in lines
    assert f"conformal radius of energies for 0.9: {energies.radii[0.9]:.3f}" in lines
    assert any(line.startswith(f"factor on their standard deviations: {found.energy_factor:.4g} (") for line in lines)


def test_conformal_intervals_hold_new_frames():
    held = []
    for seed in range(60):
        p, new = predictions(20, seed), predictions(20, 1000 + seed)
        found = with_energies(calibration("conformal"), p, (0.8,))
        assert found.energy_factor == 1.0
        held.append(np.mean(np.abs(new.reference_energy) <= found.energies.radii[0.8] * new.energy_uncertainty))
    assert 0.79 < np.mean(held) < 0.87


def test_only_conformal_leaves_standard_deviations():
    found = with_energies(calibration("conformal"), predictions())
    assert found.energy_factor == 1.0 and not found.changes and "factor on their" not in " ".join(found.lines())
    assert with_energies(calibration("scale"), predictions()).changes


def test_order_of_frames_does_not_matter():
    p = predictions()
    a, b = (with_energies(calibration("scale", "conformal"), q) for q in (p, p.only(np.arange(60)[::-1])))
    assert a.energies.factor.interval == pytest.approx(b.energies.factor.interval, rel=1e-12)
    assert a.frames == b.frames


def test_isolated_atoms_say_nothing():
    p = predictions()
    sizes, atoms = np.append(1, p.sizes), np.concatenate([[0], np.arange(180)])
    wide = {name: getattr(p, name)[atoms] for name in ("species", "positions", "reference_forces", "forces")}
    of_frames = {"reference_energy": np.append(0.0, p.reference_energy), "energy": np.zeros(61)}
    stds = np.append(1.0, p.energy_uncertainty)
    index = {"index": np.arange(61), "counted": np.full(61, True)}
    q = replace(p, sizes=sizes, frames=("atom", *p.frames), energy_uncertainty=stds, **wide, **of_frames, **index)
    a, b = (with_energies(calibration("scale"), r) for r in (p, q))
    assert a.energies == b.energies and "atom" not in b.frames


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (lambda p: p.reference_energy.fill(np.nan), "energies: 0 frames of two atoms or more"),
        (lambda p: p.reference_energy.__iadd__(300.0), "differ from the predicted ones by 100 eV per atom"),
        (lambda p: p.reference_energy.fill(0.0), "all errors of energies are zero"),
    ],
)
def test_nothing_is_fitted_to_nonsense(change, note):
    p = predictions()
    change(p)
    found = with_energies(calibration("scale"), p)
    assert found.energies is None and found.energy_factor == 1.0
    (text,) = found.notes
    assert note in text and text.endswith("the standard deviations of energies stay as they are")


def test_predictions_without_uncertainties_of_energies_change_nothing():
    p = predictions()
    p.energy_uncertainty[:] = np.nan
    before = calibration("scale")
    assert with_energies(before, p) is before


@pytest.fixture
def path(tmp_path):
    found = with_energies(calibration("scale", "conformal", frame_maxima={}), predictions(), (0.5, 0.999))
    found.write(tmp_path / "c.json")
    return tmp_path / "c.json"


def test_file_keeps_everything(path):
    found = Calibration.read(path)
    expected = with_energies(calibration("scale", "conformal"), predictions(), (0.5, 0.999))
    assert found.energies == expected.energies and np.isinf(found.energies.radii[0.999])


def test_files_from_before_are_read(path, tmp_path):
    calibration("scale").write(tmp_path / "before.json")
    assert "energies" not in json.loads((tmp_path / "before.json").read_text())
    found = Calibration.read(tmp_path / "before.json")
    assert found.energies is None and found.energy_factor == 1.0 and not found.changes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"factor": {"value": -1.0, "interval95": [1, 2]}}, "the factor of energies must be positive"),
        ({"factor": {"value": "2", "interval95": [1, 2]}}, "is no finite number"),
        ({"radii": {"0.9": -1.0}}, "radii must not be negative"),
        ({"radii": {"0.5": 2.0, "0.9": 1.0}}, "radii must grow"),
        ({"frames": None}, "TypeError"),
    ],
)
def test_damaged_files_are_refused(path, change, message):
    content = json.loads(path.read_text())
    content["energies"].update(change)
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=rf"c\.json: is damaged .*{message}"):
        Calibration.read(path)
    path.write_text(json.dumps({**content, "energies": None}))
    with pytest.raises(InputError, match=r"c\.json: is damaged"):
        Calibration.read(path)
