"""AlphaNet (arXiv:2501.07155) from equations alone: frames on edges, phases, messages and mixing."""

import math
from typing import Any, Dict, Optional

import torch
from nequip.data import AtomicDataDict
from nequip.nn.utils import with_edge_vectors_
from torch import Tensor, nn

from nequip_ext.model.backbones.atoms import types_of, with_isolated
from nequip_ext.model.backbones.frames import Scalarisation, edge_frames
from nequip_ext.model.backbones.layers import LayerNorm, Mixing, join, mlp, split, xavier, xavier_mlp
from nequip_ext.model.backbones.messages import EdgeSum, Messages
from nequip_ext.model.backbones.phases import EdgePhases, PhaseState, rotate
from nequip_ext.model.graph_module import GraphModule

#: Between the modules only, never outputs: invariants A (M, 3H + R) of edges, what their filters are multiplied with
#: after all biases (M, 1), angles θ (N + T, H / 2) and phase states ψ (N + T, 2C) of atoms.
EDGES_KEY = "alphanet_edges"
GATES_KEY = "alphanet_gates"
ANGLES_KEY = "alphanet_angles"
STATE_KEY = "alphanet_state"


class _Weighted(Messages):
    """Σ_j ρ_ij ⊙ x_j."""

    def message(self, x_j: Tensor, weights: Tensor) -> Tensor:
        return x_j * weights


class _Directed(Messages):
    """Σ_j r̂_ij ⊗ (ρ_ij ⊙ x_j) (N, 3, H)."""

    def message(self, x_j: Tensor, weights: Tensor, directions: Tensor) -> Tensor:
        return (x_j * weights).unsqueeze(1) * directions.unsqueeze(2)


class AlphaNetEmbedding(GraphModule):
    """s_i += Σ_j ρ_ij ⊙ LN(E₂[Z_j]), and what all layers share: invariants of edges in their frames, first states.

    Parameters
    ----------
    num_types, channels, states : int
        T, H, C.
    mean_neighbours : (T, 1), optional
        n̄ of the weighted mean neighbour d_i = Σ_k u(r_ik) r_ik / n̄; None: the plain mean, which jumps at the cutoff.
    """

    mean_neighbours: Tensor

    def __init__(
        self, num_types: int, channels: int, states: int, mean_neighbours: Optional[Tensor], irreps_in: Dict[str, Any]
    ) -> None:
        super().__init__()
        keys = AtomicDataDict
        self._init_irreps(
            irreps_in=irreps_in,
            required_irreps_in=[keys.EDGE_CUTOFF_KEY, keys.EDGE_ATTRS_KEY, keys.NORM_LENGTH_KEY],
            irreps_out={keys.NODE_FEATURES_KEY: f"{channels}x0e"},
        )
        self.smooth = mean_neighbours is not None
        if mean_neighbours is not None:
            self.register_buffer("mean_neighbours", mean_neighbours.double())
        self.dtype = torch.get_default_dtype()
        self.norm = LayerNorm()
        self.senders = nn.Parameter(torch.randn(num_types, channels))
        self.states = nn.Parameter(torch.randn(channels, 2 * states))
        self.radial = mlp(irreps_in[keys.EDGE_EMBEDDING_KEY].dim, channels, channels)
        self.local = nn.Linear(channels, channels)
        self.scalarise = Scalarisation(channels)
        self.weighted, self.directed, self.sum = _Weighted(), _Directed(), EdgeSum()

    def forward(self, data: AtomicDataDict.Type) -> AtomicDataDict.Type:
        types, index = types_of(data), data[AtomicDataDict.EDGE_INDEX_KEY]
        embedding, envelope = data[AtomicDataDict.EDGE_EMBEDDING_KEY], data[AtomicDataDict.EDGE_CUTOFF_KEY].view(-1, 1)
        scalars = data[AtomicDataDict.NODE_FEATURES_KEY]
        data[STATE_KEY] = torch.matmul(scalars, self.states)
        weights = envelope * self.radial(embedding)
        rows = scalars.shape[0]
        scalars = scalars + self.weighted(rows, index, x=with_isolated(self.norm(self.senders), types), weights=weights)
        data[AtomicDataDict.NODE_FEATURES_KEY] = scalars

        within = data[AtomicDataDict.NORM_LENGTH_KEY].view(-1, 1) < 1.0
        data[GATES_KEY] = envelope if self.smooth else within.to(self.dtype)
        local = nn.functional.silu(self.norm(self.local(scalars)))
        vectors = self.directed(rows, index, x=local, weights=weights, directions=data[AtomicDataDict.EDGE_ATTRS_KEY])
        frames = self._frames(data, within).to(self.dtype)
        receivers = self.scalarise(frames, torch.index_select(vectors, 0, index[0]))
        senders = self.scalarise(frames, torch.index_select(vectors, 0, index[1]))
        data[EDGES_KEY] = torch.cat([envelope * receivers, envelope * senders, weights, embedding], dim=1)
        return data

    def _frames(self, data: AtomicDataDict.Type, within: Tensor) -> Tensor:
        """Return the frames of all edges (M, 3, 3), in float64."""
        types, index = types_of(data), data[AtomicDataDict.EDGE_INDEX_KEY]
        vectors = with_edge_vectors_(data, with_lengths=False)[AtomicDataDict.EDGE_VECTORS_KEY]
        if self.smooth:
            envelope = data[AtomicDataDict.EDGE_CUTOFF_KEY].view(-1, 1).to(vectors.dtype)
            total = self.sum(types.shape[0], index, edges=envelope * vectors)
            mean = total / torch.index_select(self.mean_neighbours, 0, types)
        else:
            counted = within.to(vectors.dtype)
            total = self.sum(types.shape[0], index, edges=torch.cat([counted * vectors, counted], dim=1))
            mean = total[:, :3] / total[:, 3:].clamp(min=1.0)
        return edge_frames(vectors, torch.index_select(mean, 0, index[0]))


class _Sum(Messages):
    def __init__(self, phases: nn.Module) -> None:
        super().__init__()
        self.phases = phases

    def message(self, x_j: Tensor, filters: Tensor, gates: Tensor, directions: Tensor) -> Tensor:
        """Return phases, m₁ and (v_j ⊙ m₂/√3 + r̂ ⊗ m₃)/√H (M, P + 4H) of x = [y | v], or of x = y without vectors."""
        channels = filters.shape[1] // 3
        scalars, passed, radial = (x_j[:, : 3 * channels] * filters).chunk(3, dim=1)
        vectors = radial.unsqueeze(1) * directions.unsqueeze(2)
        if x_j.shape[1] > 3 * channels:
            before = split(x_j[:, 2 * channels :], channels)[1]
            vectors = vectors + before * (passed / math.sqrt(3.0)).unsqueeze(1)
        return torch.cat([gates * self.phases(scalars, filters), join(scalars, vectors / math.sqrt(channels))], dim=1)


class AlphaNetMessage(GraphModule):
    """Messages of scalars, vectors and phases, of which the last turn the next layer's scalars (rotary gate).

    Parameters
    ----------
    channels : int
    phases : EdgePhases
    epsilon : float
        Of the layer norm of what has been summed. A small one blows the last neighbour's message up to unit size.
    last : bool
        Whether no further layer needs angles.
    """

    def __init__(
        self, channels: int, phases: EdgePhases, epsilon: float, last: bool, irreps_in: Dict[str, Any]
    ) -> None:
        super().__init__()
        self.channels = channels
        num_radial = irreps_in[AtomicDataDict.EDGE_EMBEDDING_KEY].dim
        self._init_irreps(
            irreps_in=irreps_in, irreps_out={AtomicDataDict.NODE_FEATURES_KEY: f"{channels}x0e+{channels}x1o"}
        )
        self.norm = LayerNorm(channels)
        self.atoms = xavier_mlp(channels, channels, 3 * channels)
        self.radial = xavier(nn.Linear(num_radial, 3 * channels))
        self.edges = xavier_mlp(3 * channels + num_radial, 3 * channels, 3 * channels)
        self.sum = _Sum(phases)
        self.num_phases = phases.size
        self.norm_of_sums = LayerNorm(phases.size + channels, epsilon)
        self.angles = None if last else nn.Linear(phases.size, channels // 2)

    @torch.no_grad()
    def start_larger(self) -> None:
        """Enlarge the initial filters, and in them take the factor 1/√H off the invariants of frames.

        With the published values messages start at a thousandth of the scalars that they are added to, and their
        dependence on angles at a tenth of that: for many epochs only lengths are learnt (docs/develop/networks.md).
        """
        before, after = (layer.weight for layer in self.edges if isinstance(layer, nn.Linear))
        self.radial.weight.mul_(5.0)
        before.mul_(3.0)
        before[:, : 2 * self.channels].mul_(math.sqrt(self.channels))
        after.mul_(3.0)

    def forward(self, data: AtomicDataDict.Type) -> AtomicDataDict.Type:
        features, channels = data[AtomicDataDict.NODE_FEATURES_KEY], self.channels
        scalars, vectors = split(features, channels)
        angles = data.pop(ANGLES_KEY, None)
        turned = scalars if angles is None else rotate(scalars, angles)
        gates = data[GATES_KEY]
        filters = self.radial(data[AtomicDataDict.EDGE_EMBEDDING_KEY]) * self.edges(data[EDGES_KEY]) * gates
        atoms = torch.cat([self.atoms(self.norm(turned)), features[:, channels:]], dim=1)
        fields = {"x": atoms, "filters": filters, "gates": gates, "directions": data[AtomicDataDict.EDGE_ATTRS_KEY]}
        sums = self.sum(atoms.shape[0], data[AtomicDataDict.EDGE_INDEX_KEY], **fields)
        invariant = self.num_phases + channels
        added = self.norm_of_sums(sums[:, :invariant])
        if self.angles is not None:
            data[ANGLES_KEY] = self.angles(added[:, : self.num_phases])
        _, received = split(sums[:, self.num_phases :], channels)
        data[AtomicDataDict.NODE_FEATURES_KEY] = join(scalars + added[:, self.num_phases :], vectors + received)
        return data


class AlphaNetMixing(GraphModule):
    """The phase state, and s += (g₁ + g₂ + ΣV⊙U/√H)/√2, v += g₃ ⊙ U, with [g₁ | g₂ | g₃] = MLP([s | ΣV²]).

    ΣV² instead of the published Σ|V| over x, y and z, which rotations change.
    """

    def __init__(self, channels: int, state: PhaseState, irreps_in: Dict[str, Any]) -> None:
        super().__init__()
        self.channels = channels
        features = f"{channels}x0e+{channels}x1o"
        self._init_irreps(irreps_in=irreps_in, my_irreps_in={AtomicDataDict.NODE_FEATURES_KEY: features})
        #: As of `PaiNNMixing`, and the factor that brings these vectors, of size 1/√H, to about one.
        self.tapped = math.sqrt(channels)
        self.state = state
        self.mixing = Mixing(channels)
        self.gates = xavier_mlp(2 * channels, channels, 3 * channels)

    def forward(self, data: AtomicDataDict.Type) -> AtomicDataDict.Type:
        scalars, vectors = split(data[AtomicDataDict.NODE_FEATURES_KEY], self.channels)
        data[STATE_KEY] = self.state(scalars, data[STATE_KEY])
        left, right = self.mixing(vectors)
        gates = self.gates(torch.cat([scalars, invariants(left)], dim=1))
        first, second, third = gates.chunk(3, dim=1)
        products = (left * right).sum(1) / math.sqrt(self.channels)
        scalars = scalars + (first + second + products) / math.sqrt(2.0)
        vectors = vectors + third.unsqueeze(1) * right
        data[AtomicDataDict.NODE_FEATURES_KEY] = join(scalars, vectors)
        return data


def invariants(vectors: Tensor) -> Tensor:
    """Return sums of squares (N, H) of vectors (N, 3, H)."""
    return vectors.square().sum(1)


class AlphaNetEnergies(nn.Module):
    """w·s + o + (w_ψ·[Re ψ | Im ψ] + o_ψ)/C (N, 1) of [s | Re ψ | Im ψ] (N, H + 2C)."""

    def __init__(self, channels: int, states: int) -> None:
        super().__init__()
        self.channels, self.states = channels, states
        self.of_scalars = nn.Linear(channels, 1)
        self.of_state = nn.Linear(2 * states, 1)

    def forward(self, atoms: Tensor) -> Tensor:
        """Return energies (N, 1)."""
        return self.of_scalars(atoms[:, : self.channels]) + self.of_state(atoms[:, self.channels :]) / self.states
