"""Batches of a pass: every sample once, in order, in shares, without random numbers; and how long a pass takes."""

import pytest
import torch
from torch.utils.data import ConcatDataset, TensorDataset

from e2ip_plugins.errors import ResumableError
from e2ip_plugins.fitting import batches
from e2ip_plugins.fitting.batches import Batching, InOrder, Pass, fit_loaders, in_order

FIVE, THREE = TensorDataset(torch.arange(5)), TensorDataset(torch.arange(10, 13))


def numbers(samples):
    return [int(number) for (number,) in samples]


def test_every_sample_comes_once_and_no_batch_is_of_two_data_sets():
    state = torch.random.get_rng_state()
    loader = in_order([FIVE, THREE], Batching(2, numbers))
    assert list(loader) == [[0, 1], [2, 3], [4], [10, 11], [12]] and len(loader) == 5 and loader.size == 8
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(("rank", "expected"), [(0, [[0, 2], [4], [10, 12]]), (1, [[1, 3], [11]])])
def test_processes_share_every_data_set(monkeypatch, rank, expected):
    monkeypatch.setattr(batches, "distributed", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert list(in_order([FIVE, THREE], Batching(2, numbers))) == expected


def test_parts_are_pieces_and_batches_have_the_numbers_of_their_samples():
    first, second = (InOrder([FIVE], Batching(2, numbers), (i, 2)) for i in (1, 2))
    assert list(first) == [[0, 1]] and list(second) == [[2, 3], [4]] and second.size == 3
    assert [list(part) for part, _ in second.numbered()] == [[2, 3], [4]]


@pytest.mark.parametrize(
    ("done", "expected"), [(2, [[2, 3], [4], [10, 11], [12]]), (5, [[10, 11], [12]]), (6, [[11, 12]]), (8, [])]
)
def test_a_pass_goes_on_after_samples_that_are_done(done, expected):
    loader = in_order([FIVE, THREE], Batching(2, numbers))
    assert [batch for _, batch in loader.numbered(done)] == expected
    lines = []
    later = list(Pass(loader, lambda _, batch: batch, "training set", lines.append).after(done))
    assert [batch for _, batch in later] == expected and [count for count, _ in later][-1:] in ([8], [])
    assert lines == [f"leverage: training set, goes on after {done} of 8 frames"]


def test_loaders_of_a_fit():
    training, validation = TensorDataset(torch.arange(40)), TensorDataset(torch.arange(2))
    loaders = fit_loaders(training, [validation], Batching(20, numbers), Batching(1, numbers))
    assert [len(loader) for loader in loaders] == [2, 2, 1]
    # Four training samples for each of the validation set.
    assert list(loaders[2]) == [list(range(0, 40, 5))]


def test_long_validation_sets_are_sampled_each_by_itself(monkeypatch):
    monkeypatch.setattr(batches, "MAX_CONFIGURATIONS", 10)
    long, short = TensorDataset(torch.arange(1000)), TensorDataset(torch.arange(2000, 2003))
    training = TensorDataset(torch.arange(130))
    sets = [[long, short], [ConcatDataset([long, short])]]
    for validation in sets:
        _, loader, subset = fit_loaders(training, validation, Batching(7, numbers), Batching(1000, numbers))
        chosen = [number for batch in loader for number in batch]
        assert chosen[10:] == [2000, 2001, 2002] and chosen[:10] == sorted(set(chosen[:10]))
        # Of all of it.
        assert chosen[0] < 300 and chosen[9] > 700
        assert subset.size == 65


def test_batching_of_a_loader():
    like = torch.utils.data.DataLoader(FIVE, batch_size=3, shuffle=True, collate_fn=numbers)
    assert list(in_order([FIVE], Batching.of(like))) == [[0, 1, 2], [3, 4]]
    assert Batching.of(torch.utils.data.DataLoader(FIVE, batch_size=None, collate_fn=numbers)).batch_size == 1


def test_long_passes_say_how_far_they_are_and_how_long_they_take(monkeypatch):
    clock = iter(range(0, 1000, 60))
    monkeypatch.setattr(batches.time, "monotonic", lambda: float(next(clock)))
    lines = []
    five = in_order([FIVE], Batching(1, numbers))
    assert list(Pass(five, lambda _, batch: batch, "training set", lines.append)) == [[0], [1], [2], [3], [4]]
    assert lines[0] == "leverage: training set, 0 of 5 frames"
    # A frame a minute, and one more for the first call.
    assert lines[2] == "leverage: training set, 2 of 5 frames, 4 min left" and len(lines) == 5
    monkeypatch.setattr(batches, "SECONDS_BETWEEN_LINES", 90.0)
    del lines[:]
    assert len(list(Pass(five, lambda _, batch: batch, "training set", lines.append))) == 5
    assert len(lines) == 2


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA"), MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_a_batch_that_is_too_large(error, monkeypatch):
    def run(_, batch):
        if len(batch) > 1 or batch == [4]:
            raise error
        return batch

    def passes(size):
        return list(Pass(in_order([FIVE], Batching(size, numbers)), run, "training set", print))

    with pytest.raises(ResumableError, match=r"training set: a batch of 4 frames is too large.*--batch-size 2; a"):
        passes(4)
    with pytest.raises(ResumableError, match="a single frame is too large"):
        passes(1)
    monkeypatch.setattr(batches, "distributed", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    with pytest.raises(type(error)):
        passes(4)


def test_other_errors_stay_what_they_are():
    def run(_, batch):
        raise RuntimeError("of the model")

    with pytest.raises(RuntimeError, match="of the model"):
        list(Pass(in_order([FIVE], Batching(2, numbers)), run, "training set", print))
