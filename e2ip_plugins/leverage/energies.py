r"""The error vector of a frame's energy: how sure a force readout is of energies and of their differences.

A force is the gradient of the energy, so that the error of an energy is that of the forces times the length of a way
from what the model knows. Each atom i contributes an amplitude and a direction::

    u = ℓ Σ_i s_i φ(z_i),   s_i = σ_i h_i^(1/4) + f,

with σ_i = √(tr Σ_i / 3) of its force, h = d/2 the mean of its leverage and those around it, z its whitened features
(`e2ip_plugins.leverage.form`), and ℓ a length that is fitted to validation energies. f is a tenth of what σ typically
is: forces that vanish by symmetry tell nothing about energies. φ has length 1, and the product of two φ is near 1 for
like environments and near 0 for unlike ones: random Fourier features (Rahimi and Recht 2007) of
exp(-|z - z'|²/(2 λ² D)), in a block of numbers for each species.

The error of every energy is u · r with one random vector r ~ N(0, 1) for all frames of a model, so that |u| is the
standard deviation of an energy, and |u - u'| that of a difference. Atoms of like environments err alike, others
independently: n copies of a frame have n times its |u|.
"""

import math
from typing import Final, Optional

import torch
from torch import Tensor, nn

from e2ip_plugins.leverage.form import FORM, Support

#: Power of h in the amplitude; f in units of the geometric mean of σ over validation atoms; λ. docs/energies.md has the
#: tables from which they were chosen.
POWER, FLOOR, WIDTH = 0.25, 0.1, 0.35

#: Blocks at most; of more species some share a block, and count as one species.
MAX_BLOCKS = 16

#: Fourier features of a block, of two numbers each: where there are up to `FEW_BLOCKS`, and where there are more.
FEW_BLOCKS, MANY_WAVES, FEW_WAVES = 4, 32, 16


class EnergyErrors(nn.Module):
    """Error vectors u (F, M) in eV of frames; buffers only, no weights.

    Parameters
    ----------
    num_scalars : int
        0e features D.
    num_species, num_heads : int

    Attributes
    ----------
    blocks, length : int
        Of a vector: M is their product.
    """

    blocks: Final[int]
    length: Final[int]
    power: Final[float] = POWER
    per_component: Final[float] = 3**-0.5
    directions: Tensor  # (D, length): one wave for its cosine, the same one for its sine
    phases: Tensor  # (length,)
    block_of_species: Tensor  # (species,)
    lengths: Tensor  # (heads,): ℓ in Å, 0 where it was not fitted
    floors: Tensor  # (heads,): f in units of a force

    def __init__(self, num_scalars: int, num_species: int, num_heads: int = 1) -> None:
        super().__init__()
        self.blocks = min(num_species, MAX_BLOCKS)
        waves = MANY_WAVES if self.blocks <= FEW_BLOCKS else FEW_WAVES
        self.length = 2 * waves
        # The same for all models of as many features; `whitened` of `Support` is z/√τ.
        drawn = torch.randn(num_scalars, waves, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        drawn *= math.sqrt(FORM.soft / num_scalars) / WIDTH
        self.register_buffer("directions", drawn.repeat(1, 2).to(torch.get_default_dtype()))
        self.register_buffer("phases", torch.tensor([0.0, -0.5 * math.pi]).repeat_interleave(waves))
        self.register_buffer("block_of_species", torch.arange(num_species) % self.blocks)
        self.register_buffer("lengths", torch.zeros(num_heads))
        self.register_buffer("floors", torch.zeros(num_heads))

    def forward(
        self,
        support: Support,
        std: Tensor,
        species: Tensor,
        heads: Optional[Tensor] = None,
        frames: Optional[Tensor] = None,
        num_frames: int = 1,
        grows: bool = True,
    ) -> Tensor:
        """Return u (F, M), zero where ℓ was not fitted.

        Parameters
        ----------
        support : Support
        std : (N, 1)
            √(tr Σ), in units of a force.
        species : (N,) int
        heads : (N,) int, optional
        frames : (N,) int, optional
            Frame of every atom; None: all are of one.
        num_frames : int
        grows : bool
            Whether amplitudes grow with the leverage; False for readouts that do not use it.
        """
        lengths, floors = self.lengths, self.floors
        if heads is not None and lengths.shape[0] > 1:
            lengths, floors = lengths[heads].unsqueeze(1), floors[heads].unsqueeze(1)
        return self.sums(support, lengths * self.amplitudes(support, std, floors, grows), species, frames, num_frames)

    def amplitudes(self, support: Support, std: Tensor, floors: Tensor, grows: bool) -> Tensor:
        """Return s (N, 1)."""
        if not grows:
            return torch.add(floors, std, alpha=self.per_component)
        growth = (0.5 * support.distance).pow(self.power).unsqueeze(1)
        return torch.addcmul(floors, std, growth, value=self.per_component)

    def sums(
        self, support: Support, amplitudes: Tensor, species: Tensor, frames: Optional[Tensor], num_frames: int
    ) -> Tensor:
        """Return Σ_i s_i φ(z_i) (F, M) for amplitudes (N, 1)."""
        # cos(x - π/2) = sin x: one operation.
        waves = torch.addmm(self.phases, support.whitened, self.directions).cos()
        place = self.block_of_species.index_select(0, species)
        if frames is not None:
            place = torch.add(place, frames, alpha=self.blocks)
        sums = waves.new_zeros(num_frames * self.blocks, self.length)
        # A wave and its sine have length 1 together.
        unit = (0.5 * self.length) ** -0.5
        return sums.index_add_(0, place, waves * amplitudes, alpha=unit).reshape(num_frames, -1)
