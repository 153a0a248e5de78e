"""Scores of energies: against SciPy and numerical integration, of a model that is right, and of pairs of frames."""

from pathlib import Path

import numpy as np
import pytest
from scipy import integrate, stats

from e2ip_plugins.predictions.prediction_files import Predictions
from e2ip_plugins.scores import energies
from e2ip_plugins.scores.energies import (
    MAX_PAIRS,
    central_level,
    crps,
    energy_figures,
    energy_intervals,
    negative_log_likelihood,
    of_frames,
    of_pairs,
    reference_doubt,
    weighted_spearman,
)
from e2ip_plugins.scores.metrics import calibration_error, spearman

M = 16


def predictions(frames=40, seed=0, size=1.0, compositions=("HHO", "HHOO")):
    """Energies that err as u · r does, ``size`` times as much, for frames of several compositions."""
    rng = np.random.default_rng(seed)
    symbols = [list(compositions[i % len(compositions)]) for i in range(frames)]
    sizes = np.array([len(of_frame) for of_frame in symbols])
    vectors = 0.1 * rng.normal(size=(frames, M)) * np.exp(rng.normal(size=(frames, 1)))
    return Predictions(
        path=Path("p.xyz"),
        sizes=sizes,
        species=np.concatenate(symbols),
        positions=np.zeros((sizes.sum(), 3)),
        reference_forces=np.zeros((sizes.sum(), 3)),
        forces=np.zeros((sizes.sum(), 3)),
        reference_energy=size * (vectors @ rng.normal(size=M)),
        energy=np.zeros(frames),
        family=None,
        parameters={},
        energy_uncertainty=np.linalg.norm(vectors, axis=1),
        energy_error_vector=vectors,
    )


ERRORS, STDS = np.array([0.3, -2.0, 0.0, 1e-3]), np.array([1.0, 0.5, 0.2, 4.0])


def test_likelihood_and_levels_are_those_of_scipy():
    found = negative_log_likelihood(ERRORS, STDS)
    np.testing.assert_allclose(found, -stats.norm.logpdf(ERRORS, scale=STDS), rtol=1e-12)
    below = stats.norm.cdf(np.abs(ERRORS), scale=STDS)
    np.testing.assert_allclose(central_level(ERRORS, STDS), 2.0 * below - 1.0, rtol=1e-9)
    np.testing.assert_allclose(central_level(ERRORS, STDS), stats.chi2.cdf((ERRORS / STDS) ** 2, 1), rtol=1e-9)


def test_crps_is_the_integral_that_defines_it():
    """∫ (F(x) - 1[x ≥ y])² dx."""
    for error, std, found in zip(ERRORS, STDS, crps(ERRORS, STDS), strict=True):
        cdf = stats.norm(scale=std).cdf
        below = integrate.quad(lambda x, cdf=cdf: cdf(x) ** 2, -40.0 * std, error, limit=200)[0]
        above = integrate.quad(lambda x, cdf=cdf: (1.0 - cdf(x)) ** 2, error, 40.0 * std, limit=200)[0]
        assert found == pytest.approx(below + above, rel=1e-7)


def test_crps_and_likelihood_are_best_for_the_true_deviation():
    error = np.random.default_rng(0).normal(scale=0.3, size=20_000)
    for score in (crps, negative_log_likelihood):
        means = [score(error, np.full(len(error), std)).mean() for std in (0.2, 0.3, 0.4)]
        assert means[1] == min(means)


def test_figures_are_means_over_frames():
    p = predictions()
    p.reference_energy[3], p.energy_uncertainty[5] = np.nan, np.nan
    found = of_frames(p)
    kept = np.delete(np.arange(40), [3, 5])
    np.testing.assert_array_equal(found.frames[:, 0], kept)
    error, std, atoms = p.reference_energy[kept], p.energy_uncertainty[kept], p.sizes[kept]
    figures = energy_figures(found)
    assert figures["mae"] == pytest.approx(np.mean(np.abs(error) / atoms))
    assert figures["crps"] == pytest.approx(np.mean(crps(error / atoms, std / atoms)))
    assert figures["nll"] == pytest.approx(-stats.norm.logpdf(error, scale=std).mean())
    assert figures["calibration_error"] == pytest.approx(calibration_error(central_level(error, std)))
    assert figures["coverage95"] == pytest.approx(np.mean(np.abs(error) <= 1.959964 * std))
    assert figures["spearman"] == pytest.approx(spearman(np.abs(error) / atoms, std / atoms))


def test_pairs_are_all_of_one_composition():
    p = predictions(frames=9, compositions=("HHO", "HOO", "OHH"))
    p.energy_error_vector[8] = p.energy_error_vector[0]  # a copy, of another frame number
    p.energy_error_vector[3] = np.nan
    found = of_pairs(p)
    # The third composition is the first one in another order.
    first, second = [0, 2, 5, 6, 8], [1, 4, 7]
    expected = {(i, j) for group in (first, second) for i in group for j in group if i < j} - {(0, 8)}
    assert {tuple(pair) for pair in found.frames.tolist()} == expected and found.possible == len(expected) + 1
    i, j = found.frames.T
    np.testing.assert_allclose(found.error, p.reference_energy[i] - p.reference_energy[j])
    np.testing.assert_allclose(found.std, np.linalg.norm(p.energy_error_vector[i] - p.energy_error_vector[j], axis=1))
    assert (found.atoms == 1).all()


def test_of_many_pairs_some_are_drawn():
    p = predictions(frames=400, compositions=("HHO", "HHO", "HOO"))
    found = of_pairs(p)
    assert len(found.error) == MAX_PAIRS < found.possible == 267 * 266 // 2 + 133 * 132 // 2
    pairs = found.frames
    assert len(np.unique(pairs, axis=0)) == MAX_PAIRS and (pairs[:, 0] < pairs[:, 1]).all()
    assert all((p.sizes[pairs[:, 0]] == p.sizes[pairs[:, 1]]).tolist())
    # As often as they are there.
    assert np.mean(pairs[:, 0] % 3 == 2) == pytest.approx(133 * 132 / 2 / found.possible, abs=0.03)
    np.testing.assert_array_equal(of_pairs(p).frames, pairs)


def test_there_may_be_nothing_to_score():
    p = predictions(frames=2)
    assert of_pairs(p) is None  # two compositions
    p.reference_energy[:] = np.nan
    assert of_frames(p) is None
    one = predictions(frames=1)
    assert energy_intervals(of_frames(one)) is None and np.isnan(energy_figures(of_frames(one))["spearman"])


@pytest.mark.parametrize("of", [of_frames, of_pairs])
def test_intervals_hold_the_figures(of):
    residuals = of(predictions())
    figures, intervals = energy_figures(residuals), energy_intervals(residuals)
    assert set(intervals) == set(figures)
    for name, (low, high) in intervals.items():
        assert low <= figures[name] <= high, name


def test_intervals_of_frames_are_those_of_scipy():
    residuals = of_frames(predictions(frames=60))
    low, high = energy_intervals(residuals)["mae"]
    errors = np.abs(residuals.error) / residuals.atoms
    found = stats.bootstrap((errors,), np.mean, method="percentile", n_resamples=20_000, random_state=0)
    width = np.ptp(found.confidence_interval)
    assert (low, high) == pytest.approx(tuple(found.confidence_interval), abs=0.1 * width)


def test_coverages_of_frames_have_exact_intervals():
    """A bootstrap of ones alone would be sure of 1."""
    residuals = of_frames(predictions(frames=20, size=1e-3))
    assert energy_figures(residuals)["coverage95"] == 1.0
    assert energy_intervals(residuals)["coverage95"] == pytest.approx((0.025 ** (1 / 20), 1.0))


def test_figures_of_z():
    residuals = of_frames(predictions(frames=60))
    z, values = residuals.error / residuals.std, energy_figures(residuals)
    assert values["z_mean"] == pytest.approx(z.mean()) and values["z_rms"] == pytest.approx(np.sqrt((z**2).mean()))
    assert values["beyond3"] == (np.abs(z) > 3.0).mean()
    assert "z_mean" not in energy_figures(of_pairs(predictions()))  # a pair may as well be the other way round


def test_pairs_are_no_independent_witnesses():
    """n frames say less than n (n - 1)/2 independent differences would."""
    residuals = of_pairs(predictions(frames=40, compositions=("HHO",)))
    low, high = energy_intervals(residuals)["mae"]
    independent = np.abs(residuals.error).std() / np.sqrt(len(residuals.error))
    assert high - low > 2.0 * (2.0 * 1.96 * independent)


def test_three_frames_have_intervals():
    """Some of their resamples hold one frame only, and no pair."""
    intervals = energy_intervals(of_pairs(predictions(frames=3, compositions=("HHO",))))
    assert all(np.isfinite(ends).all() for ends in intervals.values())


def test_model_that_is_right_is_calibrated():
    p = predictions(frames=1)
    figures = []
    for seed in range(60):
        p = predictions(frames=30, seed=seed)
        figures.append([energy_figures(of(p))["coverage95"] for of in (of_frames, of_pairs)])
    np.testing.assert_allclose(np.mean(figures, axis=0), 0.95, atol=0.025)
    wrong = energy_figures(of_frames(predictions(frames=200, size=10.0)))
    assert wrong["coverage95"] < 0.8


def test_weighted_spearman_is_that_of_repeated_values():
    rng = np.random.default_rng(0)
    a, b = rng.integers(5, size=30).astype(float), rng.normal(size=30)
    weights = rng.integers(4, size=(3, 30))
    for found, w in zip(weighted_spearman(a, b, weights.astype(float)), weights, strict=True):
        assert found == pytest.approx(stats.spearmanr(np.repeat(a, w), np.repeat(b, w)).statistic)
    assert np.isnan(weighted_spearman(np.ones(30), b, weights.astype(float))).all()


def test_energies_of_another_reference_are_told():
    p = predictions()
    assert reference_doubt(p) is None
    p.reference_energy[:] += 13.6 * p.sizes
    assert "differ from the predicted ones by 13.6 eV per atom" in reference_doubt(p)


def test_pairs_of_large_groups_are_decoded():
    """Numbers of pairs far above what float32 holds."""
    pairs, possible = energies._draw_pairs([np.arange(100_000)])
    assert possible == 100_000 * 99_999 // 2 and (pairs[:, 0] < pairs[:, 1]).all() and pairs.max() < 100_000
