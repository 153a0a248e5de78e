"""Batches of a pass: every sample once, in order, in shares, without random numbers."""

import pytest
import torch
from torch.utils.data import TensorDataset

from e2ip_plugins.fitting import batches
from e2ip_plugins.fitting.batches import Batching, fit_loaders, in_order, with_progress

FIVE, THREE = TensorDataset(torch.arange(5)), TensorDataset(torch.arange(10, 13))


def numbers(samples):
    return [int(number) for (number,) in samples]


def test_every_sample_comes_once_and_no_batch_is_of_two_data_sets():
    state = torch.random.get_rng_state()
    loader = in_order([FIVE, THREE], Batching(2, numbers))
    assert list(loader) == [[0, 1], [2, 3], [4], [10, 11], [12]] and len(loader) == 5
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(("rank", "expected"), [(0, [[0, 2], [4], [10, 12]]), (1, [[1, 3], [11]])])
def test_processes_share_every_data_set(monkeypatch, rank, expected):
    monkeypatch.setattr(batches, "distributed", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert list(in_order([FIVE, THREE], Batching(2, numbers))) == expected


def test_loaders_of_a_fit():
    training, validation = TensorDataset(torch.arange(40)), TensorDataset(torch.arange(2))
    loaders = fit_loaders(training, [validation], Batching(20, numbers), Batching(1, numbers))
    assert [len(loader) for loader in loaders] == [2, 2, 1]
    # Four training samples for each of the validation set.
    assert list(loaders[2]) == [list(range(0, 40, 5))]


def test_batching_of_a_loader():
    like = torch.utils.data.DataLoader(FIVE, batch_size=3, shuffle=True, collate_fn=numbers)
    assert list(in_order([FIVE], Batching.of(like))) == [[0, 1, 2], [3, 4]]
    assert Batching.of(torch.utils.data.DataLoader(FIVE, batch_size=None, collate_fn=numbers)).batch_size == 1


def test_long_passes_say_how_far_they_are(monkeypatch):
    monkeypatch.setattr(batches, "SECONDS_BETWEEN_LINES", -1.0)
    lines = []
    assert list(with_progress([7, 8], "training set", lines.append)) == [7, 8]
    assert lines == ["leverage: training set, 0 of 2 batches", "leverage: training set, 1 of 2 batches"]
    monkeypatch.setattr(batches, "SECONDS_BETWEEN_LINES", 60.0)
    assert list(with_progress(iter([7]), "training set", lines.append)) == [7] and len(lines) == 2
