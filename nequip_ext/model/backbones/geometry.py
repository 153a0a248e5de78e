"""Edges: directions, envelopes, radial functions; in float64, as NequIP's positions are, until they are features."""

import math
from typing import Any, Dict

import torch
from nequip.data import AtomicDataDict
from nequip.nn.utils import with_edge_vectors_
from torch import Tensor, nn

from e2ip_plugins.errors import InputError
from nequip_ext.model.graph_module import GraphModule


class CosineCutoff(nn.Module):
    """c(x) = ½ (cos πx + 1) for x = r / r_c < 1, else 0; continuous with its first derivative."""

    def forward(self, x: Tensor) -> Tensor:
        """Return c in the shape of x."""
        return 0.5 * (torch.cos(math.pi * x) + 1.0) * (x < 1.0)


class GaussianEncoding(GraphModule):
    """``edge_embedding`` c(x) exp(-β (e^{-r/Å} - μ_n)²) (M, R) and ``edge_cutoff`` c(x) (M, 1).

    μ_n equally spaced from e^{-r_c/Å} to 1, β = [(2/R)(1 - e^{-r_c/Å})]^{-2}.

    Parameters
    ----------
    cutoff : torch.nn.Module
        c of x = r / r_c.
    num_radial : int
        R.
    r_max : float
        r_c in Å.
    """

    centres: Tensor

    def __init__(self, cutoff: nn.Module, num_radial: int, r_max: float, irreps_in: Dict[str, Any]) -> None:
        super().__init__()
        self.cutoff = cutoff
        nearest = math.exp(-r_max)
        self.beta = (2.0 / num_radial * (1.0 - nearest)) ** -2
        self.register_buffer("centres", torch.linspace(nearest, 1.0, num_radial, dtype=torch.float64))
        outputs = {AtomicDataDict.EDGE_EMBEDDING_KEY: f"{num_radial}x0e", AtomicDataDict.EDGE_CUTOFF_KEY: "0e"}
        self._init_irreps(irreps_in=irreps_in, required_irreps_in=[AtomicDataDict.NORM_LENGTH_KEY], irreps_out=outputs)
        self.dtype = torch.get_default_dtype()

    def forward(self, data: AtomicDataDict.Type) -> AtomicDataDict.Type:
        lengths = with_edge_vectors_(data, with_lengths=True)[AtomicDataDict.EDGE_LENGTH_KEY].view(-1, 1)
        envelope = self.cutoff(data[AtomicDataDict.NORM_LENGTH_KEY].view(-1, 1))
        gaussians = torch.exp(-self.beta * (torch.exp(-lengths) - self.centres).square())
        data[AtomicDataDict.EDGE_EMBEDDING_KEY] = (envelope * gaussians).to(self.dtype)
        data[AtomicDataDict.EDGE_CUTOFF_KEY] = envelope.to(self.dtype)
        return data


class EdgeDirections(GraphModule):
    """``edge_attrs`` (M, 3): unit vectors from the atom that receives to the one that sends, in the model's dtype."""

    def __init__(self, irreps_in: Dict[str, Any]) -> None:
        super().__init__()
        self._init_irreps(irreps_in=irreps_in, irreps_out={AtomicDataDict.EDGE_ATTRS_KEY: "1o"})
        self.dtype = torch.get_default_dtype()

    def forward(self, data: AtomicDataDict.Type) -> AtomicDataDict.Type:
        if AtomicDataDict.LMP_MLIAP_DATA_KEY in data:
            raise InputError(
                "PaiNN and AlphaNet pass messages and have no exchange of ghost atoms for LAMMPS' ML-IAP: compile for "
                "another target, for example nequip-compile --target pair_nequip"
            )
        data = with_edge_vectors_(data, with_lengths=True)
        # Without ε, because neighbour lists have no edges of length zero.
        directions = data[AtomicDataDict.EDGE_VECTORS_KEY] / data[AtomicDataDict.EDGE_LENGTH_KEY].view(-1, 1)
        data[AtomicDataDict.EDGE_ATTRS_KEY] = directions.to(self.dtype)
        return data
