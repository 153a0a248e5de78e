"""The study of the monitor: when a run is stopped, and whether that is in time, on numbers made up."""

import ase.io
import numpy as np
import pytest
from ase.build import molecule
from ase.calculators.singlepoint import SinglePointCalculator


@pytest.fixture(scope="module")
def study(load_script):
    """benchmarks/monitor.py as a module."""
    return load_script("benchmarks/monitor.py")


@pytest.fixture
def held_out(study):
    """A threshold of 2, an error of 0.5 eV/Å that is too large."""
    return study.Checks(np.full((300, 3), 2.0), np.full((300, 3), 0.1), np.arange(300))


def checks(study, values, errors):
    """Checks whose largest value and error are those of the second of three atoms."""
    columns = [np.outer(x, [0.0, 1.0, 0.0]) for x in (values, errors)]
    return study.Checks(*columns, 10 * np.arange(len(values)))


def test_one_check_above_is_an_alarm_and_most_of_five_stop(study, held_out):
    values = [1, 3, 1, 1, 1, 1, 3, 3, 1, 3, 1, 1]
    result = study.judge(checks(study, values, np.full(12, 0.4)), held_out)
    assert (result["checks"], result["too_large"]) == (12, None) and result["limit"] == pytest.approx(0.5)
    # Of the last five at the tenth check, three are above.
    assert tuple(result["levels"]) == study.LEVELS
    for name, level in result["levels"].items():
        assert (level["threshold"], level["above"]) == (2.0, 4)
        # There are never as many as 21.
        assert level["stop"] == {"5": 90, "21": None}
        assert all(study.in_time(result, name, window) for window in study.WINDOWS)
    assert result["median_until_too_large"] == {"5": 3.0, "21": 0.0}


@pytest.mark.parametrize(("bad", "in_time"), [(3, False), (4, False), (5, True)])
def test_in_time_is_before_the_error_is_too_large(study, held_out, bad, in_time):
    values, errors = np.array([1, 1, 3, 3, 3, 3]), np.full(6, 0.1)
    errors[bad] = 0.6
    result = study.judge(checks(study, values, errors), held_out)
    assert result["levels"]["0.99"]["stop"]["5"] == 40 and result["too_large"] == 10 * bad
    assert study.in_time(result, "0.99", "5") == in_time
    # Nothing before there are five checks.
    assert result["median_until_too_large"]["5"] == (3.0 if bad == 5 else 0.0)
    never = study.judge(checks(study, np.ones(6), errors), held_out)
    assert set(never["levels"]["0.99"]["stop"].values()) == {None}
    assert not any(study.in_time(never, "0.99", window) for window in study.WINDOWS)


def test_predictions_are_read_as_mace_writes_them(study, tmp_path):
    rng = np.random.default_rng(0)
    reference, forces = rng.normal(size=(3, 3)), {}
    for name in (*study.READOUTS, *study.COMMITTEE):
        atoms = molecule("H2O")
        atoms.info["md_step"] = 70
        atoms.arrays["REF_forces"], forces[name] = reference, rng.normal(size=(3, 3))
        atoms.arrays["MACE_forces"] = forces[name]
        atoms.arrays["MACE_e2ip_leverage"] = atoms.arrays["MACE_forces_epistemic_std"] = np.arange(3.0)
        atoms.calc = SinglePointCalculator(atoms, energy=0.0)
        ase.io.write(tmp_path / f"{name}.xyz", [atoms], format="extxyz")
    detectors = study.read(tmp_path)
    members = np.stack([forces[name] for name in study.COMMITTEE])
    spread = np.sqrt(np.trace(np.cov(members[:, 1].T)) / 3)
    committee = detectors["committee of five"]
    assert committee.values[0, 1] == pytest.approx(spread, abs=1e-6) and committee.steps.tolist() == [70]
    error = np.linalg.norm(members.mean(0) - reference, axis=1)
    np.testing.assert_allclose(committee.errors[0], error, atol=1e-6)
    coupled = detectors["coupled, epistemic std"]
    np.testing.assert_allclose(coupled.errors[0], np.linalg.norm(forces["coupled"] - reference, axis=1), atol=1e-6)


def test_tables(study, held_out, tmp_path):
    quiet = study.judge(checks(study, [1, 3, 1, 1, 1], np.full(5, 0.1)), held_out)
    hot = study.judge(checks(study, [1, 3, 3, 3, 3, 3], [0.1, 0.1, 0.1, 0.1, 0.1, 0.9]), held_out)
    runs = {"cold_0": quiet, "ramp_0": hot, "ramp_1": hot, "slow_0": quiet}
    results = {name: dict.fromkeys(study.DETECTORS, result) for name, result in runs.items()}
    thresholds, drawn, any_threshold = study.tables(results).split("\n\n")
    study.draw(results, tmp_path / "figure.png")
    # A run that never errs too much needs no stop; none has 21 checks.
    assert "| leverage | 0.99 | 20.0% | 0.20 | no | 2 of 2 | 1 of 1 | no | 0 of 2 | 1 of 1 |" in thresholds
    assert "| leverage | 2 of 2 | 0 of 1 | 0 of 2 | 0 of 1 |" in any_threshold
    # None has the 21 checks of the rule that is drawn; step 50 of 4000 is 15 K above the start.
    assert "| leverage | 4000 | never | never | 315 K | 2 not stopped |" in drawn
    assert "| leverage | 10000 | never | never | never | none |" in drawn
    late = study.judge(checks(study, np.full(30, 3.0), np.full(30, 0.9)), held_out)
    assert study.when([late], "slow") == ["10000", "324 K", "324 K", "300 K", "200"]
    assert len({line.count("|") for line in thresholds.splitlines()}) == 1 and (tmp_path / "figure.png").exists()
