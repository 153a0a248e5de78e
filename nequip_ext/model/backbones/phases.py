"""Complex channels of edges and of atoms in real arithmetic, because NequIP's compilers have no complex kernels.

See AlphaNet in docs/develop/networks.md.
"""

import math

import torch
from torch import Tensor, nn

from nequip_ext.model.backbones.layers import mlp

#: Number of groups of an edge's channels; only the scale of the kernel depends on it.
GROUPS = 16


def rotate(scalars: Tensor, angles: Tensor) -> Tensor:
    """Turn the two halves of scalars (N, H) into one another by angles (N, H / 2)."""
    left, right = scalars.chunk(2, dim=1)
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat([left * cosine - right * sine, left * sine + right * cosine], dim=1)


class EdgePhases(nn.Module):
    """Phases of edges from a contraction w ∈ C^χ₁.

    With c = K₀ + q K of complex channels q of the message, and gates α of the filter, g = Σ_k c_k (W_D (α_k δ + 1) +
    c_D) and w = Lin_φ(Re g) + i Lin_φ(Im g). Everything after c is linear: two complex numbers of each edge,
    Σ_k α_k c_k and Σ_k c_k, times vectors of weights give the same and are cheaper.

    Parameters
    ----------
    features : int
        H of the message.
    channels : int
        X, a multiple of `GROUPS`.
    phases, rank : int
        χ₁ and χ₂.
    epsilon : float
        ε of the phases [Re w | Im w] / √(|w|² + ε²), 2χ₁ numbers; 0: arg w instead, χ₁ numbers, which jump by 2π.
    """

    def __init__(self, features: int, channels: int, phases: int, rank: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.channels, self.rank = channels, rank
        self.size = 2 * phases if epsilon else phases
        self.norm = 1.0 / math.sqrt(features // GROUPS)
        self.into = nn.Linear(features, 2 * channels)
        # Real and imaginary part; the first group is the constant.
        self.kernel = nn.Parameter(torch.randn(2, GROUPS + 1, channels // GROUPS, rank))
        self.gates = mlp(3 * features, channels // 2, rank)
        self.delta = nn.Parameter(torch.randn(phases))
        self.weigh = nn.Linear(phases, phases)
        self.out = nn.Linear(phases, phases)

    def contract(self, messages: Tensor, filters: Tensor) -> Tensor:
        """Return w (M, 2, χ₁), real and imaginary part, of m₁ (M, H) and filters (M, 3H)."""
        kernel = self.norm * self.kernel
        real, imaginary = kernel[:, 1:].reshape(2, self.channels, self.rank).unbind(0)
        matrix = torch.cat([torch.cat([real, imaginary], dim=1), torch.cat([-imaginary, real], dim=1)])
        c = torch.matmul(self.into(messages), matrix) + kernel[:, 0].sum(1).reshape(2 * self.rank)
        c = c.reshape(messages.shape[0], 2, self.rank)
        gates = nn.functional.silu(self.gates(filters))
        gated, plain = (c * gates.unsqueeze(1)).sum(2), c.sum(2)
        weights = self.out.weight
        by_gated = torch.mv(weights, torch.mv(self.weigh.weight, self.delta))
        by_plain = torch.mv(weights, self.weigh.weight.sum(1) + self.weigh.bias)
        return gated.unsqueeze(2) * by_gated + plain.unsqueeze(2) * by_plain + self.out.bias

    def forward(self, messages: Tensor, filters: Tensor) -> Tensor:
        """Return phases (M, ``size``)."""
        w = self.contract(messages, filters)
        if not self.epsilon:
            return torch.atan2(w[:, 1], w[:, 0])
        w = w * torch.rsqrt(w.square().sum(1, keepdim=True) + self.epsilon**2)
        return w.reshape(w.shape[0], self.size)


class PhaseState(nn.Module):
    """States of atoms: ψ_k ← Σ_hl K_hkl s_h ψ_l, then every element is scaled to a modulus of about 1.

    Parameters
    ----------
    features, states : int
        H and C.
    epsilon : float
        ε of the scaling ψ̃ / √(|ψ̃|² + ε²) with ψ̃ = ψ / √(HC); 0: ψ / (|ψ| + 1e-9) instead, singular at 0.
    """

    def __init__(self, features: int, states: int, epsilon: float) -> None:
        super().__init__()
        self.states = states
        self.epsilon = epsilon
        self.norm = 1.0 / math.sqrt(features * states) if epsilon else 1.0
        self.kernel = nn.Parameter(torch.randn(features, 2, states, states))

    def forward(self, scalars: Tensor, state: Tensor) -> Tensor:
        """Return ψ (N, 2C), real and imaginary part, of scalars (N, H) and the previous ψ."""
        atoms, states = scalars.shape[0], self.states
        matrices = torch.matmul(scalars, self.kernel.reshape(-1, 2 * states * states))
        products = torch.bmm(
            matrices.reshape(atoms, 2 * states, states), state.reshape(atoms, 2, states).transpose(1, 2)
        ).reshape(atoms, 2, states, 2)
        real = products[:, 0, :, 0] - products[:, 1, :, 1]
        imaginary = products[:, 0, :, 1] + products[:, 1, :, 0]
        psi = self.norm * torch.stack([real, imaginary], dim=1)
        square = psi.square().sum(1, keepdim=True)
        psi = psi * torch.rsqrt(square + self.epsilon**2) if self.epsilon else psi / (square.sqrt() + 1e-9)
        return psi.reshape(atoms, 2 * states)
