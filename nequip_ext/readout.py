"""The graph modules that E2IPModel inserts: a tap on equivariant features and the evidential readout.

These modules travel inside packaged models. ``torch.package`` follows imports: keep to submodules that
NequIP itself packages (``nequip.data`` the package would drag in ASE).
"""

from typing import Dict, List, Optional, Tuple

import torch
from e3nn.o3._irreps import Irreps
from nequip.data import AtomicDataDict
from nequip.nn._graph_mixin import GraphModuleMixin
from nequip.nn.utils import with_edge_vectors_
from torch import Tensor

from e2ip_plugins.families.e2ip import derive_niw
from e2ip_plugins.keys import COEFFICIENTS_KEY, FORCE_UNIT_KEY, OUTPUT_KEYS, PLATEAU_KEY, SIGMA0_KEY
from e2ip_plugins.readout.trunk import EdgePool, EvidentialHead

#: Between tap and readout only; never an output.
TAP_KEY = "e2ip_tapped_features"

#: Put into the inputs outside training, it keeps the graph of the readout's outputs (`nequip_ext.gradient`).
KEEP_GRAPH_KEY = "e2ip_keep_graph"

Slices = List[Tuple[int, int, int]]


def _channels_of(irreps: Optional[Irreps], l: int, parity: int) -> Slices:
    """(start, stop, multiplicity) of every block of one irrep; other parities are never used."""
    if irreps is None:
        return []
    blocks = zip(irreps, irreps.slices(), strict=True)
    return [(s.start, s.stop, mul) for (mul, ir), s in blocks if ir.l == l and ir.p == parity]


def _count(slices: Slices) -> int:
    return sum(mul for _, _, mul in slices)


def _gather(features: Tensor, slices: Slices, dim: int) -> Tensor:
    """Channels (N, C, dim) of one irrep out of e3nn's mul_ir layout (N, irreps)."""
    # explicit sizes: -1 is ambiguous when there are no atoms
    parts = [features[:, start:stop].reshape(features.shape[0], mul, dim) for start, stop, mul in slices]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


class FeatureTap(GraphModuleMixin, torch.nn.Module):
    """Keeps a reference to the node features that go into the last convolution.

    That layer puts out scalars only; its input still has l > 0.
    """

    def __init__(self, irreps_in: Dict[str, Irreps]) -> None:
        super().__init__()
        self._init_irreps(irreps_in=irreps_in, irreps_out={TAP_KEY: str(irreps_in[AtomicDataDict.NODE_FEATURES_KEY])})

    def forward(self, data: AtomicDataDict.Type) -> AtomicDataDict.Type:
        data[TAP_KEY] = data[AtomicDataDict.NODE_FEATURES_KEY]
        return data


class EvidentialReadout(GraphModuleMixin, torch.nn.Module):
    """NIW parameters and every derived output of each atom, from what the energy model leaves in ``data``.

    Energies and forces do not depend on it. Sources of 0e: the final node features, or, in models
    with edge features only (Allegro), their sum over an atom's edges. Sources of anisotropy: 2e and
    1o channels of the tapped features; where there are no 2e ones, edges pooled with Y2.

    The pool uses type embeddings of the neighbours, not their features: a strictly local model stays
    strictly local, and LAMMPS knows the types of ghost atoms.

    Parameters
    ----------
    irreps_in : dict
        Of the energy model's outputs, with `TAP_KEY` if there is a tap.
    model_dtype : torch.dtype
        Of the network; outputs are float64 like NequIP's forces.
    evidence, preset, force_unit, seed
        See `e2ip_plugins.readout.trunk.EvidentialHead`.
    """

    def __init__(
        self,
        irreps_in: Dict[str, Irreps],
        model_dtype: torch.dtype,
        evidence: Optional[str],
        preset: str,
        force_unit: float,
        seed: int,
    ) -> None:
        super().__init__()
        node_irreps = irreps_in.get(AtomicDataDict.NODE_FEATURES_KEY)
        tapped = irreps_in.get(TAP_KEY)
        self.scalars_from_edges = node_irreps is None
        scalar_key = AtomicDataDict.EDGE_FEATURES_KEY if self.scalars_from_edges else AtomicDataDict.NODE_FEATURES_KEY
        self.scalar_slices = _channels_of(irreps_in[scalar_key], 0, 1)
        self.vector_slices = _channels_of(tapped, 1, -1)
        self.tensor_slices = _channels_of(tapped, 2, 1)
        num_tensors = _count(self.tensor_slices)

        self.pool: Optional[EdgePool] = None
        if num_tensors == 0:
            # Both vanish at the cutoff, which keeps the uncertainty smooth.
            self.radial_key = scalar_key if self.scalars_from_edges else AtomicDataDict.EDGE_EMBEDDING_KEY
            self.radial_slices = _channels_of(irreps_in[self.radial_key], 0, 1)
            self.sender_slices = _channels_of(irreps_in.get(AtomicDataDict.NODE_ATTRS_KEY), 0, 1)
            self.pool = EdgePool(max(1, _count(self.sender_slices)), _count(self.radial_slices), seed=seed)
            num_tensors = self.pool.channels
        self.head = EvidentialHead(
            _count(self.scalar_slices),
            _count(self.vector_slices),
            num_tensors,
            evidence_mode=evidence,
            preset=preset,
            force_unit=force_unit,
            seed=seed,
            double_outputs=True,
        )
        self.to(model_dtype)

        # sym6 and standard deviations along axes are neither invariant nor e3nn irreps: not declared.
        irreps = {(): "0e", (3, 3): "1o"}  # "1o": NequIP's way with Cartesian tensors
        irreps_out = {key.name: irreps[key.shape] for key in OUTPUT_KEYS if key.shape in irreps}
        irreps_out.update({FORCE_UNIT_KEY: "0e", PLATEAU_KEY: "0e", COEFFICIENTS_KEY: "1x0e+1x2e+2x0e"})
        self._init_irreps(irreps_in=irreps_in, irreps_out=irreps_out)
        self.irreps_out.pop(TAP_KEY, None)

    def forward(self, data: AtomicDataDict.Type) -> AtomicDataDict.Type:
        keep_graph = data.pop(KEEP_GRAPH_KEY, None) is not None
        if self.training or keep_graph:
            return self._read_out(data)
        # The graph that the features belong to is freed by the time anybody sees these outputs. What NequIP compiles
        # for training is traced in training mode or by make_fx, which does not see this context (test_compile.py).
        with torch.no_grad():
            return self._read_out(data)

    def _read_out(self, data: AtomicDataDict.Type) -> AtomicDataDict.Type:
        if self.scalars_from_edges:
            edge_scalars = _gather(data[AtomicDataDict.EDGE_FEATURES_KEY], self.scalar_slices, 1).squeeze(-1)
            num_nodes = AtomicDataDict.num_nodes(data)
            scalars = edge_scalars.new_zeros((num_nodes, edge_scalars.shape[1]))
            scalars = scalars.index_add(0, data[AtomicDataDict.EDGE_INDEX_KEY][0], edge_scalars)
        else:
            scalars = _gather(data[AtomicDataDict.NODE_FEATURES_KEY], self.scalar_slices, 1).squeeze(-1)
        # Where the host truncates to local atoms, so does everything below.
        num_local = scalars.shape[0]

        vectors = tensors = scalars
        if TAP_KEY in data:
            tapped = data.pop(TAP_KEY)[:num_local]
            if len(self.vector_slices) > 0:
                vectors = _gather(tapped, self.vector_slices, 3)
            if len(self.tensor_slices) > 0:
                tensors = _gather(tapped, self.tensor_slices, 5)
        if self.pool is not None:
            tensors = self._pooled(data, scalars.dtype)[:num_local]

        output = self.head(scalars, vectors, tensors)
        output.update(derive_niw(output))
        del output[SIGMA0_KEY]
        for name, value in output.items():
            data[name] = value.unsqueeze(-1) if value.dim() == 1 else value
        return data

    def _pooled(self, data: AtomicDataDict.Type, dtype: torch.dtype) -> Tensor:
        data = with_edge_vectors_(data, with_lengths=False)
        edge_index = data[AtomicDataDict.EDGE_INDEX_KEY]
        radial = _gather(data[self.radial_key], self.radial_slices, 1).squeeze(-1)
        if len(self.sender_slices) > 0:
            senders = _gather(data[AtomicDataDict.NODE_ATTRS_KEY], self.sender_slices, 1).squeeze(-1)
        else:
            senders = radial.new_ones((AtomicDataDict.num_nodes(data), 1))
        # NequIP's edges point from centre [0] to neighbour [1].
        vectors = data[AtomicDataDict.EDGE_VECTORS_KEY].to(dtype)
        return self.pool(vectors, radial, senders, edge_index[1], edge_index[0])
