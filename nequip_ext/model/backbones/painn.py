"""PaiNN (Schütt, Unke, Gastegger 2021, arXiv:2102.03150): messages between atoms, and mixing within them."""

from typing import Any, Callable, Dict, Optional

import torch
from nequip.data import AtomicDataDict
from nequip.nn._graph_mixin import GraphModuleMixin
from torch import Tensor, nn

from nequip_ext.model.backbones.layers import Mixing, join, split, xavier, xavier_mlp
from nequip_ext.model.backbones.messages import Messages


class _Sum(Messages):
    def forward(
        self, gates: Tensor, vectors: Optional[Tensor], filters: Tensor, directions: Tensor, edge_index: Tensor
    ) -> Tensor:
        """Σ_j of [m_s | vectors] (N, 4F).

        Parameters
        ----------
        gates : (N, 3F)
        vectors : (N, 3, F), optional
            None: there are none yet.
        filters, directions : (M, 3F), (M, 3)
        """
        size = (gates.shape[0], gates.shape[0])
        # Apart from each other: the gradient of a part is a tensor as large as the whole.
        return self.propagate(edge_index, size=size, y=gates, v=vectors, filters=filters, directions=directions)

    def message(self, y_j: Tensor, v_j: Optional[Tensor], filters: Tensor, directions: Tensor) -> Tensor:
        """[m_s | r̂ ⊗ m_r + v_j ⊙ m_v] (M, 4F)."""
        scalars, radial, passed = (y_j * filters).chunk(3, dim=1)
        vectors = radial.unsqueeze(1) * directions.unsqueeze(2)
        if v_j is not None:
            vectors = torch.addcmul(vectors, v_j, passed.unsqueeze(1))
        return join(scalars, vectors)


class PaiNNMessage(GraphModuleMixin, nn.Module):
    """s_i += Σ_j m_s, v_i += Σ_j (r̂_ij ⊗ m_r + v_j ⊙ m_v), with [m_s | m_r | m_v] = MLP(s_j) ⊙ W_ij.

    The filter W_ij is linear in the radial functions, its bias inside the envelope.
    """

    _init_irreps: Callable[..., None]

    def __init__(self, channels: int, irreps_in: Dict[str, Any]) -> None:
        super().__init__()
        self.channels = channels
        keys = AtomicDataDict
        self._init_irreps(
            irreps_in=irreps_in,
            required_irreps_in=[keys.EDGE_CUTOFF_KEY, keys.EDGE_ATTRS_KEY],
            irreps_out={keys.NODE_FEATURES_KEY: f"{channels}x0e+{channels}x1o"},
        )
        self.atoms = xavier_mlp(channels, channels, 3 * channels)
        self.filters = xavier(nn.Linear(irreps_in[keys.EDGE_EMBEDDING_KEY].dim, 3 * channels))
        self.sum = _Sum()

    def forward(self, data: AtomicDataDict.Type) -> AtomicDataDict.Type:
        features = data[AtomicDataDict.NODE_FEATURES_KEY]
        scalars, vectors = split(features, self.channels)
        filters = torch.matmul(data[AtomicDataDict.EDGE_EMBEDDING_KEY], self.filters.weight.t())
        filters = torch.addcmul(filters, data[AtomicDataDict.EDGE_CUTOFF_KEY].view(-1, 1), self.filters.bias)
        directions, edge_index = data[AtomicDataDict.EDGE_ATTRS_KEY], data[AtomicDataDict.EDGE_INDEX_KEY]
        first = features.shape[1] == self.channels
        added = self.sum(self.atoms(scalars), None if first else vectors, filters, directions, edge_index)
        data[AtomicDataDict.NODE_FEATURES_KEY] = (join(scalars, vectors) if first else features) + added
        return data


class PaiNNMixing(GraphModuleMixin, nn.Module):
    """s += a_ss + a_sv ⊙ ΣU⊙V, v += a_vv ⊙ U, with [a_ss | a_vv | a_sv] = MLP([s | √(ΣV² + ε)]).

    Parameters
    ----------
    channels : int
    epsilon : float
        The curvature of the root at v = 0 is 1/√ε.
    """

    #: The readout reads the vectors that go into the last of these, times this: those after it, no energy has trained.
    tapped = 1.0

    _init_irreps: Callable[..., None]

    def __init__(self, channels: int, epsilon: float, irreps_in: Dict[str, Any]) -> None:
        super().__init__()
        self.channels = channels
        self.epsilon = epsilon
        features = f"{channels}x0e+{channels}x1o"
        self._init_irreps(irreps_in=irreps_in, my_irreps_in={AtomicDataDict.NODE_FEATURES_KEY: features})
        self.mixing = Mixing(channels)
        self.gates = xavier_mlp(2 * channels, channels, 3 * channels)

    def forward(self, data: AtomicDataDict.Type) -> AtomicDataDict.Type:
        scalars, vectors = split(data[AtomicDataDict.NODE_FEATURES_KEY], self.channels)
        left, right = self.mixing(vectors)
        norms = (left.square().sum(1) + self.epsilon).sqrt()
        ss, vv, sv = self.gates(torch.cat([scalars, norms], dim=1)).chunk(3, dim=1)
        scalars = scalars + ss + sv * (left * right).sum(1)
        vectors = vectors + vv.unsqueeze(1) * right
        data[AtomicDataDict.NODE_FEATURES_KEY] = join(scalars, vectors)
        return data
