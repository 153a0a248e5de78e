"""Selection, on features whose right answer is known, and on a model that is nothing but a readout."""

from dataclasses import replace

import ase
import numpy as np
import pytest
import torch

from e2ip_plugins.active.features import FeatureModel, Features, collect
from e2ip_plugins.active.scoring import by_distance, by_energy, by_leverage
from e2ip_plugins.active.select import Candidate, SelectOptions, select
from e2ip_plugins.active.validity import Validity
from e2ip_plugins.errors import InputError
from e2ip_plugins.fitting.fit import fit_leverage
from e2ip_plugins.fitting.force_errors import ForceErrors
from e2ip_plugins.fitting.training_atoms import TrainingBatch
from e2ip_plugins.leverage.module import Neighbours
from e2ip_plugins.predictions.labelled import LabelledFrame
from e2ip_plugins.readout.layout import Layout
from e2ip_plugins.readout.readout import Readout
from e2ip_plugins.readout.settings import Settings

SIZE = 6
LAYOUT = Layout([(0, SIZE)], [], [(SIZE, 1)], num_radial=1, num_species=2)


def features(points, kinds=(0, 0, 1), seed=0, noise=0.0):
    """Frames of atoms at the same place (SIZE,) of feature space, but for noise."""
    rng = np.random.default_rng(seed)
    points = np.asarray(points, dtype=float)
    scalars = np.repeat(points, len(kinds), axis=0)
    scalars = scalars + noise * rng.normal(size=scalars.shape)
    count = len(scalars)
    frames = np.repeat(np.arange(len(points)), len(kinds))
    empty = np.full(count, np.nan)
    return Features(scalars, np.tile(kinds, len(points)), frames, empty, np.full((count, 3), np.nan), len(points))


def training(frames=400):
    return features(np.zeros((frames, SIZE)), noise=1.0)


def axis(i, length):
    return length * np.eye(SIZE)[i]


def taken(method, candidates, number, **settings):
    return [index for index, _ in method(training(), candidates, number, **settings)]


@pytest.mark.parametrize("frames", [30, 3000])
def test_copies_are_not_taken_twice(frames):
    """However many training atoms there are: six copies of the farthest, one less far along every other axis."""
    points = [axis(0, 60.0)] * 6 + [axis(i, 8.0 + 6.0 * i) for i in range(1, SIZE)]
    found = list(by_leverage(training(frames), features(points), SIZE))
    assert found[0][0] == 0 and {index for index, _ in found[1:]} == {6, 7, 8, 9, 10}
    assert found[-1][1] > 10.0
    again = list(by_leverage(training(frames), features(points), SIZE + 2))[SIZE:]
    assert max(score for _, score in again) < 4.0 and found[0][1] > 60.0


def test_a_copy_of_what_was_taken_is_like_a_training_atom():
    points = [axis(0, 30.0)] * 2 + [np.zeros(SIZE)]
    (_, first), (index, copy) = list(by_leverage(training(3000), features(points), 2))
    assert index == 1 and first > 5.0 and copy < 1.2
    # With the weight of a training atom each, it would still be far.
    assert list(by_leverage(training(3000), features(points), 2, weight=1.0))[1][1] > 3.0


def test_scores_with_weight_1_are_those_of_a_fit_to_training_set_and_frames():
    readout = Readout(Settings.of("e2ip", {"evidence": "leverage"}, 0.05), LAYOUT)
    readout = readout.double()
    known, candidates = training(7), features([axis(0, 4.0), axis(1, 3.0), axis(2, 2.5), axis(0, 3.9)], noise=0.3)

    def run(*sets):
        for part in sets:
            x = torch.from_numpy(np.pad(part.scalars, ((0, 0), (0, 5))))
            none = torch.zeros(0)
            pairs = Neighbours(none, none, none.long(), none.long())
            yield readout(x, x, torch.from_numpy(part.kinds), pairs)["e2ip_leverage"].detach().numpy()

    validation = [ForceErrors(torch.ones(21, 3), torch.from_numpy(known.frames))]
    order, before = [], []
    for index, score in by_leverage(known, candidates, 3, weight=1.0):
        sets = [known, *before]
        numbers = (torch.from_numpy(part.frames + 100 * i) for i, part in enumerate(sets))
        training_passes = (TrainingBatch(part) for part, _ in zip(numbers, run(*sets), strict=True))
        fit_leverage(readout, training_passes, (label for label, _ in zip(validation, run(known), strict=True)))
        (h,) = run(candidates)
        means = np.bincount(candidates.frames, h) / 3
        means[order] = -1.0
        assert index == means.argmax() and score == pytest.approx(means.max(), rel=1e-8)
        order.append(index)
        before.append(candidates.take([index]))


def test_a_species_that_the_training_set_lacks_is_farthest_once():
    points = [axis(0, 9.0), axis(1, 0.5), axis(1, 0.6)]
    candidates = features(points)
    candidates.kinds[3:] = 2
    order = [i for i, _ in by_leverage(training(), candidates, 3)]
    assert set(order[:1]) <= {1, 2} and order[1] == 0


def test_farthest_points():
    points = [axis(0, 10.0), axis(0, 6.0), axis(1, 8.0), axis(2, -7.0), np.zeros(SIZE)]
    assert taken(by_distance, features(points), 4) == [0, 2, 3, 1]
    known = training()
    (found,) = by_distance(known, features([axis(3, 50.0)]), 1)
    # In units of the training set's standard deviation, from the nearest of two species' means.
    spread = known.scalars[known.kinds == 0].std(0)[3], known.scalars[known.kinds == 1].std(0)[3]
    assert found[1] == pytest.approx(50.0 * np.hypot(1 / spread[0], 1 / spread[1]), rel=0.1)


def test_a_species_that_the_training_set_lacks_is_far_from_all_others_and_not_from_itself():
    points = [axis(0, 9.0), axis(1, 0.5), axis(1, 0.6), axis(2, 8.0)]
    candidates = features(points)
    candidates.kinds[3:9] = 2
    (first, how_far), (second, then), *_ = by_distance(training(), candidates, 3)
    assert first in (1, 2) and how_far > 900
    assert second == 0 and then < 20


def test_energies_that_tell_each_other():
    """A copy has nothing left; what is orthogonal stays; a frame of twice the atoms counts per atom."""
    candidates = features([axis(0, 1.0)] * 4)
    vectors = np.array([[3.0, 0.0, 0.0], [3.0, 0.0, 0.0], [0.0, 0.0, 1.0], [2.0, 1.5, 0.0]])
    found = list(by_energy(training(), replace(candidates, vectors=vectors), 4))
    assert [index for index, _ in found[:3]] == [0, 3, 2]
    np.testing.assert_allclose([score for _, score in found], np.array([3.0, 1.5, 1.0, 0.0]) / 3, atol=1e-12)
    part = replace(candidates, vectors=vectors).take([2, 0])
    np.testing.assert_array_equal(part.vectors, vectors[[2, 0]])
    with pytest.raises(InputError, match="--method energy: the model has no uncertainties of energies"):
        list(by_energy(training(), candidates, 1))


# On a model


def model(fitted=True):
    """Features are what is left of the atoms' distances to the first one and to the origin."""
    layout = Layout([(0, 3)], [], [(3, 1)], num_radial=1, num_species=2)
    readout = Readout(Settings.of("e2ip", {"evidence": "leverage"}, 0.05), layout).double().requires_grad_(False)

    def run(frames, forces):
        for first in range(0, len(frames), 4):
            batch = frames[first : first + 4]
            x = np.concatenate([f.atoms.positions - f.atoms.positions[:1] for f in batch])
            x = torch.from_numpy(np.pad(np.square(x), ((0, 0), (0, 5))))
            kinds = torch.from_numpy(np.concatenate([f.atoms.numbers == 1 for f in batch]).astype(int))
            none = torch.zeros(0)
            of_frame = torch.arange(len(batch)).repeat_interleave(3)
            pairs = Neighbours(none, none, none.long(), none.long())
            readout(x, x, kinds, pairs, frames=of_frame, num_frames=len(batch))
            yield 20.0 * x[:, :3] if forces else None

    model = FeatureModel("my.model", readout, run)
    if fitted:
        validation = rattled(4, 9)
        counts = torch.arange(4).repeat_interleave(3)
        batch = (ForceErrors(torch.ones(12, 3), counts) for _ in run(validation, False))
        # Batches of four frames with three atoms.
        numbers = torch.arange(30).repeat_interleave(3).split(12)
        passes = (TrainingBatch(part) for part, _ in zip(numbers, run(rattled(30), False), strict=True))
        fit_leverage(readout, passes, batch)
    return model


def water(seed=0, width=0.05):
    atoms = ase.Atoms("OH2", [[0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]])
    atoms.positions += width * np.random.default_rng(seed).normal(size=(3, 3))
    return atoms


def rattled(count, seed=0, width=0.05):
    return [LabelledFrame(water(seed + i, width), f"frame {i}") for i in range(count)]


def candidates(*atoms):
    return [Candidate(frame, "run.xyz", i) for i, frame in enumerate(atoms)]


def test_frames_that_are_no_candidates_are_counted():
    known = rattled(30)
    stretched, torn, close, nan, far = (water(100) for _ in range(5))
    stretched.positions[1] *= 1.2
    torn.positions[1] = [4, 0, 0]
    close.positions[1] *= 0.4
    nan.positions[0, 0] = np.nan
    far.positions[2, 1] *= 1.45
    atoms = [stretched, torn, close, nan, ase.Atoms(), known[3].atoms, water(101), far, water(102), water(101)]
    found = select(model(), known, candidates(*atoms), SelectOptions(2, validity=Validity(max_force=35.0)))
    expected = ["torn apart", "atoms too close", "positions not finite", "no atoms", "in the training set"]
    expected.append("copies of others")
    assert found.rejected == {**dict.fromkeys(expected, 1), "force too large": 1} and found.valid == 3
    assert found.frames[0].index == 0 and found.scores[0] > found.scores[1]
    assert found.reasons().startswith("1 torn apart, ") and found.warnings == []
    # Without limits, what is physically impossible is most uncertain.
    loose = Validity(0.0, np.inf, np.inf, one_piece=False)
    assert select(model(), known, candidates(*atoms), SelectOptions(1, validity=loose)).frames[0].index == 1
    assert select(model(), known, candidates(*atoms), SelectOptions(9, validity=loose)).warnings == [
        "only 6 of 10 frames are candidates: all of them are taken"
    ]
    mean = collect(model(), [LabelledFrame(stretched, "")]).leverage.max()
    strict = Validity(max_leverage=0.9 * mean)
    assert select(model(), known, candidates(stretched, water(101)), SelectOptions(1, validity=strict)).rejected == {
        "leverage too large": 1
    }


def test_random_frames_follow_the_seed():
    atoms = candidates(*(water(200 + i) for i in range(12)))
    found = [
        [f.index for f in select(model(), rattled(30), atoms, SelectOptions(5, "random", seed=seed)).frames]
        for seed in (1, 1, 2)
    ]
    assert found[0] == found[1] != found[2] and len(set(found[0])) == 5


def test_energies_of_a_model_decide():
    found = model()
    atoms = [water(400 + i, width=0.02 * i) for i in range(5)]
    with pytest.raises(InputError, match="no uncertainties of energies"):
        select(found, rattled(30), candidates(*atoms), SelectOptions(2, "energy"))
    found.readout.leverage.energies.lengths.fill_(1.0)
    chosen = select(found, rattled(30), candidates(*atoms), SelectOptions(5, "energy"))
    vectors = collect(found, [LabelledFrame(frame, "") for frame in atoms]).vectors
    assert chosen.frames[0].index == np.linalg.norm(vectors, axis=1).argmax()
    assert chosen.scores == sorted(chosen.scores, reverse=True)
    assert "energy uncertainty per atom in eV" in chosen.lines()[1]


def test_what_cannot_be_selected(refused):
    atoms = candidates(water(300))
    with pytest.raises(InputError, match=r"my\.model: the leverage of its readout has not been fitted; see e2ip fit"):
        select(model(fitted=False), rattled(30), atoms, SelectOptions(1))
    with pytest.raises(InputError, match=r"none of 1 frames is a candidate: 1 positions not finite"):
        atoms[0].atoms.positions[:] = np.inf
        select(model(), rattled(30), atoms, SelectOptions(1))
    refused("--method best: choose from leverage, random, farthest", SelectOptions, 1, "best")


def test_training_frames_of_another_model_are_noticed():
    def warnings(training):
        found = select(model(), training, candidates(water(300)), SelectOptions(1))
        return [text for text in found.warnings if "the mean leverage of a species" in text]

    assert not warnings(rattled(30))
    assert warnings(rattled(30, width=0.3)) and warnings(rattled(30)[:20])
