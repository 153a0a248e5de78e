"""What the fit keeps of training atoms: their moments, regions and a sample of them."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from readout_alone import (
    COLUMNS,
    SIZE,
    batches,
    fit_frames,
    leverages,
    make_frames,
    make_readout,
    run,
    training_of,
    validation_of,
)

from e2ip_plugins.errors import InputError
from e2ip_plugins.families.e2ip import E2IP
from e2ip_plugins.fitting import training_atoms
from e2ip_plugins.fitting.fit import fit_leverage
from e2ip_plugins.fitting.training_atoms import TrainingBatch
from e2ip_plugins.leverage.form import FORM


def test_mean_over_training_atoms_is_one_for_every_species(training):
    readout = make_readout()
    report = fit_frames(readout, training, make_frames(10, seed=1))
    species = torch.cat([frame.species for frame in training])
    result = leverages(readout, training)
    for kind in (0, 1):
        assert result[species == kind].mean().item() == pytest.approx(1.0, abs=1e-6)
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
    of_species = [np.cov(x[species == kind].T, bias=True) for kind in (0, 1)]
    count = np.bincount(species)
    pool = (count[0] * of_species[0] + count[1] * of_species[1]) / count.sum()
    distances = []
    for kind in (0, 1):
        weight = SIZE / (SIZE + count[kind])
        assert report.shrinkage[0, kind] == pytest.approx(weight)
        values, axes = np.linalg.eigh((1 - weight) * of_species[kind] + weight * pool)
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
    result = readout(frame.x, frame.x, frame.species)["e2ip_leverage"]
    assert result.mean().item() == pytest.approx(1.0, abs=1e-6)


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
    result = leverage(beside, zero[:3]).leverage
    np.testing.assert_allclose(result, distances(beside.numpy()) / usual, rtol=1e-4)
    between, aside, outside = result
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
    result, _ = run(readout, make_frames(2, seed=3))
    species = torch.cat([frame.species for frame in make_frames(2, seed=3)])
    torch.testing.assert_close(result["e2ip_leverage"][species == 1], torch.full((4,), 1e6))
    torch.testing.assert_close(result["e2ip_kappa"][species == 1], torch.full((4,), 1e-6))
    assert report.atoms == {(0, 0): 100}


@pytest.mark.parametrize("constant", [False, True])
def test_validation_configurations_of_a_species_without_training_atoms_say_nothing(constant):
    """Not even of their other atoms, whose neighbours are not supported."""
    training, known = make_frames(20, species=(0,)), make_frames(12, seed=1, width=3.0, species=(0,))
    mixed = make_frames(20, seed=2, width=3.0)
    readouts, reports = [make_readout(constant=constant) for _ in range(2)], []
    for readout, validation in zip(readouts, ([*mixed[:3], *known, *mixed[3:]], known), strict=True):
        reports.append(fit_frames(readout, training, validation, constant_readout=constant))
    assert reports[0].constants[0].atoms == reports[1].constants[0].atoms == 60
    lacking = "20 validation configurations have species 1, of which there are no training atoms: left out"
    assert lacking in reports[0].warnings
    for name in ("growth", "log_factor"):
        result, expected = (getattr(readout.leverage, name) for readout in readouts)
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=0)
    with pytest.raises(InputError, match="finite reference forces whose species the training set has"):
        fit_frames(readouts[0], training, mixed)


def test_forces_that_vanish_by_symmetry_say_nothing(training):
    """Isolated atoms: predicted and reference forces are zero whatever the error bars are."""
    known = make_frames(30, atoms=3, seed=4)
    alone = [frame._replace(residual=0.0 * frame.residual) for frame in make_frames(12, atoms=1, seed=5)]

    def validation(readout, frames):
        for batch, result in zip(batches(frames), validation_of(readout, frames), strict=True):
            sizes = torch.cat([torch.full((len(frame.x), 3), 0.0 if len(frame.x) == 1 else -1.0) for frame in batch])
            yield dataclasses.replace(result, forces=sizes + 1e-7)

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
    frames, result = make_frames(100), []
    shuffled = np.random.default_rng(0).permutation(100).tolist()
    for size, order in ((100, None), (7, None), (1, None), (9, shuffled)):
        atoms = kept_of(frames, size, order)
        assert max(sum(map(len, part)) for part in atoms.kept) <= 50
        atoms.gather()
        assert atoms.count.tolist() == [300, 200]
        result.append([atoms[kind] for kind in (0, 1)])
    assert all(len(features) == 40 for features in result[0])
    assert all(np.array_equal(a, b) for other in result[1:] for a, b in zip(result[0], other, strict=True))
    # Not the first ones, nor those of a few frames.
    x = torch.cat([frame.x[frame.species == 0, :SIZE] for frame in frames]).numpy()
    places = np.flatnonzero((x[:, None] == result[0][0]).all(-1).any(1))
    assert len(places) == 40 and 110 < places.mean() < 190
    readout = make_readout()
    report = fit_frames(readout, frames, make_frames(3, seed=1))
    assert report.atoms == {(0, 0): 300, (0, 1): 200}
    everything = torch.cat([frame.x[:, :SIZE] for frame in frames]).numpy()
    species, leverage = torch.cat([frame.species for frame in frames]).numpy(), leverages(readout, frames).numpy()
    for kind, features in enumerate(result[0]):
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
        hashes = np.concatenate([np.empty(0, np.uint64), *atoms.kept_hashes[0]])
        if call < 3:
            return (atoms.broken, atoms.row_bytes, atoms.count, atoms.log_own_sum) if call == 1 else hashes
        chosen = (
            hashes
            <= np.sort(np.concatenate([np.empty(0, np.uint64), *(k for a in processes for k in a.kept_hashes[0])]))[39]
        )
        return hashes[chosen], np.concatenate(atoms.kept[0])[chosen] if len(hashes) else None

    whole = copy.deepcopy(processes[1])
    monkeypatch.setattr(training_atoms, "distributed", lambda: True)
    monkeypatch.setattr(training_atoms, "gather_objects", gather)
    whole.gather()
    assert len(calls) == 3 and len(calls[2][0]) < 35
    assert np.array_equal(whole[0], expected[0]) and len(whole[0]) == 40
    assert whole.count.tolist() == [200, 0] and whole.log_own_sum.tolist() == [200.0, 0.0]
