"""Frames of edges and scalars that vectors have in them; docs/develop/networks.md, AlphaNet."""

import math

import torch
from torch import Tensor, nn

from nequip_ext.model.backbones.layers import mlp


def edge_frames(vectors: Tensor, mean: Tensor) -> Tensor:
    """Return orthogonal vectors f₁ = r̂, f₂ = r × d, f₃ = f₁ × f₂ of every edge (M, 3, 3), one in each row.

    They are not normalised, because f₂ and f₃ vanish where r and d are parallel.

    Parameters
    ----------
    vectors : (M, 3)
        r in Å.
    mean : (M, 3)
        d, the mean neighbour of the atom that receives, in Å.
    """
    first = vectors / vectors.square().sum(1, keepdim=True).sqrt()
    # Without dim the axis would be the first of length 3, which is the wrong one for three edges.
    second = torch.linalg.cross(vectors, mean, dim=1)
    return torch.stack([first, second, torch.linalg.cross(first, second, dim=1)], dim=1)


class Scalarisation(nn.Module):
    """t_h = (MLP(p₁, p₂², p₃)_h + p₁)/√H with p_a = f_a·Q_h: one network for all channels h.

    p₂ is a pseudoscalar, because f₂ is axial. Its square makes energies invariant to reflections, and smooth for planar
    molecules.

    Parameters
    ----------
    channels : int
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = 1.0 / math.sqrt(channels)
        self.network = mlp(3, channels // 4, 1)

    def forward(self, frames: Tensor, vectors: Tensor) -> Tensor:
        """Return t (M, H) of vectors Q (M, 3, H) in frames (M, 3, 3)."""
        along, normal, across = torch.bmm(frames, vectors).unbind(1)
        even = torch.stack([along, normal.square(), across], dim=2)
        return self.norm * (self.network(even).squeeze(2) + along)
