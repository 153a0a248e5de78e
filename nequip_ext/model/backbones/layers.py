"""Small networks that both backbones are made of."""

from typing import Optional, Tuple

import torch
from torch import Tensor, nn


class LayerNorm(nn.Module):
    """(z - mean z) / √(mean (z - mean z)² + ε) over the last axis, with a gain and an offset if wanted.

    It is written out because NequIP's graphs for training (``make_fx``) lose the derivative of the fused operator
    through mean and variance: energies and forces stay right, but weight gradients of a loss on forces do not.

    Parameters
    ----------
    size : int, optional
        Channels of gain (initially 1) and offset (initially 0); None: neither.
    epsilon : float
    """

    def __init__(self, size: Optional[int] = None, epsilon: float = 1e-5) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.gain = None if size is None else nn.Parameter(torch.ones(size))
        self.offset = None if size is None else nn.Parameter(torch.zeros(size))

    def forward(self, z: Tensor) -> Tensor:
        """Return normalised z, of the same shape."""
        centred = z - z.mean(-1, keepdim=True)
        normalised = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.epsilon)
        if self.gain is None or self.offset is None:
            return normalised
        return normalised * self.gain + self.offset


def xavier(linear: nn.Linear) -> nn.Linear:
    """Give a layer Xavier-uniform weights and zero bias, and return it."""
    nn.init.xavier_uniform_(linear.weight)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
    return linear


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """Return Lin(hidden → outputs) SiLU Lin(inputs → hidden), with torch's initial values."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.SiLU(), nn.Linear(hidden, outputs))


def xavier_mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """Return `mlp` with the initial values of `xavier`."""
    return nn.Sequential(xavier(nn.Linear(inputs, hidden)), nn.SiLU(), xavier(nn.Linear(hidden, outputs)))


def split(features: Tensor, channels: int) -> Tuple[Tensor, Tensor]:
    """Return scalars (N, F) and vectors (N, 3, F) of node features between layers (N, 4F), or zero vectors of (N, F).

    All channels of x come first, then those of y and z: sums and products of short rows of three are slow.
    """
    atoms = features.shape[0]
    if features.shape[1] == channels:
        return features, features.new_zeros((atoms, 3, channels))
    # Not by slices, whose gradients would be tensors of zeros as large as all features.
    scalars, vectors = features.split((channels, 3 * channels), dim=1)
    return scalars, vectors.reshape(atoms, 3, channels)


def join(scalars: Tensor, vectors: Tensor) -> Tensor:
    """Return node features (N, 4F) of scalars (N, F) and vectors (N, 3, F)."""
    return torch.cat([scalars, vectors.reshape(vectors.shape[0], 3 * vectors.shape[2])], dim=1)


def channels_first(features: Tensor, channels: int) -> Tensor:
    """Return node features in e3nn's order "F×0e + F×1o" (N, 4F), where x, y and z of a channel are together."""
    scalars, vectors = split(features, channels)
    return join(scalars, vectors.transpose(1, 2).reshape(vectors.shape))


class Mixing(nn.Module):
    """Linear maps V and U (N, 3, F) of an atom's vectors; without bias, because a constant vector would not turn.

    Parameters
    ----------
    channels : int
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.linear = xavier(nn.Linear(channels, 2 * channels, bias=False))

    def forward(self, vectors: Tensor) -> Tuple[Tensor, Tensor]:
        """Return V and U of vectors (N, 3, F)."""
        atoms, _, channels = vectors.shape
        # As one matrix, because torch multiplies stacks in two ways, depending on whether weights need a gradient, and
        # `forces: fixed` promises the last bit.
        mixed = self.linear(vectors.reshape(3 * atoms, channels)).reshape(atoms, 3, 2 * channels)
        left, right = mixed.chunk(2, dim=-1)
        return left, right
