r"""The error vector of a frame's energy: how sure a force readout is of energies and of their differences.

A force is the gradient of the energy, so that the error of an energy is that of the forces times the length of a way
from what the model knows. Each atom i contributes an amplitude and a direction::

    u = ℓ Σ_i s_i φ(z_i),   s_i = σ_i (d_i/2)^(1/4) + f,

with σ_i = √(tr Σ_i / 3) of its force, d its distance from the training set, z its whitened features (both of
`e2ip_plugins.leverage.form`), and ℓ a length that is fitted to validation energies. f is a tenth of what σ typically
is: forces that vanish by symmetry tell nothing about energies. φ has length 1, and the product of two φ is near 1 for
like environments and near 0 for unlike ones: random Fourier features (Rahimi and Recht 2007) of
exp(-|z - z'|²/(2 λ² D)), in a block of numbers for each species.

The error of every energy is u · ξ with one random vector ξ ~ N(0, 1) for all frames of a model, so that |u| is the
standard deviation of an energy, and |u - u'| that of a difference. Atoms of like environments err alike, others
independently: n copies of a frame have n times its |u|.

Stress. It is the derivative of the energy in a strain over the volume V, and so is its error: with |u|/V for its size,
and two factors, of the hydrostatic and of the deviatoric part, that are fitted to validation stresses. Copies of a
crystal have the stress of one, and the same error.
"""

import math
from typing import Any, Dict, Final, Optional

import torch
from torch import Tensor, nn

from e2ip_plugins.leverage.form import FORM, Support

#: Power of d/2 in the amplitude; f in units of the geometric mean of σ over validation atoms; λ. Chosen from
#: benchmarks/results/energies.md (``benchmarks/energies.py table``).
POWER, FLOOR, WIDTH = 0.25, 0.1, 0.35

#: Blocks at most; of more species some share a block, and count as one species.
MAX_BLOCKS = 16

#: Fourier features of a block, of two numbers each: where there are up to `FEW_BLOCKS`, and where there are more.
FEW_BLOCKS, MANY_WAVES, FEW_WAVES = 4, 32, 16


class EnergyErrors(nn.Module):
    """Error vectors u (F, M) in eV of frames, and covariances of their stresses; buffers only, no weights.

    Parameters
    ----------
    num_scalars : int
        0e features D.
    num_species, num_heads : int

    Attributes
    ----------
    blocks, length : int
        Blocks of a vector, and numbers in each: M is their product.
    """

    blocks: Final[int]
    length: Final[int]
    #: 1/√3 of σ and (1/2)^(1/4) of d, in one.
    factor: Final[float] = 3**-0.5 * 0.5**POWER
    per_component: Final[float] = 3**-0.5
    power: Final[float] = POWER
    directions: Tensor  # (D, length): one wave for its cosine, the same one for its sine
    phases: Tensor  # (length,)
    lengths: Tensor  # (blocks, kinds): ℓ in Å / √(length/2) in the block of a kind (head and species); 0: not fitted
    block_of_species: Tensor  # (species,)
    floors: Tensor  # (heads,): f in units of a force
    stress_factors: Tensor  # (heads, 2), hydrostatic and deviatoric; (0, 2) where none were fitted
    projectors: Tensor  # (2, 36): on these parts of a stress in Voigt's order

    def __init__(self, num_scalars: int, num_species: int, num_heads: int = 1) -> None:
        super().__init__()
        self.blocks = min(num_species, MAX_BLOCKS)
        waves = MANY_WAVES if self.blocks <= FEW_BLOCKS else FEW_WAVES
        self.length = 2 * waves
        # The same for all models of as many features; `whitened` of `Support` is z/√τ.
        drawn = torch.randn(num_scalars, waves, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        drawn *= math.sqrt(FORM.soft / num_scalars) / WIDTH
        self.register_buffer("directions", drawn.repeat(1, 2).to(torch.get_default_dtype()))
        # cos(x - π/2) = sin x: one operation.
        self.register_buffer("phases", torch.tensor([0.0, -0.5 * math.pi]).repeat_interleave(waves))
        self.register_buffer("lengths", torch.zeros(self.blocks, num_heads * num_species))
        self.register_buffer("block_of_species", torch.arange(num_species) % self.blocks)
        self.register_buffer("floors", torch.zeros(num_heads))
        self.register_buffer("stress_factors", torch.zeros(0, 2))
        # Covariances of components: of one pressure, and of five traceless components of equal variance.
        normal = torch.diag(torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0]))
        pressure = normal.diag().outer(normal.diag())
        deviatoric = normal - pressure / 3.0 + 0.5 * (torch.eye(6) - normal)
        self.register_buffer("projectors", torch.stack([pressure, deviatoric]).reshape(2, 36))

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
        std : (N,)
            √(tr Σ), in units of a force.
        species : (N,) int
        heads : (N,) int, optional
        frames : (N,) int, optional
            Frame of every atom; None: all are of one.
        num_frames : int
        grows : bool
            Whether amplitudes grow with the leverage; False for readouts that do not use it.
        """
        kinds, floors = species, self.floors
        if heads is not None and floors.shape[0] > 1:
            kinds, floors = heads * self.block_of_species.shape[0] + species, floors[heads]
        amplitudes = self.amplitudes(support, std, floors, grows)
        if num_frames == 1:
            # Few and small operations: on a small molecule each costs what a thousand atoms would.
            weights = self.lengths.index_select(1, kinds) * amplitudes
            return torch.mm(weights, self.waves(support.whitened)).reshape(1, -1)
        lengths = self.lengths.sum(0).index_select(0, kinds) * (0.5 * self.length) ** 0.5
        return self.sums(support.whitened, lengths * amplitudes, species, frames, num_frames)

    def of_weights(
        self, weights: Tensor, whitened: Tensor, species: Tensor, frames: Optional[Tensor], num_frames: int
    ) -> Tensor:
        """Return u (F, M) where s_i and ℓ are known as their product (blocks, N), 0 except in the block of an atom."""
        if num_frames == 1:
            return torch.mm(weights, self.waves(whitened)).reshape(1, -1)
        return self.sums(whitened, weights.sum(0) * (0.5 * self.length) ** 0.5, species, frames, num_frames)

    def amplitudes(self, support: Support, std: Tensor, floors: Tensor, grows: bool) -> Tensor:
        """Return s (N,)."""
        if not grows:
            return torch.add(floors, std, alpha=self.per_component)
        # The mean of an atom's leverage and of those around it, which is finite in models that were not fitted, too.
        return torch.addcmul(floors, std, support.distance.pow(self.power), value=self.factor)

    def waves(self, whitened: Tensor) -> Tensor:
        """Return the block (N, length) of φ that is not 0, times √(length/2): a cosine and its sine have length 1."""
        return torch.addmm(self.phases, whitened, self.directions).cos()

    def sums(
        self, whitened: Tensor, amplitudes: Tensor, species: Tensor, frames: Optional[Tensor], num_frames: int
    ) -> Tensor:
        """Return Σ_i s_i φ(z_i) (F, M) for amplitudes (N,)."""
        place = self.block_of_species.index_select(0, species)
        if frames is not None:
            place = torch.add(place, frames, alpha=self.blocks)
        waves = self.waves(whitened)
        sums = waves.new_zeros(num_frames * self.blocks, self.length)
        unit = (0.5 * self.length) ** -0.5
        return sums.index_add_(0, place, waves * amplitudes.unsqueeze(1), alpha=unit).reshape(num_frames, -1)

    def set_head(self, head: int, length: float, floor: float) -> None:
        """Fill in the fitted ℓ in Å and f of a head."""
        species = torch.arange(len(self.block_of_species), device=self.lengths.device)
        self.lengths[self.block_of_species, head * len(species) + species] = length * (0.5 * self.length) ** -0.5
        self.floors[head] = floor

    def take_head(self, source: "EnergyErrors", head: int) -> None:
        """Become what ``source`` is for one of its heads."""
        species = len(self.block_of_species)
        self.lengths = source.lengths[:, head * species : (head + 1) * species].clone()
        for name in ("floors", "stress_factors"):
            setattr(self, name, getattr(source, name)[head : head + 1].clone())

    def make_stress_factors(self) -> None:
        """Make room for the factors of stresses, 0 for now."""
        self.stress_factors = self.floors.new_zeros(len(self.floors), 2)

    def reset(self) -> None:
        """Become unfitted."""
        self.lengths.zero_()
        self.stress_factors = self.stress_factors.new_zeros(0, 2)

    def stress_covariance(
        self, std: Tensor, volumes: Tensor, heads: Optional[Tensor] = None, frames: Optional[Tensor] = None
    ) -> Tensor:
        """Return the covariance (F, 6, 6) of stresses in Voigt's order, for fitted factors.

        Parameters
        ----------
        std : (F,)
            |u|.
        volumes : (F,)
        heads, frames : (N,) int, optional
        """
        factors = self.stress_factors
        if heads is not None and factors.shape[0] > 1:
            of_frames = torch.zeros_like(std, dtype=torch.long)
            if frames is None:
                of_frames = of_frames + heads[0]
            else:
                of_frames = of_frames.scatter(0, frames, heads)
            factors = factors[of_frames]
        # A molecule in a box of no size has no stress.
        scaled = factors * (std / volumes.clamp(min=1e-3)).unsqueeze(1)
        return torch.mm(scaled.square(), self.projectors.to(scaled.dtype)).reshape(-1, 6, 6)

    def _load_from_state_dict(self, state_dict: Dict[str, Tensor], prefix: str, *args: Any) -> None:
        saved = state_dict.get(prefix + "stress_factors")
        if saved is not None and saved.shape[1:] == (2,) and saved.shape[0] in (0, self.floors.shape[0]):
            self.stress_factors = self.stress_factors.new_zeros(saved.shape)
        super()._load_from_state_dict(state_dict, prefix, *args)
