"""Intervals of coverages: against SciPy's bootstrap, and by how often they hold what is true."""

import itertools

import numpy as np
import pytest
from scipy import stats

from e2ip_plugins.scores.bootstrap import coverage_band, inside_regions
from e2ip_plugins.scores.metrics import CALIBRATION_LEVELS, calibration_error


def grouped(frames, atoms, size=1.0, shared=0.3, seed=0):
    """PIT of errors that are ``size`` times too large, with a factor that the atoms of a configuration share."""
    rng = np.random.default_rng(seed)
    scale = size * np.exp(shared * rng.normal(size=frames))
    distance = np.square(rng.normal(size=(frames, atoms, 3)) * scale[:, None, None]).sum(-1)
    return stats.chi2.cdf(distance, 3).ravel(), np.repeat(np.arange(frames), atoms)


def test_coverages_by_configuration():
    pit, index = np.array([0.005, 0.5, 0.505, 1.0]), np.array([0, 0, 1, 1])
    inside = inside_regions(pit, index, 2)
    for i, level in enumerate(CALIBRATION_LEVELS):
        assert inside[:, i].tolist() == [np.sum(pit[:2] <= level), np.sum(pit[2:] <= level)]
    components = inside_regions(np.stack([pit, pit, np.ones(4)], axis=1), index, 2)
    np.testing.assert_array_equal(components, 2 * inside)


def test_intervals_are_those_of_scipy():
    """Configurations of one size: the coverage is the mean of theirs."""
    pit, frame = grouped(50, 8)
    band = coverage_band(pit, frame)
    for level in (0.5, 0.9):
        of_frames = (pit.reshape(50, 8) <= level).mean(1)
        found = stats.bootstrap((of_frames,), np.mean, method="percentile", n_resamples=20_000, random_state=0)
        width = np.ptp(found.confidence_interval)
        assert band.coverage(level) == pytest.approx(tuple(found.confidence_interval), abs=0.1 * width)


def test_large_configurations_count_more():
    """Four configurations, of which one is inside, and all 4⁴ ways to draw four."""
    sizes = np.array([300, 10, 60, 20])
    band = coverage_band(np.repeat([0.0, 1.0, 1.0, 1.0], sizes), np.repeat([2, 5, 6, 9], sizes))
    drawn = np.array(list(itertools.product(range(4), repeat=4)))
    coverages = 300 * (drawn == 0).sum(1) / sizes[drawn].sum(1)
    low, high = np.quantile(coverages, [0.025, 0.975])
    assert low == 0.0 and 0.95 < high < 1.0
    assert band.coverage(0.5) == pytest.approx((low, high), abs=0.02)


def test_atoms_of_a_configuration_are_no_independent_witnesses():
    pit, frame = grouped(60, 10, shared=0.0)
    alone, twice = coverage_band(pit, frame), coverage_band(np.repeat(pit, 2), np.repeat(frame, 2))
    np.testing.assert_allclose(twice.low, alone.low)
    as_if = coverage_band(np.repeat(pit, 10), np.arange(6000))
    assert np.mean(as_if.high - as_if.low) < 0.4 * np.mean(alone.high - alone.low)


def test_components_belong_to_their_configuration():
    pit, frame = grouped(20, 6)
    by_component, flat = coverage_band(pit.reshape(40, 3), frame[::3]), coverage_band(pit, frame)
    for a, b in zip(by_component, flat, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("size", [1.0, 1.03, 1.4])
def test_intervals_hold_what_is_true(size):
    """For many test sets, about as often as they say; also where nothing is wrong, which percentiles never admit."""
    shared = 0.15 if size > 1.1 else 0.0
    pit, _ = grouped(20_000, 8, size, shared, seed=1)
    truth = {"error": calibration_error(pit), "coverage": np.mean(pit <= 0.8)}
    truth["error"] = 0.0 if size == 1.0 else truth["error"]
    held = {"error": 0, "coverage": 0}
    for seed in range(150):
        pit, frame = grouped(40, 8, size, shared, seed=100 + seed)
        band = coverage_band(pit, frame)
        for name, (low, high) in (("error", band.calibration_error), ("coverage", band.coverage(0.8))):
            held[name] += low <= truth[name] <= high
        assert band.calibration_error[0] <= calibration_error(pit) <= band.calibration_error[1]
    assert held["coverage"] / 150 > 0.88 and held["error"] / 150 > 0.85
    assert size == 1.0 or held["error"] / 150 > 0.93


def test_one_configuration_says_nothing():
    assert coverage_band(np.array([0.1, 0.4]), np.array([3, 3])) is None
