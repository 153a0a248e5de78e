"""What atoms are: embeddings of their types, and energies that vanish for an atom alone.

Both backbones have biases, by which an atom without neighbours would have some energy, where NequIP promises the shift
of its type. One isolated atom of every type therefore passes through all layers beside the others, without edges: in
``node_features``, N rows of atoms are followed by one for each of T types, until their energies are taken off the
atoms'. That changes every type's energy by a constant, and costs no more than T further atoms.
"""

from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from nequip.data import AtomicDataDict
from nequip.nn._graph_mixin import GraphModuleMixin
from torch import Tensor, nn

from nequip_ext.model.backbones.layers import LayerNorm, channels_first


def types_of(data: AtomicDataDict.Type) -> Tensor:
    """NequIP's type of every atom (N,)."""
    return data[AtomicDataDict.ATOM_TYPE_KEY].view(-1)


def with_isolated(table: Tensor, types: Tensor) -> Tensor:
    """Rows of a table (T, F) for N atoms and then for one isolated atom of every type (N + T, F)."""
    return torch.cat([torch.index_select(table, 0, types), table])


def against_isolated(energies: Tensor, types: Tensor) -> Tensor:
    """Energies of N atoms minus those of isolated atoms of their types (N, 1), of both (N + T, 1)."""
    atoms = types.shape[0]
    return energies[:atoms] - torch.index_select(energies[atoms:], 0, types)


class TypeEmbedding(GraphModuleMixin, nn.Module):
    """Scalars of every type, standard normal at the start: ``node_attrs`` (N, F), ``node_features`` (N + T, F).

    Parameters
    ----------
    type_names : list of str
    channels : int
        F.
    normalised : bool
        Whether a layer norm follows.
    """

    _init_irreps: Callable[..., None]  # of GraphModuleMixin, for type checkers without NequIP

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


class AtomicEnergies(GraphModuleMixin, nn.Module):
    """Energies of atoms from their scalars, against isolated atoms.

    Takes these off ``node_features``, whose vectors it brings into e3nn's order.

    Parameters
    ----------
    energies : torch.nn.Module
        From scalars (N + T, F), with a further field beside them if there is one, to energies (N + T, 1).
    channels : int
    beside : str, optional
        That field.
    drop : tuple of str
        Fields that no output shall have.
    """

    _init_irreps: Callable[..., None]

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
        energies = self.energies(scalars)
        data[AtomicDataDict.PER_ATOM_ENERGY_KEY] = against_isolated(energies, types)
        data[AtomicDataDict.NODE_FEATURES_KEY] = channels_first(features[: types.shape[0]], self.channels)
        for name in self.drop:
            del data[name]
        return data
