"""The fit of the leverage, on a model that is nothing but a readout: its features are the data, its errors made up."""

import copy
import dataclasses
import itertools
import json
import math
import subprocess
import sys
import warnings
from typing import NamedTuple

import numpy as np
import pytest
import torch
from ase import Atoms

from e2ip_plugins.errors import InputError
from e2ip_plugins.families.e2ip import E2IP
from e2ip_plugins.families.laws import law_of
from e2ip_plugins.fitting import training_atoms
from e2ip_plugins.fitting.constants import FittedConstants
from e2ip_plugins.fitting.fit import check_update, fit_leverage
from e2ip_plugins.fitting.force_errors import ForceErrors
from e2ip_plugins.fitting.report import FitReport
from e2ip_plugins.fitting.sample import training_subset
from e2ip_plugins.fitting.training_atoms import TrainingBatch
from e2ip_plugins.leverage.form import FORM
from e2ip_plugins.leverage.module import Neighbours
from e2ip_plugins.predictions.labelled import Label, LabelledFrame
from e2ip_plugins.readout.layout import Layout
from e2ip_plugins.readout.readout import Readout
from e2ip_plugins.readout.settings import Settings

SIZE = 4
#: 0e, 1o and 2e channels of an atom's features
LAYOUT = Layout([(0, SIZE)], [(SIZE, 2)], [(SIZE + 6, 1)], num_species=2)
COLUMNS = SIZE + 11


class Frame(NamedTuple):
    """What the model makes of a configuration: features (n, 15), species (n,), force errors (n, 3), head."""

    x: torch.Tensor
    species: torch.Tensor
    residual: torch.Tensor
    head: int = 0


def make_readout(family="e2ip", num_heads=1, seed=1, constant=False, layout=LAYOUT):
    options = {"evidence": "leverage"} if family == "e2ip" else {}
    built = Readout(Settings.of(family, options, 0.05), layout, num_heads, seed)
    for trunk in built.trunks:
        if constant:
            trunk.make_constant()
        else:  # variances differ from atom to atom
            with torch.no_grad():
                trunk.out.weight.normal_(generator=torch.Generator().manual_seed(seed)).mul_(0.1)
    return built.requires_grad_(False)


def make_frames(count, atoms=5, seed=0, width=1.0, head=0, species=(0, 1)):
    """Gaussian features around another centre for each species; ``width`` may be one per frame."""
    rng = np.random.default_rng(seed)
    frames = []
    for factor in np.broadcast_to(width, count):
        kinds = np.resize(species, atoms)
        x = rng.normal(size=(atoms, COLUMNS)) * np.where(np.arange(COLUMNS) < SIZE, factor, 1.0)
        x[:, :SIZE] = x[:, :SIZE] * np.linspace(0.5, 2.0, SIZE) + 3.0 * kinds[:, None]
        frames.append(Frame(*map(torch.from_numpy, (x, kinds, rng.normal(scale=0.1, size=(atoms, 3)))), head))
    return frames


def run(readout, frames):
    """The model on a batch: atoms of a frame are all neighbours."""
    x, species = (torch.cat([getattr(frame, name) for frame in frames]) for name in ("x", "species"))
    number = torch.cat([torch.full((len(frame.x),), i) for i, frame in enumerate(frames)])
    heads = torch.cat([torch.full((len(frame.x),), frame.head) for frame in frames])
    pairs, start = [], 0
    for frame in frames:
        pairs += itertools.permutations(range(start, start + len(frame.x)), 2)
        start += len(frame.x)
    sender, receiver = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).t()
    ones = torch.ones(len(pairs))
    neighbours = Neighbours(ones, 0.5 * ones, sender, receiver)
    return readout(x, x, species, neighbours, None, heads), number


def batches(frames, size=7):
    return [frames[i : i + size] for i in range(0, len(frames), size)]


def training_of(readout, frames, size=7, counted=None, first=0):
    """A pass over training frames, the first of which has the number ``first`` in the training set."""
    for batch in batches(frames, size):
        _, number = run(readout, batch)
        mask = None if counted is None else torch.cat([torch.full((len(f.x),), counted(f)) for f in batch])
        yield TrainingBatch(first + number, mask)
        first += len(batch)


def validation_of(readout, frames, size=7, first=0):
    for batch in batches(frames, size):
        _, number = run(readout, batch)
        yield ForceErrors(torch.cat([frame.residual for frame in batch]), first + number)
        first += len(batch)


def fit_frames(readout, training, validation, size=7, **settings):
    """Fit, any number of frames in a batch."""
    return fit_leverage(
        readout, training_of(readout, training, size), validation_of(readout, validation, size), **settings
    )


def law_of_readout(readout, frames):
    """Law of the atoms of some frames, and the number of the frame of every atom."""
    outputs, number = run(readout, frames)
    return law_of(E2IP, {key.name: outputs[key.name].numpy() for key in E2IP.parameter_keys}), number


def with_constants(readout, growth, log_scale):
    """A copy of a fitted readout with other constants."""
    other = copy.deepcopy(readout)
    other.leverage.growth.fill_(growth)
    other.leverage.log_factor.fill_(log_scale)
    return other


def drawn(readout, frames, growth, log_scale, seed=0):
    """Frames whose errors follow the law of a fitted readout with other constants."""
    law, number = law_of_readout(with_constants(readout, growth, log_scale), frames)
    errors = torch.from_numpy(law.sample(np.random.default_rng(seed), 1)[0])
    return [frame._replace(residual=errors[number == i]) for i, frame in enumerate(frames)]


#: Of validation frames, narrower and wider ones than the training set's say how the errors grow: far out the standard
#: deviation goes like h whatever the growth is. So many that they outweigh the prior.
WIDTHS = np.geomspace(0.1, 3.0, 900)


@pytest.fixture(scope="module")
def training():
    return make_frames(60)


# Moments


def leverages(readout, frames):
    outputs, _ = run(readout, frames)
    return outputs["e2ip_leverage"]


def test_mean_over_training_atoms_is_one_for_every_species(training):
    readout = make_readout()
    report = fit_frames(readout, training, make_frames(10, seed=1))
    species = torch.cat([frame.species for frame in training])
    found = leverages(readout, training)
    for kind in (0, 1):
        assert found[species == kind].mean().item() == pytest.approx(1.0, abs=1e-6)
    assert report.atoms == {(0, 0): 180, (0, 1): 120} and report.warnings == []
    # Others of the same distribution are as far, others are not.
    assert leverages(readout, make_frames(200, seed=5)).mean().item() == pytest.approx(1.0, abs=0.1)
    assert leverages(readout, make_frames(20, seed=5, width=10.0)).mean() > 8.0


def psi(atoms, mean, axes, variances):
    """Σ_k ψ(z_k²)/2τ of atoms (n, D), from moments along axes: τ = 6, ridge 1e-5."""
    z = (atoms - mean) @ axes / np.sqrt(variances + 1e-5 * variances.mean())
    return (np.sqrt(1 + np.square(z) / 6.0) - 1).sum(-1)


def test_one_region_has_the_shrunk_moments_of_its_species():
    """With fewer than eight atoms per feature there is one region."""
    readout, frames = make_readout(), make_frames(10)
    report = fit_frames(readout, frames, make_frames(10, seed=1))
    x = np.concatenate([frame.x[:, :SIZE].numpy() for frame in frames])
    species = np.concatenate([frame.species.numpy() for frame in frames])
    own = [np.cov(x[species == kind].T, bias=True) for kind in (0, 1)]
    count = np.bincount(species)
    pool = (count[0] * own[0] + count[1] * own[1]) / count.sum()
    distances = []
    for kind in (0, 1):
        weight = SIZE / (SIZE + count[kind])
        assert report.shrinkage[0, kind] == pytest.approx(weight)
        values, axes = np.linalg.eigh((1 - weight) * own[kind] + weight * pool)
        distances.append(psi(x, x[species == kind].mean(0), axes, values))
    expected = np.choose(species, [distances[kind] / distances[kind][species == kind].mean() for kind in (0, 1)])
    # Kept in single precision.
    np.testing.assert_allclose(leverages(readout, frames), expected, rtol=1e-5)
    assert report.regions == 2 and readout.leverage.regions().tolist() == [1, 1]
    np.testing.assert_allclose(readout.leverage.centres[1], x[species == 1].mean(0), rtol=1e-6)
    log_variance = E2IP.log_variance(run(make_readout(), frames)[0]).numpy()
    typical = [log_variance[species == kind].mean() for kind in (0, 1)]
    np.testing.assert_allclose(readout.leverage.log_variance, typical, rtol=1e-12)


@pytest.mark.parametrize(("atoms", "regions"), [(31, 1), (32, 1), (63, 1), (64, 2), (95, 2), (96, 3), (1000, 16)])
def test_number_of_regions_follows_the_atoms_per_feature(atoms, regions):
    readout, (frame,) = make_readout(), make_frames(1, atoms, species=(0,))
    report = fit_leverage(
        readout, _alone(readout, frame.x, frame.species), validation_of(readout, make_frames(3, seed=1, species=(0,)))
    )
    assert report.regions == readout.leverage.regions()[0] == regions
    found = readout(frame.x, frame.x, frame.species)["e2ip_leverage"]
    assert found.mean().item() == pytest.approx(1.0, abs=1e-6)


def _alone(readout, x, species):
    """Atoms without neighbours, in one batch."""
    readout(x, x, species)
    yield TrainingBatch(torch.zeros(len(x), dtype=torch.long))


def test_no_more_regions_than_all_species_together_may_have():
    readout, (frame,) = make_readout(), make_frames(1, 1000)
    report = fit_leverage(
        readout,
        _alone(readout, frame.x, frame.species),
        validation_of(readout, make_frames(3, seed=1)),
        form=FORM._replace(max_regions=6),
    )
    assert readout.leverage.regions().tolist() == [3, 3] and report.regions == 6


def test_two_phases_are_two_regions_that_share_a_little():
    rng = np.random.default_rng(0)
    phase = np.arange(90) % 2
    means = np.array([[0.0, 0.0, 0.0, 0.0], [20.0, 0.0, 5.0, 0.0]])
    x = torch.from_numpy(rng.normal(size=(90, COLUMNS)))
    x[:, :SIZE] += torch.from_numpy(means[phase])
    zero = torch.zeros(90, dtype=torch.long)
    readout = make_readout()
    leverage = readout.leverage
    report = fit_leverage(
        readout, _alone(readout, x, zero), validation_of(readout, make_frames(3, seed=1, species=(0,)))
    )
    assert report.regions == 2
    features = x[:, :SIZE].numpy()
    # The only species is the pool.
    total = np.cov(features.T, bias=True)
    parts = [features[phase == i] for i in (0, 1)]
    within = sum(len(part) * np.cov(part.T, bias=True) for part in parts) / 90
    _, axes = np.linalg.eigh(total)

    def distances(atoms):
        """Weight of the pooled covariance of both regions, 0.1 of the whole, and weights by the power -4."""
        h = []
        for part in parts:
            weight = SIZE / (SIZE + len(part))
            local = (1 - weight) * np.cov(part.T, bias=True) + weight * within
            h.append(psi(atoms, part.mean(0), axes, np.diag(axes.T @ (0.9 * local + 0.1 * total) @ axes)))
        return np.average(h, axis=0, weights=np.array(h) ** -4.0)

    usual = distances(features).mean()
    h = leverage(x[:, :SIZE], zero).leverage.numpy()
    np.testing.assert_allclose(h, distances(features) / usual, rtol=1e-4)
    # Where neither phase is, and what a single region would not notice: beside the line between the phases.
    beside = torch.tensor([[10.0, 0.0, 2.5, 0.0], [10.0, 6.0, 2.5, 6.0], [-20.0, 0.0, -5.0, 0.0]])
    found = leverage(beside, zero[:3]).leverage
    np.testing.assert_allclose(found, distances(beside.numpy()) / usual, rtol=1e-4)
    between, aside, outside = found
    assert 2.9 * between < outside and aside > 5.0 * between


def alike(number):
    """Frames of one atom whose features differ by rounding: a species whose site never changes, as in a crystal."""
    frames = make_frames(1, 1, seed=9, species=(1,)) * number
    return [frame._replace(x=frame.x[:1] * (1.0 + 1e-7 * i)) for i, frame in enumerate(frames)]


@pytest.mark.parametrize(
    "rare, warning, largest",
    [
        (make_frames(1, 3, seed=9, species=(1,)), "Xe (3 atoms, 57% of the moments from all species)", 5.0),
        (alike(1), "Xe (1 atoms, 80% of the moments from all species)", 10.0),
        (alike(6), None, 10.0),
    ],
)
def test_few_atoms_of_a_species_and_those_that_are_all_alike_borrow_what_near_means(rare, warning, largest):
    """From the pool: others of their kind are not at the end of the world."""
    readout = make_readout()
    validation = make_frames(10, seed=1, species=(0,))
    report = fit_frames(readout, make_frames(20, species=(0,)) + rare, validation, species=("O", "Xe"))
    assert report.warnings == ([f"fewer training atoms than features (4): {warning}"] if warning else [])
    assert len(rare) < 6 or leverages(readout, rare).max() < 1e-3
    others = leverages(readout, make_frames(50, seed=11, species=(1,)))
    assert 0.3 < others.mean() < largest


def test_species_without_training_atoms_are_named_and_far():
    readout = make_readout()
    only = {"species": (0,)}
    report = fit_frames(readout, make_frames(20, **only), make_frames(12, seed=1, **only), species=("O", "Xe"))
    (warning,) = report.warnings
    assert warning.startswith("no training atoms of Xe: their leverage is 1e+06")
    found, _ = run(readout, make_frames(2, seed=3))
    species = torch.cat([frame.species for frame in make_frames(2, seed=3)])
    torch.testing.assert_close(found["e2ip_leverage"][species == 1], torch.full((4,), 1e6))
    torch.testing.assert_close(found["e2ip_kappa"][species == 1], torch.full((4,), 1e-6))
    assert report.atoms == {(0, 0): 100}


@pytest.mark.parametrize("constant", [False, True])
def test_validation_configurations_of_a_species_without_training_atoms_say_nothing(constant):
    """Not even of their other atoms, whose neighbours are not supported."""
    training, known = make_frames(20, species=(0,)), make_frames(12, seed=1, width=3.0, species=(0,))
    mixed = make_frames(20, seed=2, width=3.0)
    readouts, reports = [make_readout(constant=constant) for _ in range(2)], []
    for readout, validation in zip(readouts, ([*mixed[:3], *known, *mixed[3:]], known), strict=True):
        reports.append(fit_frames(readout, training, validation, constant=constant))
    assert reports[0].constants[0].atoms == reports[1].constants[0].atoms == 60
    lacking = "20 validation configurations have species 1, of which there are no training atoms: left out"
    assert lacking in reports[0].warnings
    for name in ("growth", "log_factor"):
        found, expected = (getattr(readout.leverage, name) for readout in readouts)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    with pytest.raises(InputError, match="finite reference forces whose species the training set has"):
        fit_frames(readouts[0], training, mixed)


def test_forces_that_vanish_by_symmetry_say_nothing(training):
    """Isolated atoms: predicted and reference forces are zero whatever the error bars are."""
    known = make_frames(30, atoms=3, seed=4)
    alone = [frame._replace(residual=0.0 * frame.residual) for frame in make_frames(12, atoms=1, seed=5)]

    def validation(readout, frames):
        for batch, found in zip(batches(frames), validation_of(readout, frames), strict=True):
            sizes = torch.cat([torch.full((len(frame.x), 3), 0.0 if len(frame.x) == 1 else -1.0) for frame in batch])
            yield dataclasses.replace(found, forces=sizes + 1e-7)

    reports, readouts = [], [make_readout(), make_readout()]
    for readout, frames in zip(readouts, (known, [*alone[:6], *known, *alone[6:]]), strict=True):
        reports.append(fit_leverage(readout, training_of(readout, training), validation(readout, frames)))
    without, with_them = (report.constants[0] for report in reports)
    assert with_them.configurations == without.configurations == 30
    assert with_them.growth == pytest.approx(without.growth, rel=1e-6)
    assert with_them.log_scale == pytest.approx(without.log_scale, rel=1e-6)
    with pytest.raises(InputError, match="all forces vanish by symmetry"):
        fit_leverage(readouts[0], training_of(readouts[0], training), validation(readouts[0], alone))


def test_validation_errors_that_are_all_zero(training):
    isolated = make_frames(5, atoms=1)
    for frame in isolated:
        frame.residual.fill_(0.0)
    with pytest.raises(InputError, match="all validation errors are zero"):
        fit_frames(make_readout(), training, isolated)


def kept_of(frames, size, order=None):
    """What is kept of the features of frames that come in batches, in any order."""
    atoms = training_atoms.TrainingAtoms(2)
    for numbers in batches(list(range(len(frames))) if order is None else order, size):
        x = torch.cat([frames[i].x[:, :SIZE] for i in numbers])
        of_frame = torch.cat([torch.full((len(frames[i].x),), i) for i in numbers])
        atoms.add(x, torch.cat([frames[i].species for i in numbers]), torch.ones(len(x)), TrainingBatch(of_frame))
    return atoms


def test_of_many_atoms_the_same_are_kept_whatever_batches_and_order(monkeypatch):
    monkeypatch.setattr(training_atoms, "MAX_ATOMS", 40)
    frames, found = make_frames(100), []
    shuffled = np.random.default_rng(0).permutation(100).tolist()
    for size, order in ((100, None), (7, None), (1, None), (9, shuffled)):
        atoms = kept_of(frames, size, order)
        assert max(sum(map(len, part)) for part in atoms.kept) <= 50
        atoms.gather()
        assert atoms.count.tolist() == [300, 200]
        found.append([atoms.features(kind) for kind in (0, 1)])
    assert all(len(features) == 40 for features in found[0])
    assert all(np.array_equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
    # Not the first ones, nor those of a few frames.
    x = torch.cat([frame.x[frame.species == 0, :SIZE] for frame in frames]).numpy()
    places = np.flatnonzero((x[:, None] == found[0][0]).all(-1).any(1))
    assert len(places) == 40 and 110 < places.mean() < 190
    readout = make_readout()
    report = fit_frames(readout, frames, make_frames(3, seed=1))
    assert report.atoms == {(0, 0): 300, (0, 1): 200}
    everything = torch.cat([frame.x[:, :SIZE] for frame in frames]).numpy()
    species, leverage = torch.cat([frame.species for frame in frames]).numpy(), leverages(readout, frames).numpy()
    for kind, features in enumerate(found[0]):
        kept = (everything[:, None] == features).all(-1).any(1) & (species == kind)
        assert kept.sum() == 40 and leverage[kept].mean() == pytest.approx(1.0, abs=1e-6)


def test_kept_features_are_bounded_in_bytes_whatever_the_number_of_kinds(monkeypatch):
    monkeypatch.setattr(training_atoms, "MAX_BYTES", 60 * SIZE * 8)
    one, two = kept_of(make_frames(100, species=(0,)), 7), kept_of(make_frames(100), 7)
    for atoms in (one, two):
        atoms.gather()
    assert [sum(map(len, part)) for part in one.kept] == [60, 0]
    assert [sum(map(len, part)) for part in two.kept] == [30, 30]
    # A kind that comes late takes its share from the others.
    late = kept_of([*make_frames(50, species=(0,)), *make_frames(50, species=(1,))], 7)
    late.gather()
    assert [sum(map(len, part)) for part in late.kept] == [30, 30]


def test_an_atom_counts_as_much_whichever_process_has_it(monkeypatch):
    """One process had to thin its atoms, another has few, a third none."""
    monkeypatch.setattr(training_atoms, "MAX_ATOMS", 40)
    frames = make_frames(40, species=(0,))
    shares, calls = (range(33), range(33, 40), range(0)), []
    processes = [kept_of(frames, 5, list(share)) for share in shares]
    expected = kept_of(frames, 5)
    expected.gather()

    def gather(mine):
        """The others have the same calls."""
        calls.append(mine)
        return [stand_in(atoms, len(calls)) for atoms in processes]

    def stand_in(atoms, call):
        keys = np.concatenate([np.empty(0, np.uint64), *atoms.keys[0]])
        if call < 3:
            return (atoms.broken, atoms.row_bytes, atoms.count, atoms.log_variance) if call == 1 else keys
        chosen = (
            keys <= np.sort(np.concatenate([np.empty(0, np.uint64), *(k for a in processes for k in a.keys[0])]))[39]
        )
        return keys[chosen], np.concatenate(atoms.kept[0])[chosen] if len(keys) else None

    whole = copy.deepcopy(processes[1])
    monkeypatch.setattr(training_atoms, "distributed", lambda: True)
    monkeypatch.setattr(training_atoms, "gather_objects", gather)
    whole.gather()
    assert len(calls) == 3 and len(calls[2][0]) < 35
    assert np.array_equal(whole.features(0), expected.features(0)) and len(whole.features(0)) == 40
    assert whole.count.tolist() == [200, 0] and whole.log_variance.tolist() == [200.0, 0.0]


# Constants


@pytest.mark.parametrize(("growth", "log_scale"), [(2.5, 0.3), (1.2, -0.5)])
def test_constants_that_made_the_errors_are_found_again(training, growth, log_scale):
    readout = make_readout()
    fit_frames(readout, training, make_frames(5, seed=1))
    validation = drawn(readout, make_frames(900, seed=2, width=WIDTHS), growth, log_scale)
    report = fit_frames(readout, training, validation)
    found = report.constants[0]
    low, high = found.growth_interval
    error = 0.5 * math.log(high / low)
    assert error < 0.6 * 0.6, "what was drawn says more than the prior"
    assert abs(math.log(found.growth / growth)) < 2.5 * error
    assert 0.01 < found.log_scale_error < 0.2 and abs(found.log_scale - log_scale) < 2.5 * found.log_scale_error
    assert (found.configurations, found.atoms) == (900, 4500) and found.nll[1] < found.nll[0]
    assert readout.leverage.growth.tolist() == [found.growth]
    assert readout.leverage.log_factor.tolist() == [found.log_scale] * 2 and readout.leverage.fitted


def test_constants_are_the_mode_of_the_posterior_in_which_atoms_count_like_so_many_frames(training):
    """Frames of different size, few of them: prior and likelihood both matter."""
    readout = make_readout()
    fit_frames(readout, training, make_frames(5, seed=1))
    frames = [f for n in (1, 3, 6) for f in make_frames(10, n, seed=n, width=[0.1, 3.0] * 5)]
    validation = drawn(readout, frames, 0.5, 0.7)
    found = fit_frames(readout, training, validation).constants[0]
    residual = torch.cat([frame.residual for frame in validation]).numpy()

    def posterior(constants):
        """From what the readout predicts with these constants; 100 atoms of 30 frames count like 100²/460 frames."""
        law, _ = law_of_readout(with_constants(readout, math.exp(constants[0]), constants[1]), validation)
        prior = 0.5 * ((constants[0] - math.log(2.5)) / 0.6) ** 2
        return 100**2 / 460 * law.negative_log_likelihood(residual).mean() + prior

    mode, step = np.array([math.log(found.growth), found.log_scale]), 0.05
    at_the_mode = posterior(mode)
    for direction in np.array([[1, 0], [0, 1], [1, 1], [1, -1]]):
        above, below = (posterior(mode + sign * step * direction) for sign in (1, -1))
        curvature = above + below - 2.0 * at_the_mode
        assert curvature > 0 and step * abs(above - below) / (2.0 * curvature) < 2e-3, "how far off the minimum is"
    prior = 0.5 * ((mode[0] - math.log(2.5)) / 0.6) ** 2
    assert 100**2 / 460 * found.nll[1] + prior == pytest.approx(at_the_mode, abs=1e-6)
    assert 0.5 < found.growth < 2.5, "between what is true and what was expected"
    law, _ = law_of_readout(make_readout(), validation)
    assert found.nll[0] == pytest.approx(law.negative_log_likelihood(residual).mean(), rel=1e-9)


def test_frames_like_the_training_set_leave_the_growth_where_it_was_expected(training):
    readout = make_readout()
    fit_frames(readout, training, make_frames(5, seed=1))
    validation = drawn(readout, make_frames(10, seed=2), 0.3, 0.0)
    found = fit_frames(readout, training, validation).constants[0]
    assert abs(math.log(found.growth / 2.5)) < 0.6


def test_standard_errors_are_those_of_resampled_configurations(training):
    readout = make_readout()
    fit_frames(readout, training, make_frames(5, seed=1))
    validation = drawn(readout, make_frames(60, 4, seed=2, width=WIDTHS[::15]), 2.5, 0.2)
    few = training[:20]
    found = fit_frames(readout, few, validation, size=60).constants[0]
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(40):
        chosen = [validation[i] for i in rng.integers(0, 60, 60)]
        constants = fit_frames(readout, few, chosen, size=60).constants[0]
        samples.append([math.log(constants.growth), constants.log_scale])
    growth, scale = np.std(samples, axis=0)
    low, high = found.growth_interval
    # Resampled frames do not resample the prior: what it adds is on top.
    assert 0.7 * growth < 0.5 * math.log(high / low) < 2.0 * growth + 0.3 * 0.6
    assert 0.6 * scale < found.log_scale_error < 1.7 * scale


@pytest.mark.parametrize("factor, constant", [(1.0, False), (0.5, False), (2.0, False), (0.5, True)])
def test_optimism_is_by_how_much_errors_are_smaller_on_training_configurations(training, factor, constant):
    """In units of what the model says of both: their leverages differ, too. Never less than nothing."""
    readout, plain = make_readout(constant=constant), make_readout(constant=constant)
    validation = make_frames(100, seed=1)
    fit_frames(readout, training, validation, constant=constant)
    seen, validation = drawn(readout, training * 2, 2.0, 0.3, seed=1), drawn(readout, validation, 2.0, 0.3, seed=2)
    seen = [frame._replace(residual=factor * frame.residual) for frame in seen]
    found, none = (
        fit_frames(one, training, validation, constant=constant, training_errors=known).constants[0]
        for one, known in ((readout, validation_of(readout, seen)), (plain, ()))
    )
    expected = max(0.0, -2.0 * math.log(factor))
    assert found.optimism == pytest.approx(expected, abs=3.0 * found.optimism_error) and found.optimism_error < 0.15
    assert readout.leverage.surplus.item() == pytest.approx(math.tanh(1.5 * found.optimism))
    assert none.optimism == plain.leverage.surplus.item() == 0.0
    # All of it is for what is strange; where atoms are as in training, the rest is fitted with it in mind.
    without = copy.deepcopy(readout)
    without.leverage.surplus.zero_()
    strange, usual = (
        [E2IP.log_variance(run(one, frames)[0]) for one in (readout, other)]
        for frames, other in ((make_frames(5, seed=3, width=20.0), without), (training, plain))
    )
    torch.testing.assert_close(strange[0] - strange[1], torch.full_like(strange[0], found.surplus), rtol=1e-2, atol=0)
    assert usual[0].mean().item() == pytest.approx(usual[1].mean().item(), abs=0.1)


def test_few_configurations_say_little_of_the_optimism(training):
    readout = make_readout()
    fit_frames(readout, training, make_frames(30, seed=1))
    found = {}
    for count in (2, 200):
        seen, validation = (drawn(readout, make_frames(count, seed=s), 2.5, 0.0, seed=s) for s in (4, 5))
        seen = [frame._replace(residual=0.5 * frame.residual) for frame in seen]
        found[count] = fit_frames(
            readout, training, validation, training_errors=validation_of(readout, seen)
        ).constants[0]
    assert found[2].optimism < 0.7 * found[200].optimism and found[2].optimism_error > 0.15


def test_training_configurations_without_forces_tell_no_optimism(training):
    readout, validation = make_readout(), make_frames(12, seed=1)
    bare = [frame._replace(residual=torch.full_like(frame.residual, math.nan)) for frame in training]
    exact = [frame._replace(residual=torch.zeros_like(frame.residual)) for frame in training]
    for known in (bare, exact):
        report = fit_frames(readout, training, validation, training_errors=validation_of(readout, known))
        assert report.constants[0].optimism == 0.0 and len(report.lines()) == 2


@pytest.mark.parametrize("sizes, chosen", [((3, 50), 3), ((450, 50), 225), ((1000, 50), 200), ((10, 0), 1)])
def test_training_configurations_to_compare_with(sizes, chosen):
    found = training_subset(*sizes)
    assert len(found) == chosen and found[0] == 0 and found[-1] < sizes[0]


def test_a_single_configuration_is_enough_for_finite_errors(training):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = fit_frames(make_readout(), training, make_frames(1, seed=3))
    found = report.constants[0]
    assert found.configurations == 1
    assert report.warnings[0].startswith("1 validation configuration can hardly tell")
    assert np.isfinite([found.growth, *found.growth_interval, found.log_scale, found.log_scale_error]).all()
    assert found.growth_interval[0] < found.growth < found.growth_interval[1] and found.log_scale_error > 0


def nearly(frames, number):
    """So many that err alike, but are no copies."""
    return [frame._replace(residual=(1.0 + 0.003 * i) * frame.residual) for i in range(number) for frame in frames]


def test_copies_of_a_configuration_count_once(training):
    """To the precision of a network that computes them in other batches; with other errors they are others."""
    readout, frames = make_readout(), make_frames(12, seed=3)
    rng = np.random.default_rng(0)
    noise = [frame.residual + torch.from_numpy(rng.normal(scale=1e-6, size=(5, 3))) for frame in frames[:4]]
    copies = [frame._replace(residual=found) for frame, found in zip(frames, noise, strict=False)]
    once, again = (fit_frames(readout, training, found) for found in (frames, [*copies, *frames, *copies]))
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
    found = fit_leverage(other, counted, validation_of(other, make_frames(12, seed=1)))
    assert found.atoms == expected.atoms
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
    found = fit_frames(make_readout(), training, partly).constants[0]
    assert (found.configurations, found.atoms) == (11, 44)
    assert math.isfinite(found.growth) and math.isfinite(found.log_scale)


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
    assert fit_frames(readout, training, make_frames(5, seed=1), constant=True)
    frames = make_frames(300, seed=2, width=WIDTHS[:600:2])
    kinds = torch.cat([frame.species for frame in frames])
    outputs, number = run(readout, frames)
    leverage, rng, growth = outputs["e2ip_leverage"], np.random.default_rng(0), 1.6
    mean = torch.empty_like(leverage)
    for i in range(300):
        average = torch.linalg.matrix_power((0.5 * torch.eye(5) + 0.5) / 3.0, 3)
        mean[number == i] = average @ leverage[number == i]
    reach = (leverage + mean) * (1 + ((leverage + mean) / 5) ** 2) ** -0.2
    sigma = np.array([0.03, 0.3])[kinds] * ((1 + growth * reach) / (1 + growth * 2 / 1.16**0.2)).numpy()
    t = rng.normal(size=(1500, 3)) / np.sqrt(rng.chisquare(8.0, size=(1500, 1)) / 8.0)
    errors = torch.from_numpy(sigma[:, None] * t)
    validation = [frame._replace(residual=errors[number == i]) for i, frame in enumerate(frames)]
    report = fit_frames(readout, training, validation, constant=True)
    found = report.constants[0]
    for name, expected in (("species 0", 0.03), ("species 1", 0.3)):
        assert report.species_std[0][name] == pytest.approx(expected * math.sqrt(8.0 / 6.0), rel=0.1)
    low, high = found.growth_interval
    assert abs(math.log(found.growth / growth)) < 3.0 * 0.5 * math.log(high / low)
    # Scale of the Student-t at leverage 1, from the trunk, the law and the constants of the readout.
    scale = readout.leverage.log_factor + readout.leverage.log_variance
    outputs, _ = run(readout, frames)
    nu = outputs["e2ip_nu"]
    near = nu.max()
    assert 6.0 < near < 16.0, "8 degrees of freedom, on a coarse grid"
    fitted = torch.exp(0.5 * (scale + torch.log(near / (near - 2)))).numpy()
    np.testing.assert_allclose(fitted, [0.03, 0.3], rtol=0.1)
    assert found.nll[1] < found.nll[0] - 0.1
    # Calibrated: the share of errors within the 90 % ellipsoids.
    law, _ = law_of_readout(readout, frames)
    assert (law.pit(errors.numpy()) < 0.9).mean() == pytest.approx(0.9, abs=0.03)


def test_a_species_without_validation_atoms_gets_the_mean_scale(training):
    readout = make_readout(constant=True)
    fit_frames(readout, training, make_frames(20, seed=1, species=(0,)), constant=True)
    assert readout.leverage.log_factor[0] == readout.leverage.log_factor[1] != 0.0


# What does not matter


def buffers_of(readout):
    return {name: value for name, value in readout.leverage.named_buffers()}


def check_same(found, expected, rtol=1e-6):
    """Moments to rounding; what the search for constants finds to its tolerance."""
    for name, value in buffers_of(expected).items():
        loose = name in ("growth", "log_factor")
        torch.testing.assert_close(
            buffers_of(found)[name], value, rtol=1e-3 if loose else rtol, atol=1e-3 if loose else 1e-9, msg=name
        )


def test_of_a_species_without_training_atoms_the_others_variance_is_typical():
    readout = make_readout()
    fit_frames(readout, make_frames(40, species=(0,)), make_frames(10, seed=1, species=(0,)))
    known, lacking = readout.leverage.log_variance[:2]
    assert abs(known) > 0.1 and lacking == known
    outputs = run(readout, make_frames(4, seed=2, species=(1,)))[0]
    assert (outputs["e2ip_leverage"] == 1e6).all()
    # A million of the typical variances, but for a fifth of the atom's own logarithm.
    own = E2IP.log_variance(run(make_readout(), make_frames(4, seed=2, species=(1,)))[0])
    growth = readout.leverage.growth[0]
    usual = 2.0 / 1.16**0.2
    scale = readout.leverage.log_factor[1] + readout.leverage.surplus[0]
    expected = torch.exp(0.8 * known + 0.2 * own + scale) * 1e6 / (1.0 + usual * growth) ** 2
    epistemic = torch.exp(E2IP.log_variance(outputs)) * 1e6 / (1e6 + 1.0)
    torch.testing.assert_close(epistemic, expected.to(epistemic), rtol=3e-3, atol=0.0)


@pytest.mark.parametrize("constant", [False, True])
def test_order_and_batches_do_not_matter(constant):
    rng = np.random.default_rng(0)
    training, validation = make_frames(80), make_frames(30, seed=1, width=3.0)
    first, second = make_readout(constant=constant), make_readout(constant=constant)
    report = fit_frames(first, training, validation, constant=constant)
    assert report.regions > 4, "more than one of a species"
    shuffled = [[frames[i] for i in rng.permutation(len(frames))] for frames in (training, validation)]
    again = fit_frames(second, *shuffled, size=11, constant=constant)
    # Whitening's axes have no sign: leverages are compared, and what has no axes.
    wide = make_frames(20, seed=4, width=5.0)
    torch.testing.assert_close(leverages(second, wide), leverages(first, wide), rtol=1e-8, atol=1e-8)
    for name in ("centres", "log_variance"):
        torch.testing.assert_close(getattr(second.leverage, name), getattr(first.leverage, name), rtol=1e-8, atol=1e-8)
    for name in ("growth", "log_factor"):
        torch.testing.assert_close(getattr(second.leverage, name), getattr(first.leverage, name), rtol=1e-4, atol=1e-4)
    assert again.atoms == report.atoms and again.regions == report.regions


def test_random_states_and_weights_are_left_alone(training):
    readout = make_readout()
    weights = {name: value.clone() for name, value in readout.named_parameters()}
    before = torch.get_rng_state(), np.random.get_state()  # noqa: NPY002
    fit_frames(readout, training, make_frames(10, seed=1))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), before[1], strict=True))  # noqa: NPY002
    assert all(torch.equal(value, weights[name]) for name, value in readout.named_parameters())


@pytest.mark.parametrize("species", [(0, 1), (0,)])
def test_what_was_fitted_before_does_not_matter(species):
    """Also where it was fitted to other species."""
    first, second = make_readout(), make_readout()
    fit_frames(second, make_frames(90, seed=7, width=4.0), make_frames(4, seed=8))
    for readout in (first, second):
        fit_frames(readout, make_frames(40, species=species), make_frames(10, seed=1, species=species))
    for name, value in buffers_of(first).items():
        assert torch.equal(buffers_of(second)[name], value), name


def test_hooks_are_gone_afterwards_also_after_an_error(training):
    readout = make_readout()
    fit_frames(readout, training, make_frames(10, seed=1))
    with pytest.raises(InputError):
        fit_frames(readout, training, [])
    assert not readout._forward_hooks and not readout.leverage._forward_hooks


# Heads, families


def test_heads_have_moments_and_constants_of_their_own():
    both = make_readout(num_heads=2)
    training = [make_frames(40), make_frames(30, seed=3, width=5.0, head=1)]
    validation = [make_frames(20, seed=1, width=3.0), make_frames(20, seed=2, width=9.0, head=1)]
    mixed = [[f for pair in itertools.zip_longest(*frames) for f in pair if f] for frames in (training, validation)]
    report = fit_frames(both, *mixed)
    assert set(report.constants) == {0, 1}
    assert report.atoms == {(0, 0): 120, (0, 1): 80, (1, 0): 90, (1, 1): 60}
    report.heads = ["pbe", "scan"]
    lines = report.lines()
    assert len(lines) == 3 and "350 training atoms, 2 species of 2 heads in" in lines[0] and "(head scan)" in lines[2]
    for head in (0, 1):
        alone = make_readout()
        alone.trunks[0].load_state_dict(both.trunks[head].state_dict())
        found = fit_frames(alone, training[head], validation[head]).constants[0]
        assert report.constants[head].growth == pytest.approx(found.growth, rel=1e-6)
        assert report.constants[head].log_scale == pytest.approx(found.log_scale, abs=1e-6)
        assert both.leverage.growth[head] == report.constants[head].growth


def test_where_there_is_one_head_data_sets_are_not_told_apart(training):
    """As in a model that one head of several was taken out of."""
    readout, validation = make_readout(), make_frames(9, seed=1)
    expected = fit_frames(make_readout(), training, validation).constants
    others = [[frame._replace(head=2) for frame in frames] for frames in (training, validation)]
    assert fit_frames(readout, *others).constants == expected


def test_a_head_without_validation_atoms_gets_the_expected_growth_and_a_warning():
    readout = make_readout(num_heads=2)
    readout.leverage.growth.fill_(77.0)
    training = make_frames(40) + make_frames(30, seed=3, head=1)
    report = fit_frames(readout, training, make_frames(12, seed=1), heads=["pbe", "scan"])
    (warning,) = report.warnings
    assert warning.startswith("no validation atoms with forces (head scan): the growth is the expected 2.5")
    assert set(report.constants) == {0} and readout.leverage.growth[1] == 2.5
    assert readout.leverage.log_factor[2:].tolist() == [0.0, 0.0]
    # One of the other head's atoms has them.
    assert readout.leverage.log_factor[:2].ne(0).all() and leverages(readout, training).isfinite().all()


def test_families_that_do_not_take_it_get_moments_alone(toy_family, training):
    def untouched():
        raise AssertionError("validation costs a pass with forces")
        yield

    readout = make_readout(toy_family.name)
    report = fit_leverage(readout, training_of(readout, training), untouched())
    assert report.constants == {} and report.atoms == {(0, 0): 180, (0, 1): 120}
    assert leverages(readout, training).mean().item() == pytest.approx(1.0, abs=1e-6)
    assert report.lines() == ["leverage: features of 300 training atoms, 2 species in 8 regions"]


# Constants anew, without the training set


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
    """A fitted readout of a network that knows its training set by heart."""
    readout = make_readout(constant=constant)
    by_heart = [frame._replace(residual=0.5 * frame.residual) for frame in make_frames(40)]
    errors, validation = validation_of(readout, by_heart), validation_of(readout, make_frames(60, seed=1))
    fit_leverage(readout, training_of(readout, training), validation, constant=constant, training_errors=errors)
    assert readout.leverage.surplus.item() > 0.1
    return readout


@pytest.mark.parametrize("constant", [False, True])
def test_new_constants_keep_what_training_atoms_tell(training, constant):
    """And the weights; standard deviations follow errors that are three times as large."""
    readout = fitted(training, constant)
    before = copy.deepcopy(readout)
    frames = make_frames(40, seed=1)
    report = update(readout, [f._replace(residual=3.0 * f.residual) for f in frames], constant=constant)
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
    frames = drawn(readout, make_frames(len(WIDTHS), seed=3, width=WIDTHS), 6.0, log_scale)
    report = update(readout, frames)
    low, high = report.constants[0].growth_interval
    assert low < 6.0 * 1.2 and high > 6.0 / 1.2 and report.constants[0].growth > 1.5 * 2.5


def test_few_atoms_of_a_species_change_as_the_others_do(training):
    readout = make_readout(constant=True)
    fit_frames(readout, training, make_frames(60, seed=1), constant=True)
    before = readout.leverage.log_factor.clone()
    new = [f._replace(residual=2.0 * f.residual) for f in make_frames(30, seed=1, species=(0,))]
    update(readout, new, constant=True)
    change = readout.leverage.log_factor - before
    assert change[0].item() == pytest.approx(2.0 * math.log(2.0), abs=0.2)
    assert change[1].item() == pytest.approx(change[0].item(), abs=1e-6)
    # A single atom with a wild error hardly moves its species; alone it would by ln 900.
    readout.leverage.log_factor.copy_(before)
    wild = make_frames(1, seed=5)[0]
    residual = torch.where((wild.species == 1)[:, None], 30.0 * wild.residual, 2.0 * wild.residual)
    update(readout, [*new, wild._replace(residual=residual)], constant=True)
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
    with pytest.raises(InputError, match=r"my.model: its readout 'mve' has no constants to be updated"):
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
        "leverage: errors 1.25 +- 0.062 times those of training atoms of equal uncertainty: more growth on what is "
        "strange"
    )


# Bad input


@pytest.mark.parametrize("frames", [0, 1])
def test_training_set_without_atoms(frames):
    training = make_frames(frames, atoms=0)
    readout = make_readout()
    with pytest.raises(InputError, match="the training set has no atoms"):
        fit_frames(readout, training, make_frames(3))
    assert not readout.leverage.fitted


@pytest.mark.parametrize("validation", ["none", "without forces"])
def test_validation_set_without_forces(training, validation):
    frames = [] if validation == "none" else make_frames(3, seed=1)
    for frame in frames:
        frame.residual.fill_(float("nan"))
    readout = make_readout()
    fit_frames(readout, training, make_frames(3))
    with pytest.raises(InputError, match="validation set has no configuration with finite reference forces"):
        fit_frames(readout, training, frames)
    assert not readout.leverage.fitted, "constants of one fit and moments of another mean nothing"


def test_every_validation_configuration_has_a_species_without_training_atoms():
    training, mixed = make_frames(20, species=(0,)), make_frames(3, seed=1)
    with pytest.raises(
        InputError, match=r"\(3 validation configurations have Pd, of which there are no training atoms"
    ):
        fit_frames(make_readout(), training, mixed, species=("O", "Pd"))
    validation = [*make_frames(12, seed=2, species=(0,)), mixed[0]]
    report = fit_frames(make_readout(), training, validation, species=("O", "Pd"))
    assert "1 validation configuration has Pd, of which there are no training atoms: left out" in report.warnings


def test_features_that_are_not_finite(training):
    broken = make_frames(8, seed=5)
    broken[3].x[2, 1] = float("nan")
    broken[5].x[:2, 0] = float("inf")
    readout = make_readout()
    with pytest.raises(InputError, match="features of 3 training atoms are not finite"):
        fit_frames(readout, training + broken, make_frames(3))
    assert not readout.leverage.fitted


# Several processes


def share(rank, world):
    """What a process of a distributed training has: of an odd number of frames; of one species, all or nothing."""
    training = make_frames(70, species=(0,)) + make_frames(4, seed=8, species=(1,))
    validation = make_frames(11, seed=1, width=4.0)
    if world == 1:
        return (training, 0), (validation, 0)
    return ((training[:41], 0), (validation[:3], 0)) if rank == 0 else ((training[41:], 41), (validation[3:], 3))


def fit_of_process(rank, world):
    readout, ((training, first), (validation, first_valid)) = make_readout(), share(rank, world)
    known = [frame._replace(residual=0.4 * frame.residual) for frame in training]
    report = fit_leverage(
        readout,
        training_of(readout, training, 4, first=first),
        validation_of(readout, validation, 4, first_valid),
        training_errors=validation_of(readout, known, first=first),
    )
    _, (wide, _) = share(0, 1)
    return {
        "leverage": leverages(readout, wide).tolist(),
        "growth": report.constants[0].growth,
        "log_scale": report.constants[0].log_scale,
        "optimism": report.constants[0].optimism,
        "nll": list(report.constants[0].nll),
        "atoms": sorted(report.atoms.values()),
        "configurations": report.constants[0].configurations,
        "warnings": report.warnings,
        "left out": left_out(rank, world),
    }


def left_out(rank, world):
    """What a process says where its own share has fewer configurations of unsupported species than the other's."""
    (training, _), (mixed, _) = share(rank, world)
    known = make_frames(8, seed=9, width=4.0, species=(0,))[rank::world]
    alone = [frame for frame in training if not frame.species.any()]
    readout = make_readout()
    validation = validation_of(readout, [*known, *mixed], 4, 100 * rank)
    report = fit_leverage(readout, training_of(readout, alone, 4, first=100 * rank), validation)
    return [text for text in report.warnings if "left out" in text]


def test_two_processes_fit_what_one_does(tmp_path):
    # Not torch.multiprocessing: its children cannot import a test module of pytest's importlib mode.
    command = [sys.executable, __file__, str(tmp_path / "store")]
    ranks = [subprocess.Popen([*command, str(r)], stdout=subprocess.PIPE, text=True) for r in (0, 1)]
    expected = fit_of_process(0, 1)
    found = []
    for process in ranks:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        found.append(json.loads(output))
    assert found[0] == found[1]
    for name in ("warnings", "left out"):
        assert found[0].pop(name) == expected.pop(name), name
    for name, value in expected.items():
        assert found[0][name] == pytest.approx(value, rel=1e-8 if name == "leverage" else 1e-4), name


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    place = f"file://{sys.argv[1]}"
    torch.distributed.init_process_group("gloo", init_method=place, rank=int(sys.argv[2]), world_size=2)
    print(json.dumps(fit_of_process(int(sys.argv[2]), 2)))
    torch.distributed.destroy_process_group()
