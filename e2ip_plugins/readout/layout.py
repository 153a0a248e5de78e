"""Layout of the features that the readout reads, as the adapters describe it: nothing else knows NequIP's or MACE's."""

from typing import Any, Iterable, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

#: (first column, channels) of every block of one irrep.
Blocks = List[Tuple[int, int]]


class Layout(NamedTuple):
    """Blocks of 0e, 1o and 2e channels in feature tensors; other irreps are never used.

    Attributes
    ----------
    scalars : list of (int, int)
        0e, in the invariant features (which may be the same tensor as the others).
    vectors, tensors : list of (int, int)
        1o and 2e, in the equivariant features.
    components_first : bool
        Whether a block holds all channels of its first component first (ir_mul, cuEquivariance) or all components of
        its first channel (mul_ir, e3nn).
    num_radial : int
        Radial functions of an edge. Without 2e channels, edges are pooled.
    num_senders : int
        Scalars of an edge's sender; 0: its 0e features.
    num_species : int
    strictly_local : bool
        Whether an atom's outputs must not depend on atoms beyond its cutoff.
    """

    scalars: Blocks
    vectors: Blocks
    tensors: Blocks
    components_first: bool = False
    num_radial: int = 0
    num_senders: int = 0
    num_species: int = 1
    strictly_local: bool = False


class Edges(NamedTuple):
    """Edges, as the edge pool reads them.

    Attributes
    ----------
    vectors : (E, 3)
        In Å, either direction.
    radial : (E, num_radial)
        Radial functions that go to zero at the cutoff.
    sender, receiver : (E,) int
    senders : (N′, num_senders), optional
        Scalars of all atoms, ghosts included; None: the 0e features.
    """

    vectors: Tensor
    radial: Tensor
    sender: Tensor
    receiver: Tensor
    senders: Optional[Tensor] = None


def blocks(layers: Iterable[Any], l: int, parity: int) -> Blocks:
    """Return the blocks of an irrep in features that concatenate layers.

    Parameters
    ----------
    layers
        Irreps of each layer, of any e3nn version: iterables of (multiplicity, irrep with ``l`` and ``p``).

    Examples
    --------
    >>> from types import SimpleNamespace as Irrep
    >>> blocks([[(8, Irrep(l=0, p=1)), (4, Irrep(l=1, p=-1))], [(8, Irrep(l=0, p=1))]], l=0, parity=1)
    [(0, 8), (20, 8)]
    """
    columns, start = [], 0
    for irreps in layers:
        for mul, ir in irreps:
            if mul > 0 and ir.l == l and ir.p == parity:
                columns.append((start, mul))
            start += mul * (2 * ir.l + 1)
    return columns


def count(columns: Blocks) -> int:
    """Return the number of channels in all blocks."""
    return sum(channels for _, channels in columns)


def gather(features: Tensor, columns: List[Tuple[int, int]], dim: int, components_first: bool = False) -> Tensor:
    """Return the channels (N, C, dim) of one irrep out of features (N, F)."""
    rows = features.shape[0]
    parts: List[Tensor] = []
    for start, channels in columns:
        block = features[:, start : start + channels * dim]
        # explicit sizes: -1 is ambiguous when there are no atoms
        if components_first:
            parts.append(block.reshape(rows, dim, channels).transpose(1, 2))
        else:
            parts.append(block.reshape(rows, channels, dim))
    if len(parts) == 0:
        return features.new_zeros((rows, 0, dim))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def gather_scalars(features: Tensor, columns: List[Tuple[int, int]]) -> Tensor:
    """Return the channels (N, C) of 0e blocks."""
    parts = [features[:, start : start + channels] for start, channels in columns]
    if len(parts) == 0:
        return features.new_zeros((features.shape[0], 0))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def sum_over_edges(features: Tensor, centre: Tensor, num_atoms: int) -> Tensor:
    """Return edge features (E, F) summed over every atom's edges (N, F), for models without features of atoms."""
    return features.new_zeros((num_atoms, features.shape[1])).index_add_(0, centre, features)
