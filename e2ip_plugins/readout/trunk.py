"""From equivariant features to the coefficients that a predictive family wants.

Pure torch, scriptable, traceable. Features are plain tensors: 0e scalars (N, C), 1o vectors (N, C, 3) in x, y, z order
and 2e tensors (N, C, 5) in e3nn's order.
"""

import math
from typing import Final, NamedTuple, Optional, Sequence

import torch
from torch import Tensor, nn

from e2ip_plugins.errors import InputError
from e2ip_plugins.maths.spd import SymmetricTracelessPart, sym6_to_matrix


class EdgeTensors(NamedTuple):
    """2e features of every atom i, Σ_j w_ij Y2(r̂_ij), channel by channel of w, that are not summed yet.

    Attributes
    ----------
    weights : (E, C)
        w_ij.
    vectors : (E, 3)
        r_ij, of any length and either direction.
    receiver : (E,) int
    """

    weights: Tensor
    vectors: Tensor
    receiver: Tensor


class Trunk(nn.Module):
    """0e and, where wanted, 2e coefficients from equivariant features, gated by the scalars.

    The 2e coefficients are Σ_c g_c(h) (W t)_c over the 2e channels (edge pools included) plus
    Σ_k g_k(h) [a_k ⊗ b_k]_2e over learned pairs of the 1o channels; gates g and the 0e coefficients come from one
    hidden layer on the 0e features h. Only invariant weights multiply equivariant features, so a family's Σ transforms
    as R Σ Rᵀ under rotations and reflections.

    Parameters
    ----------
    num_scalars, num_vectors, num_tensors : int
        Channels of 0e, 1o and 2e features.
    wanted_scalars, wanted_tensors : int
        Coefficients: 0e ones, and 0 or 1 of 2e, for which one of the latter two kinds of features is needed.
    initial_scalars : sequence of float
        Where the 0e coefficients start. Empty: they have no constants. Their size is then a further weight on a
        logarithmic scale: the gradients of untrained features differ by orders of magnitude between models.
    hidden, channels : int
        Width of the hidden layer; 2e terms of each kind.
    seed : int
        Of the initial weights, which are drawn without touching torch's global random stream.
    """

    #: Speed of that weight: optimisers move all weights alike.
    growth: Final[float] = 3.0
    has_constants: Final[bool]
    has_vectors: Final[bool]
    has_tensors: Final[bool]

    def __init__(
        self,
        num_scalars: int,
        num_vectors: int,
        num_tensors: int,
        wanted_scalars: int,
        wanted_tensors: int,
        initial_scalars: Sequence[float],
        hidden: int = 32,
        channels: int = 8,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if num_scalars < 1 or (wanted_tensors and num_vectors + num_tensors < 1):
            raise ValueError("Trunk needs 0e features and, for a 2e coefficient, at least one 1o or 2e channel")
        self.has_vectors = wanted_tensors > 0 and num_vectors > 0
        self.has_tensors = wanted_tensors > 0 and num_tensors > 0
        self.has_constants = len(initial_scalars) > 0
        self.wanted_scalars = wanted_scalars
        self.channels = channels
        num_gates = channels * (int(self.has_vectors) + int(self.has_tensors))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.hidden = nn.Linear(num_scalars, hidden)
            # Without constants there is no bias: DDP does not take weights without gradients.
            self.out = nn.Linear(hidden, wanted_scalars + num_gates, bias=self.has_constants)
            # Plain matrices, scaled to keep variance: a bias would break equivariance. Only matrices that are used are
            # made: DDP does not take weights without gradients.
            if self.has_vectors:
                pairs = torch.cat([torch.randn(num_vectors, channels) for _ in range(2)], dim=1)
                self.mix_vectors = nn.Parameter(pairs / math.sqrt(num_vectors))
            if self.has_tensors:
                self.mix_tensors = nn.Parameter(torch.randn(num_tensors, channels) / math.sqrt(num_tensors))
        # Near isotropy at the start, but not at t = 0 exactly: gates and mixers learn at once.
        if self.has_constants:
            with torch.no_grad():
                self.out.weight.mul_(0.1)
                self.out.bias.zero_()
                self.out.bias[:wanted_scalars] = torch.tensor(initial_scalars, dtype=self.out.bias.dtype)
        else:
            self.log_size = nn.Parameter(torch.zeros(()))
        self.traceless_part = SymmetricTracelessPart()

    def make_constant(self, scalars: Sequence[float] = ()) -> None:
        """Give every atom the same 0e coefficients, ``scalars`` or where they start, and no 2e ones, until trained."""
        if not self.has_constants:
            raise InputError("this readout predicts nothing without a training: its coefficients have no constants")
        with torch.no_grad():
            self.out.weight.zero_()
            self.out.bias[self.wanted_scalars :] = 0.0
            self.out.bias[: len(scalars)] = torch.tensor(scalars).to(self.out.bias)

    def forward(self, scalars: Tensor, vectors: Tensor, tensors: Tensor, edges: Optional[EdgeTensors] = None) -> Tensor:
        """Return the coefficients (N, wanted_scalars + 5 wanted_tensors) of N atoms, 0e ones first.

        Parameters
        ----------
        scalars : (N, num_scalars)
        vectors : (N, num_vectors, 3)
        tensors : (N, num_tensors, 5)
            Without channels of an irrep, any tensor will do: it is not read.
        edges : EdgeTensors, optional
            With num_tensors channels, in place of ``tensors``.
        """
        invariants = self.out(torch.nn.functional.silu(self.hidden(scalars)))
        if not self.has_constants:
            invariants = torch.exp(self.growth * self.log_size) * invariants
        wanted, gates = invariants[:, : self.wanted_scalars], invariants[:, self.wanted_scalars :]
        t = self._anisotropy(gates, vectors, tensors, edges)
        return wanted if t is None else torch.cat([wanted, t], dim=1)

    def _anisotropy(
        self, gates: Tensor, vectors: Tensor, tensors: Tensor, edges: Optional[EdgeTensors]
    ) -> Optional[Tensor]:
        """Return the 2e coefficients (N, 5); sums over channels come first, which leaves few and small operations.

        Products of small matrices are written out: compilers fuse them, and TF32 does not round them.
        """
        t: Optional[Tensor] = None
        matrix: Optional[Tensor] = None  # (N, 3, 3), of which t is the traceless part
        if self.has_tensors:
            # Σ_c g_c (W t)_c = Σ_k (W g)_k t_k
            weights = torch.matmul(gates[:, : self.channels], self.mix_tensors.t())
            if edges is not None:
                weight = (weights.index_select(0, edges.receiver) * edges.weights).sum(1)
                # Component by component: compilers make one fast loop of it, whose sums cost six additions per edge.
                x, y, z = edges.vectors.unbind(1)
                weight = weight / (x * x + y * y + z * z)
                wx, wy, wz = weight * x, weight * y, weight * z
                products = torch.stack([wx * x, wy * y, wz * z, wy * z, wx * z, wx * y], dim=1)
                sums = products.new_zeros([gates.shape[0], 6]).index_add_(0, edges.receiver, products)
                matrix = sym6_to_matrix(sums)
            else:
                t = (weights.unsqueeze(2) * tensors).sum(1)
        if self.has_vectors:
            # As one product: a batch of small ones is slower.
            rows = vectors.transpose(1, 2).reshape(-1, vectors.shape[1])
            mixed = torch.mm(rows, self.mix_vectors).reshape(-1, 3, 2 * self.channels)
            left = mixed[:, :, : self.channels] * gates[:, -self.channels :].unsqueeze(1)
            pairs = (left.unsqueeze(2) * mixed[:, :, self.channels :].unsqueeze(1)).sum(3)
            matrix = pairs if matrix is None else matrix + pairs
        if matrix is not None:
            traceless = self.traceless_part(matrix)
            t = traceless if t is None else t + traceless
        return t


class EdgePool(nn.Module):
    """2e node channels from the neighbourhood: Σ_j (W_r φ(r_ij)) · (W_h h_j) Y2(r̂_ij).

    A source of anisotropy for models without 2e node features, also at inversion-symmetric sites, where products of two
    vectors vanish. φ are the model's radial functions, which go to zero at the cutoff, so the result is smooth. The
    trunk takes the sum, over channels before neighbours.

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

    def forward(
        self, edge_vectors: Tensor, radial: Tensor, scalars: Tensor, sender: Tensor, receiver: Tensor
    ) -> EdgeTensors:
        """Return the weights of ``channels`` channels, and the vectors that they weigh.

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
        # Edges along the rows of a product whose columns are few: several times faster.
        weights = torch.mm(self.from_radial.weight, radial.t()).t() * self.from_sender(scalars).index_select(0, sender)
        return EdgeTensors(weights, edge_vectors, receiver)
