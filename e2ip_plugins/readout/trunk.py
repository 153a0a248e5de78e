"""The readout: equivariant node features to the NIW parameters of every atom's force.

Pure torch, scriptable, traceable. Features come as plain tensors: 0e scalars (N, C), 1o vectors
(N, C, 3) in x, y, z order and 2e tensors (N, C, 5) in e3nn's order; the adapters know how their host
lays them out. Everything else (parities 0o, 1e, 2o, …) must be left out by the adapter.
"""

import math
from typing import Dict, Final, Optional, Tuple

import torch
from torch import Tensor, nn

from e2ip_plugins.families.presets_tmp import TENSOR_DAMPER, get_preset, resolve_evidence
from e2ip_plugins.maths.kernels import distribution
from e2ip_plugins.maths.spd import SymmetricTracelessPart


class EvidentialHead(nn.Module):
    """0e + 2e coefficients, ν and κ from what the host offers, gated by its scalars.

    The 2e coefficients are Σ_c g_c(h) (W t)_c over the host's 2e channels (edge pools included) plus
    Σ_k g_k(h) [a_k ⊗ b_k]_2e over learned pairs of its 1o channels; gates g, the scalar coefficient
    and the evidence come from one hidden layer on the 0e features h. Only invariant weights multiply
    equivariant features, so Σ0 transforms as R Σ0 Rᵀ under rotations and reflections.

    Parameters
    ----------
    num_scalars, num_vectors, num_tensors : int
        Channels of 0e, 1o and 2e features; at least one of the latter two is positive.
    evidence_mode : str, optional
        ``independent`` or ``coupled``; default: the preset's.
    preset : str
    force_unit : float
        σ_ref in eV/Å, saved with the model.
    hidden, channels : int
        Width of the hidden layer; 2e terms of each kind.
    seed : int
        Of the initial weights, which are drawn without touching torch's global random stream.
    double_outputs : bool
        Whether a float32 head's outputs are float64, from the coefficients on.
    """

    has_vectors: Final[bool]
    has_tensors: Final[bool]
    coupled: Final[bool]
    double_outputs: Final[bool]

    def __init__(
        self,
        num_scalars: int,
        num_vectors: int = 0,
        num_tensors: int = 0,
        evidence_mode: Optional[str] = None,
        preset: str = "default",
        force_unit: float = 1.0,
        hidden: int = 32,
        channels: int = 8,
        seed: int = 0,
        double_outputs: bool = False,
    ) -> None:
        super().__init__()
        if num_scalars < 1 or num_vectors + num_tensors < 1:
            raise ValueError("EvidentialHead needs 0e features and at least one 1o or 2e channel")
        chosen = get_preset(preset)
        self.coupled = resolve_evidence(chosen, evidence_mode) == "coupled"
        self.scalar_damper: Tuple[float, float] = chosen.scalar_damper
        self.tensor_damper: Tuple[float, float] = TENSOR_DAMPER
        self.has_vectors = num_vectors > 0
        self.has_tensors = num_tensors > 0
        self.double_outputs = double_outputs
        self.channels = channels
        num_gates = channels * (int(self.has_vectors) + int(self.has_tensors))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.hidden = nn.Linear(num_scalars, hidden)
            self.out = nn.Linear(hidden, 3 + num_gates)
            # Plain matrices, scaled to keep variance: a bias would break equivariance.
            pairs = torch.cat([torch.randn(num_vectors, channels) for _ in range(2)], dim=1)
            self.mix_vectors = nn.Parameter(pairs / math.sqrt(max(1, num_vectors)))
            self.mix_tensors = nn.Parameter(torch.randn(num_tensors, channels) / math.sqrt(max(1, num_tensors)))
        # Near isotropy at the start, but not at t = 0 exactly: gates and mixers learn at once.
        with torch.no_grad():
            self.out.weight.mul_(0.1)
            self.out.bias.zero_()
            self.out.bias[0] = 2.0 * math.sqrt(3.0) * math.log(chosen.initial_sigma)
        self.register_buffer("force_unit", torch.tensor(float(force_unit)))
        self.traceless_part = SymmetricTracelessPart()

    def forward(self, scalars: Tensor, vectors: Tensor, tensors: Tensor) -> Dict[str, Tensor]:
        """Distribution parameters (see `e2ip_plugins.keys`) of N atoms.

        Parameters
        ----------
        scalars : (N, num_scalars)
        vectors : (N, num_vectors, 3)
        tensors : (N, num_tensors, 5)
            Without channels of a kind, any tensor will do: it is not read.

        Returns
        -------
        dict
            ``e2ip_log_sigma0`` (N, 6), ``e2ip_nu``, ``e2ip_kappa`` (N,), and for `derive_niw` and the loss
            ``e2ip_sigma0_sym6`` (N, 6), ``e2ip_force_unit`` (N,), σ_ref in eV/Å, ``e2ip_plateau`` (N,), 1 where a
            damper is past its knee, and ``e2ip_coefficients`` (N, 8), what the map and the evidence are made of.
        """
        invariants = self.out(torch.nn.functional.silu(self.hidden(scalars)))
        t = self._anisotropy(invariants[:, 3:], vectors, tensors)
        coefficients = torch.cat([invariants[:, :1], t, invariants[:, 1:3]], dim=1)
        force_unit = self.force_unit
        if self.double_outputs:
            coefficients, force_unit = coefficients.double(), force_unit.double()
        s, t = coefficients[:, 0], coefficients[:, 1:6]
        raw_nu, raw_kappa = coefficients[:, 6], coefficients[:, 7]
        # `coupled` ignores the third output: a fixed layout keeps saved models readable in both modes.
        used_kappa: Optional[Tensor] = None
        if not self.coupled:
            used_kappa = raw_kappa
        log_sigma0, sigma0, nu, kappa, plateau = distribution(
            s, t, raw_nu, used_kappa, force_unit, self.scalar_damper, self.tensor_damper
        )
        return {
            "e2ip_log_sigma0": log_sigma0,
            "e2ip_nu": nu,
            "e2ip_kappa": kappa,
            "e2ip_sigma0_sym6": sigma0,
            "e2ip_force_unit": force_unit.expand(s.shape[0]),
            "e2ip_plateau": plateau,
            "e2ip_coefficients": coefficients,
        }

    def _anisotropy(self, gates: Tensor, vectors: Tensor, tensors: Tensor) -> Tensor:
        """2e coefficients (N, 5); sums over channels come first, which leaves few and small operations."""
        t: Optional[Tensor] = None
        if self.has_tensors:
            # Σ_c g_c (W t)_c = Σ_k (W g)_k t_k
            weights = torch.matmul(gates[:, : self.channels], self.mix_tensors.t())
            t = torch.bmm(weights.unsqueeze(1), tensors).squeeze(1)
        if self.has_vectors:
            mixed = torch.matmul(vectors.transpose(1, 2), self.mix_vectors)
            left = mixed[:, :, : self.channels] * gates[:, -self.channels :].unsqueeze(1)
            pairs = torch.bmm(left, mixed[:, :, self.channels :].transpose(1, 2))
            products = self.traceless_part(pairs)
            t = products if t is None else t + products
        assert t is not None
        return t


class EdgePool(nn.Module):
    """2e node channels from the neighbourhood: Σ_j (W_r φ(r_ij)) · (W_h h_j) Y2(r̂_ij).

    A source of anisotropy for models without 2e node features, also at inversion-symmetric sites,
    where products of two vectors vanish. φ are the host's radial functions, which go to zero at the
    cutoff, so the result is smooth.

    Parameters
    ----------
    num_scalars, num_radial, channels : int
    seed : int
    """

    def __init__(self, num_scalars: int, num_radial: int, channels: int = 8, seed: int = 0) -> None:
        super().__init__()
        self.channels = channels
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.from_radial = nn.Linear(num_radial, channels, bias=False)
            self.from_sender = nn.Linear(num_scalars, channels)
        self.traceless_part = SymmetricTracelessPart()

    def forward(
        self, edge_vectors: Tensor, radial: Tensor, scalars: Tensor, sender: Tensor, receiver: Tensor
    ) -> Tensor:
        """2e features (N, channels, 5).

        Parameters
        ----------
        edge_vectors : (E, 3)
            In Å, either direction.
        radial : (E, num_radial)
            Radial functions including the cutoff.
        scalars : (N, num_scalars)
            0e node features.
        sender, receiver : (E,) int
        """
        unit = edge_vectors / torch.linalg.vector_norm(edge_vectors, dim=-1, keepdim=True)
        weight = self.from_radial(radial) * self.from_sender(scalars)[sender]
        terms = weight.unsqueeze(-1) * self.traceless_part(unit.unsqueeze(-1) * unit.unsqueeze(-2)).unsqueeze(1)
        pooled = torch.zeros(scalars.shape[0], self.channels, 5, dtype=terms.dtype, device=terms.device)
        return pooled.index_add(0, receiver, terms)
