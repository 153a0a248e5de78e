"""The base of our modules on NequIP's dictionaries; it travels inside packages, see `nequip_ext.model.readout`."""

from typing import Any, Callable, Dict

import torch
from nequip.nn._graph_mixin import GraphModuleMixin


class GraphModule(GraphModuleMixin, torch.nn.Module):
    """A module from a dictionary of fields to the same dictionary with more fields, with NequIP's list of irreps."""

    # Of GraphModuleMixin, for type checkers without NequIP.
    _init_irreps: Callable[..., None]
    irreps_out: Dict[str, Any]
