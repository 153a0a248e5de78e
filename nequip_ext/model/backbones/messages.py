"""Sums over neighbours by PyTorch Geometric, in NequIP's order of edges."""

from typing import Any

from torch import Tensor

from e2ip_plugins.errors import InputError

try:
    from torch_geometric.nn.conv.message_passing import MessagePassing
except ModuleNotFoundError as error:
    raise InputError(
        f"PaiNN and AlphaNet need torch-geometric ({error}): install the extra 'backbones', "
        'pip install "e2ip-plugins[nequip,backbones]"'
    ) from error


class Messages(MessagePassing):
    """Base of what sums messages at the atoms that receive them.

    In NequIP's ``edge_index`` row 0 receives and row 1 sends. Sizes are given: they are not read off the data, on
    which NequIP's graphs must not depend.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Of a class without a `propagate` of its own PyG generates source code, and leaves a file of it behind in the
        # folder for temporary files for every process; in packaged models that fails.
        cls.propagate = Messages.propagate  # type: ignore[method-assign]

    def __init__(self) -> None:
        super().__init__(aggr="sum", flow="target_to_source", node_dim=0)

    def propagate(self, edge_index: Tensor, size: Any = None, **kwargs: Any) -> Tensor:
        """Σ_j of the messages (number of atoms, …); see PyG's class."""
        return MessagePassing.propagate(self, edge_index, size, **kwargs)


class EdgeSum(Messages):
    """Σ_j of what edges hold."""

    def forward(self, edges: Tensor, edge_index: Tensor, num_atoms: int) -> Tensor:
        """Sums (num_atoms, …) of (M, …)."""
        return self.propagate(edge_index, size=(num_atoms, num_atoms), edges=edges)

    def message(self, edges: Tensor) -> Tensor:
        """What an edge holds."""
        return edges
