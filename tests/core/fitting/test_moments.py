"""Moments grow as if the atoms that are added had been there from the beginning."""

import numpy as np
import pytest

from e2ip_plugins.fitting.moments import Moments, Scatter, leverages
from e2ip_plugins.leverage.module import Leverage

SIZE = 4


def make(count, seed=0, centre=0.0, width=1.0):
    return centre + width * np.random.default_rng(seed).normal(size=(count, SIZE)) * np.linspace(0.5, 2.0, SIZE)


def test_scatter_is_that_of_all_atoms_together():
    first, second, third = make(5), make(1, 1, 100.0), make(7, 2, -3.0)
    found = Scatter(first)
    found.add(second, 3.0)
    found.add(third)
    found.add(third[:0])
    x = np.concatenate([first, second, second, second, third])
    assert found.count == len(x)
    np.testing.assert_allclose(found.mean, x.mean(0), rtol=1e-12)
    np.testing.assert_allclose(found.covariance, np.cov(x.T, bias=True), rtol=1e-12)


@pytest.mark.parametrize("weight", [1, 3])
def test_added_atoms_are_as_if_they_had_been_there(weight):
    """Of two kinds with one region each, and a third that had no atoms before: all moments, by way of the pool."""
    features, new = {0: make(20), 2: make(12, 1, 5.0)}, {0: make(3, 2, 30.0), 1: make(2, 3, -8.0)}
    grown = Moments(features)
    for kind, x in new.items():
        grown.add(kind, x, float(weight))
    together = {
        kind: np.concatenate([features.get(kind, make(0)), *[new.get(kind, make(0))] * weight]) for kind in range(3)
    }
    fitted = Moments(together)
    found, expected = (Leverage(SIZE, 3).double() for _ in range(2))
    grown.store(found, together)
    fitted.store(expected, together)
    probe = make(9, 4, 2.0, 4.0)
    before = Leverage(SIZE, 3).double()
    Moments(features).store(before, features)
    for kind in range(3):
        np.testing.assert_allclose(leverages(found, probe, kind), leverages(expected, probe, kind), rtol=1e-9)
        assert not np.allclose(leverages(found, probe, kind), leverages(before, probe, kind), rtol=1e-2)
        alone, mean = grown.leverage_of(kind, together[kind], np.ones(len(together[kind])))
        np.testing.assert_allclose(leverages(alone, probe, 0) / mean, leverages(found, probe, kind), rtol=1e-9)


def test_atoms_enter_the_region_that_they_are_in():
    count = 8 * SIZE
    x = np.concatenate([make(count), make(count, 1, 20.0)])
    grown = Moments({0: x})
    assert len(grown.regions[0]) == 2
    new = np.concatenate([make(2, 2, 21.0), make(2, 3, 1.0)])
    region = grown.nearest(0, new)
    assert region[0] == region[1] != region[2] == region[3]
    for i in (0, 1):
        grown.add(0, new[region == i], 1.0, i)
    parts = sorted(grown.regions[0], key=lambda part: part.mean[0])
    for part, own in zip(parts, ([x[:count], new[2:]], [x[count:], new[:2]]), strict=True):
        own = np.concatenate(own)
        np.testing.assert_allclose(part.mean, own.mean(0), rtol=1e-10)
        np.testing.assert_allclose(part.covariance, np.cov(own.T, bias=True), rtol=1e-10, atol=1e-12)
    total = np.concatenate([x, new])
    np.testing.assert_allclose(grown.total[0].covariance, np.cov(total.T, bias=True), rtol=1e-10)
