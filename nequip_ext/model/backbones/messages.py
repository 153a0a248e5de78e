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
    """Base of modules that sum messages at the receiving atoms; a subclass defines ``message`` (M, …).

    In NequIP's ``edge_index`` row 0 receives and row 1 sends. The number of atoms is an argument because NequIP's
    graphs must not depend on data.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # For a class without a `propagate` PyG generates source code and leaves a file of it in the folder for
        # temporary files, for every process; in packaged models that fails.
        cls.propagate = Messages.propagate  # type: ignore[method-assign]

    def __init__(self) -> None:
        super().__init__(aggr="sum", flow="target_to_source", node_dim=0)

    def propagate(self, edge_index: Tensor, size: Any = None, **fields: Any) -> Tensor:
        """Return Σ_j of the messages (number of atoms, …); see PyG's class."""
        return MessagePassing.propagate(self, edge_index, size, **fields)

    def forward(self, num_atoms: int, edge_index: Tensor, **fields: Any) -> Tensor:
        """Return Σ_j of the messages (num_atoms, …).

        Parameters
        ----------
        num_atoms : int
        edge_index : (2, M)
        **fields : Tensor
            Arguments of ``message``; one named ``x_j`` there is ``x`` (num_atoms, …) here.
        """
        return self.propagate(edge_index, size=(num_atoms, num_atoms), **fields)


class EdgeSum(Messages):
    """Σ_j of values of edges."""

    def message(self, edges: Tensor) -> Tensor:
        """Return the values of edges (M, …)."""
        return edges
