"""Where features lie: both orders of channels and components, several layers, no atoms."""

from types import SimpleNamespace

import torch

from e2ip_plugins.readout.layout import blocks, count, gather, gather_scalars, sum_over_edges


def irreps(*parts):
    return [(mul, SimpleNamespace(l=l, p=p)) for mul, l, p in parts]


LAYERS = [irreps((4, 0, 1), (2, 1, -1), (3, 1, 1), (1, 2, 1)), irreps((0, 1, -1), (2, 0, 1), (5, 1, -1))]


def test_blocks_of_one_irrep_in_all_layers():
    assert blocks(LAYERS, 0, 1) == [(0, 4), (24, 2)]
    assert blocks(LAYERS, 1, -1) == [(4, 2), (26, 5)]
    assert blocks(LAYERS, 2, 1) == [(19, 1)] and blocks(LAYERS, 2, -1) == []
    assert count(blocks(LAYERS, 1, -1)) == 7


def test_both_orders_give_the_same_channels():
    vectors = torch.randn(5, 7, 3)
    channels_first = torch.cat([torch.zeros(5, 4), vectors.flatten(1)], dim=1)
    components_first = torch.cat([torch.zeros(5, 4), vectors.transpose(1, 2).flatten(1)], dim=1)
    assert torch.equal(gather(channels_first, [(4, 7)], 3), vectors)
    assert torch.equal(gather(components_first, [(4, 7)], 3, True), vectors)
    assert torch.equal(gather(channels_first, [(4, 2), (10, 5)], 3), vectors)


def test_nothing_to_gather_and_no_atoms():
    assert gather(torch.randn(5, 8), [], 3).shape == (5, 0, 3)
    assert gather(torch.randn(0, 8), [(0, 2)], 3).shape == (0, 2, 3)
    assert torch.equal(gather_scalars(torch.arange(6.0).view(2, 3), [(1, 2)]), torch.tensor([[1.0, 2.0], [4.0, 5.0]]))


def test_edges_are_summed_at_their_centre():
    features = torch.tensor([[1.0], [2.0], [4.0]])
    assert sum_over_edges(features, torch.tensor([2, 0, 2]), 4).flatten().tolist() == [2.0, 0.0, 5.0, 0.0]
