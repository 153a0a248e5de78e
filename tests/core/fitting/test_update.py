"""Constants anew, without the training set."""

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch
from ase import Atoms
from readout_alone import (
    WIDTHS,
    drawn,
    fit_frames,
    law_of_readout,
    make_frames,
    make_readout,
    training_of,
    validation_of,
)

from e2ip_plugins.errors import InputError
from e2ip_plugins.fitting.constants import FittedConstants
from e2ip_plugins.fitting.fit import check_update, fit_leverage
from e2ip_plugins.fitting.report import FitReport
from e2ip_plugins.predictions.labelled import Label, LabelledFrame

#: What training atoms alone tell.
OF_TRAINING = (
    "centres",
    "whitening",
    "axes",
    "region_stretch",
    "region_offsets",
    "region_norms",
    "log_variance",
    "surplus",
)


def update(readout, frames, **settings):
    return fit_leverage(readout, None, validation_of(readout, frames), **settings)


def fitted(training, constant):
    """A fitted readout of a network that is overfitted to its training set."""
    readout = make_readout(constant=constant)
    by_heart = [frame._replace(residual=0.5 * frame.residual) for frame in make_frames(40)]
    errors, validation = validation_of(readout, by_heart), validation_of(readout, make_frames(60, seed=1))
    fit_leverage(readout, training_of(readout, training), validation, constant_readout=constant, training_errors=errors)
    assert readout.leverage.surplus.item() > 0.1
    return readout


@pytest.mark.parametrize("constant", [False, True])
def test_new_constants_keep_what_training_atoms_tell(training, constant):
    """And the weights; standard deviations follow errors that are three times as large."""
    readout = fitted(training, constant)
    before = copy.deepcopy(readout)
    frames = make_frames(40, seed=1)
    report = update(readout, [f._replace(residual=3.0 * f.residual) for f in frames], constant_readout=constant)
    assert report.atoms == {} and report.constants[0].configurations == 40 and readout.leverage.fitted
    for name in OF_TRAINING:
        assert torch.equal(getattr(readout.leverage, name), getattr(before.leverage, name)), name
    assert all(torch.equal(a, b) for a, b in zip(readout.parameters(), before.parameters(), strict=True))
    std, old = (law_of_readout(each, frames)[0].total_std() for each in (readout, before))
    assert np.median(std / old) == pytest.approx(3.0, rel=0.1)
    assert "validation configurations are the new frames" in report.lines()[0]
    assert "NLL of 40 new configurations in nats per atom, lower is better: " in report.lines()[1]
    assert "before the update" in report.lines()[1]
    residual = 3.0 * torch.cat([frame.residual for frame in frames]).numpy()
    expected = law_of_readout(before, frames)[0].negative_log_likelihood(residual).mean()
    assert report.constants[0].nll[0] == pytest.approx(expected, rel=1e-5)


def test_new_constants_find_a_faster_growth(training):
    readout = fitted(training, constant=False)
    log_scale = readout.leverage.log_factor[0].item()
    # The growth before is a twelfth of it: more frames than elsewhere outweigh that.
    widths = np.repeat(WIDTHS, 2)
    frames = drawn(readout, make_frames(len(widths), seed=3, width=widths), 6.0, log_scale)
    report = update(readout, frames)
    low, high = report.constants[0].growth_interval
    assert low < 6.0 * 1.2 and high > 6.0 / 1.2 and report.constants[0].growth > 1.5 * 2.5


def test_few_atoms_of_a_species_change_as_the_others_do(training):
    readout = make_readout(constant=True)
    fit_frames(readout, training, make_frames(60, seed=1), constant_readout=True)
    before = readout.leverage.log_factor.clone()
    new = [f._replace(residual=2.0 * f.residual) for f in make_frames(30, seed=1, species=(0,))]
    update(readout, new, constant_readout=True)
    change = readout.leverage.log_factor - before
    assert change[0].item() == pytest.approx(2.0 * math.log(2.0), abs=0.2)
    assert change[1].item() == pytest.approx(change[0].item(), abs=1e-6)
    # A single atom with a wild error hardly moves its species; alone it would by ln 900.
    readout.leverage.log_factor.copy_(before)
    wild = make_frames(1, seed=5)[0]
    residual = torch.where((wild.species == 1)[:, None], 30.0 * wild.residual, 2.0 * wild.residual)
    update(readout, [*new, wild._replace(residual=residual)], constant_readout=True)
    change = readout.leverage.log_factor - before
    assert 0.0 < change[1] - change[0] < 1.5


def test_constants_of_other_heads_stay(training):
    readout = make_readout(num_heads=2)
    second = make_frames(40, seed=4, head=1)
    fit_frames(readout, [*training, *second], [*make_frames(20, seed=1), *make_frames(20, seed=2, head=1)])
    before = copy.deepcopy(readout.leverage)
    update(readout, [f._replace(residual=3.0 * f.residual) for f in make_frames(20, seed=3, head=1)])
    after = readout.leverage
    assert torch.equal(after.growth[:1], before.growth[:1]) and torch.equal(after.log_factor[:2], before.log_factor[:2])
    assert (after.log_factor[2:] > before.log_factor[2:] + 1.0).all()


def test_what_cannot_be_updated(training, toy_family):
    frames = [LabelledFrame(Atoms("H"), f"new.xyz, frame {i}", Label(np.zeros((1, 3)))) for i in range(10)]
    readout = make_readout()
    check_update(readout, frames, "my.model")
    without = [*frames[:9], frames[9]._replace(forces=None)]
    with pytest.raises(InputError, match="--frames: 9 frames with reference forces; an update needs 10, and 20 to 50"):
        check_update(readout, without, "my.model")
    with pytest.raises(InputError, match=r"my.model: the uncertainty of its readout 'mve' does not grow"):
        check_update(make_readout("mve"), frames, "my.model")


def test_report_in_words():
    constants = FittedConstants(2.0, (1.5, 2.6666), -0.2, 0.1, (-4.5, -4.75), 30, 630)
    report = FitReport({(0, 0): 100, (0, 1): 50}, {}, {0: constants}, 5)
    assert report.lines() == [
        "leverage: features of 150 training atoms, 2 species in 5 regions",
        "leverage: growth 2 (1.5 to 2.7), standard deviation times 0.905 +- 0.045 at leverage 1; NLL of 30 "
        "validation configurations in nats per atom, lower is better: -4.500 without the leverage, -4.750 with it",
    ]
    report.species_std[0] = {"C": 0.12345, "H": 0.06}
    assert "at leverage 1 C 0.123, H 0.06 eV/Å, all together +- 5%; NLL of 30" in report.lines()[1]
    report.constants[1], report.heads = constants, ["a", "b"]
    assert "leverage (head b): growth" in report.lines()[2]
    report.heads = []
    report.constants = {0: dataclasses.replace(constants, optimism=2.0 * math.log(1.25), optimism_error=0.1)}
    assert report.lines()[2] == (
        "leverage: validation errors are 1.25 +- 0.062 times those of training atoms with the same error bar: those of "
        "unlike atoms grow more"
    )
    report.constants[0] = dataclasses.replace(constants, optimism=2.0 * math.log(1.004))
    assert len(report.lines()) == 2


def test_training_frames_that_the_model_was_not_trained_on_are_doubted():
    report = FitReport()
    report.warn_of_unlike(0, np.array([2.0, 2.4, 5.9, 80.0, 1e6]))
    assert not report.warnings
    report.warn_of_unlike(0, np.array([40.0, 52.0, 60.0]))
    (text,) = report.warnings
    assert text.startswith("half of the validation atoms have a leverage above 26, where training atoms have 1")
