"""Conformal radii: by hand, against NumPy's weighted quantile, and coverage by simulation."""

import math

import numpy as np
import pytest

from e2ip_plugins.scores.conformal import configurations_for, conformal_radius


def test_radius_by_hand():
    # Three configurations of weight 1/4; the second has two atoms of 1/8.
    distance, frame = np.array([1.0, 2.0, 3.0, 4.0]), np.array([0, 1, 1, 2])
    radii = {level: conformal_radius(distance, frame, level) for level in (0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 0.76)}
    assert radii == {0.2: 1.0, 0.25: 1.0, 0.3: 2.0, 0.4: 3.0, 0.5: 3.0, 0.75: 4.0, 0.76: math.inf}


@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.0.0", reason="no weighted quantiles")
def test_radius_is_the_weighted_quantile_of_numpy():
    rng = np.random.default_rng(0)
    frame = rng.integers(0, 30, 500)
    distance, sizes = rng.random(500), np.bincount(frame)
    # Infinity as one more configuration.
    weights, values = np.append(1.0 / sizes[frame], 1.0), np.append(distance, 1e9)
    for level in (0.1, 0.5, 0.8, 0.93):
        expected = np.quantile(values, level, weights=weights, method="inverted_cdf")
        assert conformal_radius(distance, frame, level) == expected


@pytest.mark.parametrize("level", [0.5, 0.8, 0.9])
def test_coverage_by_simulation(level):
    """Configurations of different sizes whose atoms share a scale, which has to do with the size.

    The radius holds a random atom of a new configuration with at least the level, and no more than by the weight of one
    configuration. Taking all atoms for exchangeable would not: large configurations would rule.
    """
    rng, configurations = np.random.default_rng(0), 19

    def draw(count):
        sizes = rng.choice([2, 40], count)
        frame = np.repeat(np.arange(count), sizes)
        scale = np.exp(rng.normal(size=count)) * np.where(sizes == 2, 3.0, 1.0)
        return np.linalg.norm(rng.normal(size=(len(frame), 3)), axis=-1) * scale[frame], frame, sizes

    covered, pooled = [], []
    for _ in range(1500):
        distance, frame, _ = draw(configurations)
        fresh, fresh_frame, sizes = draw(10)
        for shares, radius in (
            (covered, conformal_radius(distance, frame, level)),
            (pooled, np.quantile(distance, level)),
        ):
            shares.append(np.mean(np.bincount(fresh_frame, fresh <= radius) / sizes))
    error = 3.0 * np.std(covered) / math.sqrt(len(covered))
    assert level - error < np.mean(covered) < level + 1.0 / (configurations + 1) + error
    assert np.mean(pooled) < level - 0.02


@pytest.mark.parametrize("level", [0.1, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99])
def test_the_least_number_of_configurations_for_a_level(level):
    least = configurations_for(level)
    assert math.isfinite(conformal_radius(np.arange(float(least)), np.arange(least), level))
    assert least == 1 or math.isinf(conformal_radius(np.arange(least - 1.0), np.arange(least - 1), level))
