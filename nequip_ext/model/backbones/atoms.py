"""Embeddings of atoms by type, and energies that vanish for isolated atoms.

With the biases of both backbones an atom without neighbours would have an energy, where NequIP promises the shift of
its type. One isolated atom of every type therefore passes through all layers: in ``node_features``, N rows of atoms are
followed by one row for each of T types, until their energies are subtracted from those of the atoms. That changes the
energy of every type by a constant, and costs no more than T further atoms.
"""

from typing import Any, Dict, List, Optional, Tuple

import torch
from nequip.data import AtomicDataDict
from torch import Tensor, nn

from nequip_ext.model.backbones.layers import LayerNorm, channels_first
from nequip_ext.model.graph_module import GraphModule


def types_of(data: AtomicDataDict.Type) -> Tensor:
    """Return NequIP's type of every atom (N,)."""
    return data[AtomicDataDict.ATOM_TYPE_KEY].view(-1)


def with_isolated(table: Tensor, types: Tensor) -> Tensor:
    """Return rows of a table (T, F) for N atoms, then for one isolated atom of every type (N + T, F)."""
    return torch.cat([torch.index_select(table, 0, types), table])


class TypeEmbedding(GraphModule):
    """Scalars of every type, standard normal at the start: ``node_attrs`` (N, F), ``node_features`` (N + T, F).

    Parameters
    ----------
    type_names : list of str
    channels : int
        F.
    normalised : bool
        Whether a layer norm follows.
    """

    def __init__(self, type_names: List[str], channels: int, normalised: bool = False) -> None:
        super().__init__()
        self.norm = LayerNorm() if normalised else nn.Identity()
        self.embedding = nn.Parameter(torch.randn(len(type_names), channels))
        keys = (AtomicDataDict.NODE_ATTRS_KEY, AtomicDataDict.NODE_FEATURES_KEY)
        self._init_irreps(irreps_out={key: f"{channels}x0e" for key in keys})

    def forward(self, data: AtomicDataDict.Type) -> AtomicDataDict.Type:
        types = types_of(data)
        features = with_isolated(self.norm(self.embedding), types)
        data[AtomicDataDict.NODE_FEATURES_KEY] = features
        data[AtomicDataDict.NODE_ATTRS_KEY] = features[: types.shape[0]]
        return data


class AtomicEnergies(GraphModule):
    """Energies of atoms from their scalars, minus those of isolated atoms.

    It removes the rows of these from ``node_features`` and brings the vectors there into e3nn's order.

    Parameters
    ----------
    energies : torch.nn.Module
        From scalars (N + T, F), or scalars and a further field, to energies (N + T, 1).
    channels : int
    beside : str, optional
        Name of the further field.
    drop : tuple of str
        Fields to remove from the outputs.
    """

    def __init__(
        self,
        energies: nn.Module,
        channels: int,
        irreps_in: Dict[str, Any],
        beside: Optional[str] = None,
        drop: Tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self.beside = beside
        self.drop = drop
        self.energies = energies
        self.channels = channels
        self._init_irreps(
            irreps_in=irreps_in,
            required_irreps_in=[AtomicDataDict.NODE_FEATURES_KEY],
            irreps_out={AtomicDataDict.PER_ATOM_ENERGY_KEY: "0e"},
        )

    def forward(self, data: AtomicDataDict.Type) -> AtomicDataDict.Type:
        features, types = data[AtomicDataDict.NODE_FEATURES_KEY], types_of(data)
        scalars = features[:, : self.channels]
        if self.beside is not None:
            scalars = torch.cat([scalars, data.pop(self.beside)], dim=1)
        energies, atoms = self.energies(scalars), types.shape[0]
        isolated = torch.index_select(energies[atoms:], 0, types)
        data[AtomicDataDict.PER_ATOM_ENERGY_KEY] = energies[:atoms] - isolated
        data[AtomicDataDict.NODE_FEATURES_KEY] = channels_first(features[:atoms], self.channels)
        for name in self.drop:
            del data[name]
        return data
