"""Reweighted averages of a harmonic oscillator, whose members pull at it: exact for both ways of reweighting."""

import numpy as np
import pytest
from ase.units import kB

from e2ip_plugins.energies import reweight
from e2ip_plugins.errors import InputError, UncertaintyWarning

STIFFNESS, TEMPERATURE, FRAMES = 2.0, 300.0, 200_000  # eV/Å², K
WIDTH = np.sqrt(kB * TEMPERATURE / STIFFNESS)


@pytest.fixture(scope="module")
def positions():
    return WIDTH * np.random.default_rng(0).standard_normal(FRAMES)


def reweighted(x, pulls, observable=None):
    """Members have the energies ½ k x² + g x for pulls g in eV/Å, plus an offset that must not matter."""
    energies = 0.5 * STIFFNESS * x**2
    members = energies[:, None] + np.multiply.outer(x, pulls) + 700.0 * np.arange(len(pulls))
    return reweight(x if observable is None else observable, members, energies, TEMPERATURE)


def test_exact_averages(positions):
    """⟨x⟩ = -g/k, and ⟨x²⟩ = kT/k + (g/k)², which the expansion, of first order in g, lacks."""
    pulls = np.array([-0.2, -0.05, 0.0, 0.1, 0.2])
    result = reweighted(positions, pulls, np.stack([positions, positions**2], axis=1))
    exact = -pulls / STIFFNESS
    error = 5.0 * WIDTH / FRAMES**0.5
    np.testing.assert_allclose(result.direct.members[:, 0], exact, atol=2 * error)
    np.testing.assert_allclose(result.cumulant.members[:, 0], exact, atol=2 * error)
    np.testing.assert_allclose(result.direct.members[:, 1], WIDTH**2 + exact**2, atol=10 * WIDTH * error)
    np.testing.assert_allclose(result.cumulant.members[:, 1], WIDTH**2, atol=10 * WIDTH * error)
    np.testing.assert_allclose(result.sampled, [0.0, WIDTH**2], atol=error)
    # Kish's effective sample size of the weights exp(-g x/kT) of a Gaussian.
    spread = pulls * WIDTH / (kB * TEMPERATURE)
    np.testing.assert_allclose(result.effective, np.exp(-(spread**2)), rtol=0.05)


def test_mean_and_error_bar(positions):
    """Both ways have the spread over members that their pulls cause, and agree within it."""
    pulls = 0.1 * np.random.default_rng(1).standard_normal(32)
    result = reweighted(positions, pulls)
    for averages in (result.direct, result.cumulant):
        assert averages.std == pytest.approx(pulls.std(ddof=1) / STIFFNESS, rel=0.02)
        assert averages.mean == pytest.approx(-pulls.mean() / STIFFNESS, abs=0.1 * averages.std)
    assert abs(result.direct.mean - result.cumulant.mean) < 0.1 * result.direct.std
    np.testing.assert_array_equal(result.trusted.members, result.direct.members)


def test_small_samples(positions):
    """Far members have few frames: a warning, and the expansion is still right."""
    pulls = np.array([0.01, 3.0])
    with pytest.warns(UncertaintyWarning, match="direct weights of 1 of 2 members rest on less than 10% of the frames"):
        result = reweighted(positions[:5000], pulls)
    assert result.effective[1] < 0.01 < 0.9 < result.effective[0]
    np.testing.assert_array_equal(result.trusted.members, result.cumulant.members)
    np.testing.assert_allclose(result.trusted.members, -pulls / STIFFNESS, rtol=0.1, atol=0.01)
    assert abs(result.direct.members[1] + 1.5) > 0.5


def test_energies_that_differ_by_thousands_of_kT():
    """No overflow: the weight is on the frame that a member likes best."""
    with pytest.warns(UncertaintyWarning, match=r"2 of 2 members .* \(the worst on 5.0%\)"):
        result = reweight(np.arange(20.0), -np.eye(20)[:, [3, 7]] * 1e5, np.zeros(20), 1.0)
    np.testing.assert_array_equal(result.direct.members, [3.0, 7.0])
    np.testing.assert_allclose(result.effective, 0.05)


@pytest.mark.parametrize(
    ("observable", "energies", "mean", "temperature", "message"),
    [
        (np.zeros(4), np.zeros((5, 2)), np.zeros(5), 300, r"observable \(4,\), member_energies \(5, 2\)"),
        (np.zeros(5), np.zeros(5), np.zeros(5), 300, r"member_energies \(5,\)"),
        (0.0, np.zeros((5, 2)), np.zeros(5), 300, r"observable \(\)"),
        (np.zeros(5), np.zeros((5, 1)), np.zeros(5), 300, "5 frames, 1 members"),
        (np.zeros(1), np.zeros((1, 2)), np.zeros(1), 300, "1 frames, 2 members"),
        (np.full(5, np.nan), np.zeros((5, 2)), np.zeros(5), 300, "not finite"),
        (np.zeros(5), np.zeros((5, 2)), np.zeros(5), 0.0, "temperature_K 0"),
        (np.zeros(5), np.zeros((5, 2)), np.zeros(5), np.nan, "temperature_K nan"),
    ],
)
def test_refused(observable, energies, mean, temperature, message):
    with pytest.raises(InputError, match=message):
        reweight(observable, energies, mean, temperature)
