"""PaiNN (Schütt, Unke, Gastegger 2021, arXiv:2102.03150): messages between atoms, and mixing within them."""

from typing import Any, Dict, Optional

import torch
from nequip.data import AtomicDataDict
from torch import Tensor, nn

from nequip_ext.model.backbones.layers import Mixing, join, split, xavier, xavier_mlp
from nequip_ext.model.backbones.messages import Messages
from nequip_ext.model.graph_module import GraphModule


class _Sum(Messages):
    # y (N, 3F) and v (N, 3, F) are two fields because the gradient of a part of one tensor is as large as the whole.
    def message(self, y_j: Tensor, v_j: Optional[Tensor], filters: Tensor, directions: Tensor) -> Tensor:
        """Return [m_s | r̂ ⊗ m_r + v_j ⊙ m_v] (M, 4F); in the first layer there are no vectors v."""
        scalars, radial, passed = (y_j * filters).chunk(3, dim=1)
        vectors = radial.unsqueeze(1) * directions.unsqueeze(2)
        if v_j is not None:
            vectors = torch.addcmul(vectors, v_j, passed.unsqueeze(1))
        return join(scalars, vectors)


class PaiNNMessage(GraphModule):
    """s_i += Σ_j m_s, v_i += Σ_j (r̂_ij ⊗ m_r + v_j ⊙ m_v), with [m_s | m_r | m_v] = MLP(s_j) ⊙ W_ij.

    The filter W_ij is linear in the radial functions, its bias inside the envelope.
    """

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
        fields = {"y": self.atoms(scalars), "v": None if first else vectors, "filters": filters}
        added = self.sum(features.shape[0], edge_index, directions=directions, **fields)
        data[AtomicDataDict.NODE_FEATURES_KEY] = (join(scalars, vectors) if first else features) + added
        return data


class PaiNNMixing(GraphModule):
    """s += a_ss + a_sv ⊙ ΣU⊙V, v += a_vv ⊙ U, with [a_ss | a_vv | a_sv] = MLP([s | √(ΣV² + ε)]).

    Parameters
    ----------
    channels : int
    epsilon : float
        The curvature of the root at v = 0 is 1/√ε.
    """

    #: The readout reads the vectors that enter the last of these modules, times this factor; no energy trains those
    #: that leave it.
    tapped = 1.0

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
