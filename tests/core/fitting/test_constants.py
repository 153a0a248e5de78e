"""Constants of the leverage, from the errors of validation configurations."""

import copy
import math
import warnings

import numpy as np
import pytest
import torch
from readout_alone import (
    WIDTHS,
    check_same,
    drawn,
    fit_frames,
    law_of_readout,
    make_frames,
    make_readout,
    run,
    training_of,
    validation_of,
    with_constants,
)

from e2ip_plugins.families.e2ip import E2IP
from e2ip_plugins.fitting.fit import fit_leverage
from e2ip_plugins.fitting.force_errors import ForceErrors
from e2ip_plugins.fitting.sample import training_subset


@pytest.mark.parametrize(("growth", "log_scale"), [(2.5, 0.3), (1.2, -0.5)])
def test_constants_that_made_the_errors_are_found_again(training, growth, log_scale):
    readout = make_readout()
    fit_frames(readout, training, make_frames(5, seed=1))
    validation = drawn(readout, make_frames(900, seed=2, width=WIDTHS), growth, log_scale)
    report = fit_frames(readout, training, validation)
    result = report.constants[0]
    low, high = result.growth_interval
    error = 0.5 * math.log(high / low)
    assert error < 0.6 * 0.6, "what was drawn says more than the prior"
    assert abs(math.log(result.growth / growth)) < 2.5 * error
    assert 0.01 < result.log_scale_error < 0.2 and abs(result.log_scale - log_scale) < 2.5 * result.log_scale_error
    assert (result.configurations, result.atoms) == (900, 4500) and result.nll[1] < result.nll[0]
    assert readout.leverage.growth.tolist() == [result.growth]
    assert readout.leverage.log_factor.tolist() == [result.log_scale] * 2 and readout.leverage.fitted


def test_constants_are_the_mode_of_the_posterior_in_which_atoms_count_like_so_many_frames(training):
    """Frames of different size, few of them: prior and likelihood both matter."""
    readout = make_readout()
    fit_frames(readout, training, make_frames(5, seed=1))
    frames = [f for n in (1, 3, 6) for f in make_frames(10, n, seed=n, width=[0.1, 3.0] * 5)]
    validation = drawn(readout, frames, 0.5, 0.7)
    result = fit_frames(readout, training, validation).constants[0]
    residual = torch.cat([frame.residual for frame in validation]).numpy()

    def posterior(constants):
        """From what the readout predicts with these constants; 100 atoms of 30 frames count like 100²/460 frames."""
        law, _ = law_of_readout(with_constants(readout, math.exp(constants[0]), constants[1]), validation)
        prior = 0.5 * ((constants[0] - math.log(2.5)) / 0.6) ** 2
        return 100**2 / 460 * law.negative_log_likelihood(residual).mean() + prior

    mode, step = np.array([math.log(result.growth), result.log_scale]), 0.05
    at_the_mode = posterior(mode)
    for direction in np.array([[1, 0], [0, 1], [1, 1], [1, -1]]):
        above, below = (posterior(mode + sign * step * direction) for sign in (1, -1))
        curvature = above + below - 2.0 * at_the_mode
        assert curvature > 0 and step * abs(above - below) / (2.0 * curvature) < 2e-3, "how far off the minimum is"
    prior = 0.5 * ((mode[0] - math.log(2.5)) / 0.6) ** 2
    assert 100**2 / 460 * result.nll[1] + prior == pytest.approx(at_the_mode, abs=1e-6)
    assert 0.5 < result.growth < 2.5, "between what is true and what was expected"
    law, _ = law_of_readout(make_readout(), validation)
    assert result.nll[0] == pytest.approx(law.negative_log_likelihood(residual).mean(), rel=1e-9)


def test_frames_like_the_training_set_leave_the_growth_where_it_was_expected(training):
    readout = make_readout()
    fit_frames(readout, training, make_frames(5, seed=1))
    validation = drawn(readout, make_frames(10, seed=2), 0.3, 0.0)
    result = fit_frames(readout, training, validation).constants[0]
    assert abs(math.log(result.growth / 2.5)) < 0.6


def test_standard_errors_are_those_of_resampled_configurations(training):
    readout = make_readout()
    fit_frames(readout, training, make_frames(5, seed=1))
    validation = drawn(readout, make_frames(60, 4, seed=2, width=WIDTHS[::15]), 2.5, 0.2)
    few = training[:20]
    result = fit_frames(readout, few, validation, size=60).constants[0]
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(40):
        chosen = [validation[i] for i in rng.integers(0, 60, 60)]
        constants = fit_frames(readout, few, chosen, size=60).constants[0]
        samples.append([math.log(constants.growth), constants.log_scale])
    growth, scale = np.std(samples, axis=0)
    low, high = result.growth_interval
    # Resampled frames do not resample the prior: what it adds is on top.
    assert 0.7 * growth < 0.5 * math.log(high / low) < 2.0 * growth + 0.3 * 0.6
    assert 0.6 * scale < result.log_scale_error < 1.7 * scale


@pytest.mark.parametrize("factor, constant", [(1.0, False), (0.5, False), (2.0, False), (0.5, True)])
def test_optimism_is_by_how_much_errors_are_smaller_on_training_configurations(training, factor, constant):
    """In units of what the model says of both: their leverages differ, too. Never less than nothing."""
    readout, plain = make_readout(constant=constant), make_readout(constant=constant)
    validation = make_frames(100, seed=1)
    fit_frames(readout, training, validation, constant_readout=constant)
    known, validation = drawn(readout, training * 2, 2.0, 0.3, seed=1), drawn(readout, validation, 2.0, 0.3, seed=2)
    known = [frame._replace(residual=factor * frame.residual) for frame in known]
    result, none = (
        fit_frames(one, training, validation, constant_readout=constant, training_errors=known).constants[0]
        for one, known in ((readout, validation_of(readout, known)), (plain, ()))
    )
    expected = max(0.0, -2.0 * math.log(factor))
    assert result.optimism == pytest.approx(expected, abs=3.0 * result.optimism_error) and result.optimism_error < 0.15
    assert readout.leverage.surplus.item() == pytest.approx(math.tanh(1.5 * result.optimism))
    assert none.optimism == plain.leverage.surplus.item() == 0.0
    # All of it is for what is strange; where atoms are as in training, the rest is fitted with it in mind.
    without = copy.deepcopy(readout)
    without.leverage.surplus.zero_()
    strange, usual = (
        [E2IP.log_variance(run(one, frames)[0]) for one in (readout, other)]
        for frames, other in ((make_frames(5, seed=3, width=20.0), without), (training, plain))
    )
    torch.testing.assert_close(strange[0] - strange[1], torch.full_like(strange[0], result.surplus), rtol=1e-2, atol=0)
    assert usual[0].mean().item() == pytest.approx(usual[1].mean().item(), abs=0.1)


@pytest.mark.parametrize("constant", [False, True])
def test_relative_error_is_of_validation_errors_and_their_forces(training, constant):
    """Predicted forces that are errors times 31, the other way: reference forces are then 30 times the errors."""
    readout, validation = make_readout(constant=constant), make_frames(60, seed=1)
    errors = (ForceErrors(e.residual, e.frames, -31.0 * e.residual) for e in validation_of(readout, validation))
    fit_leverage(readout, training_of(readout, training), errors, constant_readout=constant)
    assert readout.leverage.surplus.item() == pytest.approx(math.log(0.05 * 30.0))


def test_few_configurations_say_little_of_the_optimism(training):
    readout = make_readout()
    fit_frames(readout, training, make_frames(30, seed=1))
    result = {}
    for count in (2, 200):
        known, validation = (drawn(readout, make_frames(count, seed=s), 2.5, 0.0, seed=s) for s in (4, 5))
        known = [frame._replace(residual=0.5 * frame.residual) for frame in known]
        result[count] = fit_frames(
            readout, training, validation, training_errors=validation_of(readout, known)
        ).constants[0]
    assert result[2].optimism < 0.7 * result[200].optimism and result[2].optimism_error > 0.15


def test_training_configurations_without_forces_tell_no_optimism(training):
    readout, validation = make_readout(), make_frames(12, seed=1)
    bare = [frame._replace(residual=torch.full_like(frame.residual, math.nan)) for frame in training]
    exact = [frame._replace(residual=torch.zeros_like(frame.residual)) for frame in training]
    for known in (bare, exact):
        report = fit_frames(readout, training, validation, training_errors=validation_of(readout, known))
        assert report.constants[0].optimism == 0.0 and len(report.lines()) == 2


@pytest.mark.parametrize("sizes, chosen", [((3, 50), 3), ((450, 50), 225), ((1000, 50), 200), ((10, 0), 1)])
def test_training_configurations_to_compare_with(sizes, chosen):
    result = training_subset(*sizes)
    assert len(result) == chosen and result[0] == 0 and result[-1] < sizes[0]


def test_a_single_configuration_is_enough_for_finite_errors(training):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = fit_frames(make_readout(), training, make_frames(1, seed=3))
    result = report.constants[0]
    assert result.configurations == 1
    assert report.warnings[0].startswith("1 validation configuration can hardly tell")
    assert np.isfinite([result.growth, *result.growth_interval, result.log_scale, result.log_scale_error]).all()
    assert result.growth_interval[0] < result.growth < result.growth_interval[1] and result.log_scale_error > 0


def nearly(frames, number):
    """So many that err alike, but are no copies."""
    return [frame._replace(residual=(1.0 + 0.003 * i) * frame.residual) for i in range(number) for frame in frames]


def test_copies_of_a_configuration_count_once(training):
    """To the precision of a network that computes them in other batches; with other errors they are others."""
    readout, frames = make_readout(), make_frames(12, seed=3)
    rng = np.random.default_rng(0)
    noise = [frame.residual + torch.from_numpy(rng.normal(scale=1e-6, size=(5, 3))) for frame in frames[:4]]
    copies = [frame._replace(residual=result) for frame, result in zip(frames, noise, strict=False)]
    once, again = (fit_frames(readout, training, result) for result in (frames, [*copies, *frames, *copies]))
    assert again.constants[0].configurations == once.constants[0].configurations == 12
    for name in ("growth", "log_scale", "log_scale_error"):
        assert getattr(again.constants[0], name) == pytest.approx(getattr(once.constants[0], name), rel=1e-3)
    assert "8 validation configurations are there more than once, and count once" in again.warnings
    assert not [text for text in once.warnings if "more than once" in text]
    assert fit_frames(readout, training, nearly(frames, 2)).constants[0].configurations == 24


def test_training_atoms_may_be_left_out(training):
    readout, other = make_readout(), make_readout()
    expected = fit_frames(readout, training, make_frames(12, seed=1))
    strange = [frame._replace(x=frame.x + 7.0) for frame in make_frames(5, seed=2)]
    counted = training_of(other, [*training, *strange], counted=lambda frame: any(frame is own for own in training))
    result = fit_leverage(other, counted, validation_of(other, make_frames(12, seed=1)))
    assert result.atoms == expected.atoms
    check_same(other, readout)


def test_few_configurations_that_happen_to_agree_are_not_taken_for_many(training):
    readout, frames = make_readout(), make_frames(40, seed=3)
    many, one = (fit_frames(readout, training, frames[:n]).constants[0].log_scale_error for n in (40, 1))
    twins = fit_frames(readout, training, nearly([frames[0]], 2)).constants[0].log_scale_error
    # Independent atoms of two configurations of five, at least.
    assert twins > one / math.sqrt(10.5) > many


def test_two_configurations_that_differ_are_known_worse_than_by_their_number(training):
    """Ten copies of each have a tenth of the variance; of two, a standard error is that of Student's t besides."""
    readout = make_readout()
    small, large = make_frames(2, seed=3)
    pair = [small._replace(residual=0.2 * small.residual), large._replace(residual=5.0 * large.residual)]
    two, twenty = (fit_frames(readout, training, nearly(pair, n)).constants[0].log_scale_error for n in (1, 10))
    student = 1.837 / 1.027  # at 84.13 %, with 1 and 19 degrees of freedom
    assert two / twenty == pytest.approx(math.sqrt(19.0) * student, rel=0.15)


def test_atoms_without_finite_reference_forces_are_left_out(training):
    validation = make_frames(12, seed=1)
    partly = [frame._replace(residual=frame.residual.clone()) for frame in validation]
    for i, frame in enumerate(partly):
        frame.residual[i % 5, i % 3] = [float("nan"), float("inf")][i % 2]
    partly[3].residual.fill_(float("nan"))
    result = fit_frames(make_readout(), training, partly).constants[0]
    assert (result.configurations, result.atoms) == (11, 44)
    assert math.isfinite(result.growth) and math.isfinite(result.log_scale)


def test_references_in_other_units_are_told(training):
    """Which `fit_leverage` can see where it is given the predicted forces."""

    def warnings_of(factor):
        def validation(readout):
            rng = np.random.default_rng(0)
            for i, frame in enumerate(make_frames(12, seed=1)):
                run(readout, [frame])
                forces = torch.from_numpy(rng.normal(size=frame.residual.shape))
                reference = factor * (forces + frame.residual)
                yield ForceErrors(reference - forces, torch.full((len(forces),), i), forces)

        readout = make_readout()
        report = fit_leverage(readout, training_of(readout, training, 1), validation(readout))
        return [text for text in report.warnings if "the reference forces" in text]

    assert warnings_of(1.0) == []
    (text,) = warnings_of(23.06)
    assert text.startswith("validation set: the reference forces are 23") and "kcal/mol/Å" in text


def test_constant_readouts_get_a_scale_for_every_species_and_tails(training):
    """Errors of a stock model: one species ten times worse, heavy tails, growing with the distance."""
    readout = make_readout(constant=True)
    assert fit_frames(readout, training, make_frames(5, seed=1), constant_readout=True)
    frames = make_frames(300, seed=2, width=WIDTHS[:600:2])
    kinds = torch.cat([frame.species for frame in frames])
    outputs, number = run(readout, frames)
    leverage, rng, growth = outputs["e2ip_leverage"], np.random.default_rng(0), 1.6
    mean = torch.empty_like(leverage)
    for i in range(300):
        average = torch.linalg.matrix_power((0.5 * torch.eye(5) + 0.5) / 3.0, 3)
        mean[number == i] = average @ leverage[number == i]
    d = leverage + mean
    reach = d * ((1 + (d / 40) ** 2) / (1 + (d / 5) ** 2)) ** 0.25
    sigma = np.array([0.03, 0.3])[kinds] * ((1 + growth * reach) / (1 + growth * 2 * (1.0025 / 1.16) ** 0.25)).numpy()
    t = rng.normal(size=(1500, 3)) / np.sqrt(rng.chisquare(8.0, size=(1500, 1)) / 8.0)
    errors = torch.from_numpy(sigma[:, None] * t)
    validation = [frame._replace(residual=errors[number == i]) for i, frame in enumerate(frames)]
    report = fit_frames(readout, training, validation, constant_readout=True)
    result = report.constants[0]
    for name, expected in (("species 0", 0.03), ("species 1", 0.3)):
        assert report.species_std[0][name] == pytest.approx(expected * math.sqrt(8.0 / 6.0), rel=0.1)
    low, high = result.growth_interval
    assert abs(math.log(result.growth / growth)) < 3.0 * 0.5 * math.log(high / low)
    # Scale of the Student-t at leverage 1, from the trunk, the law and the constants of the readout.
    scale = readout.leverage.log_factor + readout.leverage.log_variance
    outputs, _ = run(readout, frames)
    nu = outputs["e2ip_nu"]
    near = nu.max()
    assert 6.0 < near < 16.0, "8 degrees of freedom, on a coarse grid"
    fitted = torch.exp(0.5 * (scale + torch.log(near / (near - 2)))).numpy()
    np.testing.assert_allclose(fitted, [0.03, 0.3], rtol=0.1)
    assert result.nll[1] < result.nll[0] - 0.1
    # Calibrated: the share of errors within the 90 % ellipsoids.
    law, _ = law_of_readout(readout, frames)
    assert (law.pit(errors.numpy()) < 0.9).mean() == pytest.approx(0.9, abs=0.03)


def test_a_species_without_validation_atoms_gets_the_mean_scale(training):
    readout = make_readout(constant=True)
    fit_frames(readout, training, make_frames(20, seed=1, species=(0,)), constant_readout=True)
    assert readout.leverage.log_factor[0] == readout.leverage.log_factor[1] != 0.0
