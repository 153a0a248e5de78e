"""Figures over many atoms: worked out by hand, and a model's calibration, right or wrong, must show."""

import numpy as np
import pytest
import scoringrules
from scipy import stats

from e2ip_plugins.families.laws import Elliptical
from e2ip_plugins.scores import metrics


@pytest.fixture
def summary_of(law):
    """Function that gives the summary of errors from log Σ0, ν and κ."""
    return lambda error, *parameters: metrics.summarise(metrics.score_atoms(error, law(*parameters)))


def test_rotations_change_nothing(draw, law):
    error, log_sigma0, nu, kappa = draw(40)
    rotation = np.linalg.qr(np.random.default_rng(5).normal(size=(3, 3)))[0]
    xx, yy, zz, yz, xz, xy = log_sigma0.T
    L = np.array([[xx, xy, xz], [xy, yy, yz], [xz, yz, zz]]).transpose(2, 0, 1)
    L = rotation @ L @ rotation.T
    turned = np.stack([L[:, 0, 0], L[:, 1, 1], L[:, 2, 2], L[:, 1, 2], L[:, 0, 2], L[:, 0, 1]], axis=-1)
    a = metrics.score_atoms(error, law(log_sigma0, nu, kappa))
    b = metrics.score_atoms(error @ rotation.T, law(turned, nu, kappa))
    for name in ("nll", "pit", "energy_score", "epistemic_std", "total_std", "axis_pit"):
        np.testing.assert_allclose(a[name], b[name], rtol=1e-7, atol=1e-12)


def test_a_calibrated_model_is_seen_as_calibrated(draw, summary_of):
    n = 40_000
    summary = summary_of(*draw(n))
    assert summary["calibration_error"] < 0.006
    for p in metrics.COVERAGE_LEVELS:
        assert summary[f"coverage{round(100 * p)}"] == pytest.approx(p, abs=4.5 * np.sqrt(p * (1 - p) / n))
    for axis in ("minor", "middle", "major"):
        assert summary[f"axis_coverage95_{axis}"] == pytest.approx(0.95, abs=4.5 * np.sqrt(0.95 * 0.05 / n))
    assert summary["spearman_total"] > 0.6 and summary["auroc_total"] > 0.8


@pytest.mark.parametrize("inflate, confident", [(1.6, True), (0.6, False)])
def test_a_wrong_size_shows(draw, summary_of, inflate, confident):
    error, log_sigma0, nu, kappa = draw(20_000, inflate=inflate)
    summary = summary_of(error, log_sigma0, nu, kappa)
    assert summary["calibration_error"] > 0.1
    assert (summary["coverage95"] < 0.9) == confident
    # Both scores are proper: the right size beats the wrong one.
    right = log_sigma0 + 2 * np.log(inflate) * np.array([1, 1, 1, 0, 0, 0])
    best = summary_of(error, right, nu, kappa)
    assert summary["nll"] > best["nll"] and summary["energy_score"] > best["energy_score"]


def test_a_wrong_direction_shows_along_the_axes(draw, law):
    """Major and minor axis exchanged: size and determinant are right, the direction is not."""
    error, log_sigma0, nu, kappa = draw(20_000, nu=40.0)
    p = law(log_sigma0, nu, kappa)
    wrong = Elliptical(p.log_scale, p.axes[:, :, ::-1], p.dof, p.epistemic_share)
    right_summary = metrics.summarise(metrics.score_atoms(error, p))
    summary = metrics.summarise(metrics.score_atoms(error, wrong))
    for axis in ("minor", "middle", "major"):
        assert right_summary[f"z_rms_{axis}"] == pytest.approx(1.0, abs=0.03)
    assert summary["z_rms_minor"] > 1.5 and summary["z_rms_major"] < 0.8
    # Those of an isotropic covariance are none.
    round_ones = np.arange(len(error)) < 10_000
    log_sigma0[round_ones] = [-4.0, -4.0, -4.0, 0.0, 0.0, 0.0]
    scores = metrics.score_atoms(error, law(log_sigma0, nu, kappa))
    assert np.array_equal(scores["directed"], ~round_ones)
    assert metrics.summarise(scores)["z_rms_minor"] == pytest.approx(1.0, abs=0.03)
    some = metrics.summarise({name: values[round_ones] for name, values in scores.items()})
    assert some["z_rms_minor"] is None and some["axis_coverage95_major"] is None and some["coverage95"] > 0.0


def test_every_figure_is_that_of_others(draw, law):
    """Every figure of the summary, a new one too, against SciPy, scoringrules or a count of atoms, one by one."""
    n = 60
    error, log_sigma0, nu, kappa = draw(n, seed=7, inflate=1.3)
    leverage = np.random.default_rng(8).random(n)
    p = law(log_sigma0, nu, kappa)
    summary = metrics.summarise(metrics.score_atoms(error, p, leverage))

    m = nu - 2.0
    covariance = p.covariance()  # that of the outputs' keys: tests/core/families/test_laws.py
    scale = covariance * ((m - 2.0) / m)[:, None, None]
    norm = np.sqrt(np.square(error).sum(1))
    std = {"epistemic": np.sqrt(np.trace(covariance, axis1=1, axis2=2) / 3 / (1 + kappa))}
    std["total"] = np.sqrt(np.trace(covariance, axis1=1, axis2=2) / 3)
    distance = np.array([e @ np.linalg.solve(s, e) for e, s in zip(error, scale, strict=True)])
    pit = np.array([stats.f.cdf(d / 3, 3, df) for d, df in zip(distance, m, strict=True)])
    logpdf = [stats.multivariate_t.logpdf(e, shape=s, df=df) for e, s, df in zip(error, scale, m, strict=True)]
    along = np.stack([np.linalg.eigh(s)[1].T @ e for e, s in zip(error, scale, strict=True)])
    widths = np.sqrt(np.linalg.eigvalsh(scale))
    axis_pit = 2.0 * stats.t.cdf(np.abs(along / widths), m[:, None]) - 1.0
    rng = np.random.default_rng(9)
    sample = stats.multivariate_t.rvs
    ensembles = [sample(shape=s, df=df, size=5000, random_state=rng) for s, df in zip(scale, m, strict=True)]

    worst = norm > np.sort(norm)[-7]  # six of sixty
    pairs = {kind: [(a > b) + 0.5 * (a == b) for a in u[worst] for b in u[~worst]] for kind, u in std.items()}

    def curve(order):
        return np.array([norm[order[: n - i]].mean() / norm.mean() for i in range(n)])

    expected = {
        "force_mae": np.mean([abs(x) for e in error for x in e]),
        "force_rmse": np.sqrt(np.mean([x * x for e in error for x in e])),
        "leverage": sum(leverage) / n,
        "nll": -np.mean(logpdf),
        "calibration_error": np.mean([abs(np.mean(pit <= k / 100) - k / 100) for k in range(1, 100)]),
        **{f"coverage{k}": np.count_nonzero(pit <= k / 100) / n for k in (50, 80, 90, 95)},
        "energy_score_error": 0.0,
        **{f"spearman_{kind}": stats.spearmanr(u, norm).statistic for kind, u in std.items()},
        **{f"auroc_{kind}": np.mean(found) for kind, found in pairs.items()},
        **{f"ause_{kind}": np.mean(curve(np.argsort(u)) - curve(np.argsort(norm))) for kind, u in std.items()},
        "epistemic_std": std["epistemic"].mean(),
        "total_std": std["total"].mean(),
    }
    for i, axis in enumerate(("minor", "middle", "major")):
        expected[f"z_rms_{axis}"] = np.sqrt(np.mean(np.square(along / widths)[:, i] * (m - 2.0) / m))
        expected[f"axis_coverage95_{axis}"] = np.count_nonzero(axis_pit[:, i] <= 0.95) / n
    scored = scoringrules.es_ensemble(error, np.stack(ensembles), estimator="akr", backend="numpy")
    assert summary.pop("energy_score") == pytest.approx(scored.mean(), rel=0.01)
    assert set(summary) == set(expected)
    for name, value in expected.items():
        assert summary[name] == pytest.approx(value, rel=1e-8), name


def test_sampling_error_of_the_mean_is_that_of_independent_atoms(draw, law):
    scores = metrics.score_atoms(*draw(4)[:1], law(*draw(4)[1:]))
    scores["energy_score_error"] = np.array([3.0, 0.0, 4.0, 12.0])
    assert metrics.summarise(scores)["energy_score_error"] == pytest.approx(13.0 / 4.0)


def test_coverages_by_hand():
    """All PITs 0: everything is always inside, |1 - p| averages to 0.5. Half 0, half 1: |0.5 - p|."""
    pit = np.array([[0.2, 0.2, 0.9], [1.0, 0.5, 0.1]])
    coverage = metrics.observed_coverage(pit, np.array([0.1, 0.19, 0.2, 0.95]))
    np.testing.assert_allclose(coverage, [1 / 6, 1 / 6, 0.5, 5 / 6])
    assert metrics.calibration_error(np.zeros(10)) == pytest.approx(0.5)
    assert metrics.calibration_error(np.repeat([0.0, 1.0], 5)) == pytest.approx(24.5 / 99)


def test_spearman_with_ties_and_undefined():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 9, 50).astype(float), rng.normal(size=50)
    assert metrics.spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic, rel=1e-12)
    assert np.isnan(metrics.spearman(np.ones(5), b[:5])) and np.isnan(metrics.spearman(a[:1], b[:1]))


def test_auroc_by_hand():
    error = np.arange(10.0)  # the largest one is the worst 10 %
    assert metrics.auroc_worst(error, error) == 1.0
    assert metrics.auroc_worst(-error, error) == 0.0
    assert np.isnan(metrics.auroc_worst(np.ones(10), error))  # ranks nothing
    shuffled = np.array([9.0, 1, 2, 3, 4, 5, 6, 7, 8, 7.5])  # above 7 of the 9 others
    assert metrics.auroc_worst(shuffled, error) == pytest.approx(7 / 9)
    assert np.isnan(metrics.auroc_worst(np.ones(10), np.ones(10)))


def test_auroc_counts_pairs():
    rng = np.random.default_rng(3)
    a, b = rng.integers(0, 8, 30).astype(float), rng.integers(-2, 6, 45).astype(float)
    a[:2], a[2:4], b[:1], b[1:3] = np.inf, np.nan, np.inf, np.nan
    pairs = [(x > y) + 0.5 * (x == y) for x in a[~np.isnan(a)] for y in b[~np.isnan(b)]]
    assert len(pairs) == 28 * 43
    assert metrics.auroc(a, b) == pytest.approx(np.mean(pairs), rel=1e-12)
    assert np.isnan(metrics.auroc(a, b[1:3])) and np.isnan(metrics.auroc(a[:0], b))


def test_frame_scores_by_hand():
    sizes = np.array([2, 1, 3, 1])
    leverage = np.array([1.0, 3.0, np.nan, 2.0, np.nan, 6.0, np.inf])
    std = np.array([0.1, 0.3, 0.2, 0.5, 0.4, 0.6, 0.7])
    scores = metrics.frame_scores(sizes, leverage, std)
    np.testing.assert_allclose(scores["mean_leverage"], [2.0, np.nan, 4.0, np.inf])
    np.testing.assert_allclose(scores["max_epistemic_std"], [0.3, 0.2, 0.6, 0.7])
    np.testing.assert_allclose(scores["mean_epistemic_std"], [0.2, 0.2, 0.5, 0.7])
    std[2] = np.nan
    np.testing.assert_allclose(metrics.frame_scores(sizes, None, std)["max_epistemic_std"], [0.3, np.nan, 0.6, 0.7])
    nothing = metrics.frame_scores(sizes, None, None)
    assert set(nothing) == set(scores) and all(np.isnan(v).all() and v.shape == (4,) for v in nothing.values())


def test_mean_leverage_is_of_finite_ones():
    error = np.ones((4, 3))
    leverage = np.array([1.0, np.nan, 4.0, np.inf])
    assert metrics.summarise(metrics.score_atoms(error, leverage=leverage))["leverage"] == pytest.approx(2.5)
    assert np.isnan(metrics.summarise(metrics.score_atoms(error, leverage=np.full(4, np.nan)))["leverage"])
    assert metrics.summarise(metrics.score_atoms(error))["leverage"] is None


def test_sparsification_without_errors():
    """Forces of perfect crystals vanish, predicted or not."""
    assert metrics.ause(np.arange(3.0), np.zeros(3)) == 0.0


def test_ause_by_hand():
    """Errors 4 3 2 1 (mean 2.5). Dropped in order: means 2.5, 2, 1.5, 1; in reverse order: 2.5, 3, 3.5, 4."""
    error = np.array([4.0, 3.0, 2.0, 1.0])
    assert metrics.ause(error, error) == 0.0
    assert metrics.ause(-error, error) == pytest.approx((0 + 1 + 2 + 3) / 4 / 2.5)
    np.testing.assert_allclose(metrics.sparsification(error, error) * 2.5, [2.5, 2.0, 1.5, 1.0])


def test_ties_do_not_count_in_the_order_of_the_file():
    """The two of the higher rank count 3 each, their mean: (1 + 3) / 2 is left after one of them is dropped."""
    ranking, error = np.array([2.0, 2.0, 1.0]), np.array([5.0, 1.0, 1.0])
    for order in ([0, 1, 2], [1, 0, 2], [2, 1, 0]):
        found = metrics.sparsification(ranking[order], error[order]) * 7 / 3
        np.testing.assert_allclose(found, [7 / 3, 2.0, 1.0])
    assert np.isnan(metrics.ause(np.ones(3), error))


def test_without_distribution_nothing_is_invented(draw, law):
    error = np.array([[3.0, 0.0, 0.0], [0.0, -1.0, 2.0]])
    summary = metrics.summarise(metrics.score_atoms(error))
    assert summary["force_mae"] == pytest.approx(1.0) and summary["force_rmse"] == pytest.approx(np.sqrt(14 / 6))
    assert {k for k, v in summary.items() if v is not None} == {"force_mae", "force_rmse"}
    full = metrics.summarise(metrics.score_atoms(error, law(*draw(2)[1:])))
    assert set(full) == set(summary)
