"""The graph modules that E2IPModel inserts: a tap on equivariant features and the readout.

These modules travel inside packaged models. ``torch.package`` follows imports: keep to submodules that
NequIP itself packages (``nequip.data`` the package would drag in ASE).
"""

from typing import Any, Dict, Optional

import torch
from e3nn.o3._irreps import Irreps
from nequip.data import AtomicDataDict
from nequip.nn.utils import with_edge_vectors_

from e2ip_plugins.keys import (
    COEFFICIENTS_KEY,
    ENERGY_ERROR_VECTOR,
    ENERGY_UNCERTAINTY,
    FORCE_UNIT_KEY,
    LEVERAGE,
    MODEL_KEY,
    PLATEAU_KEY,
    STRESS_COV,
    STRESS_UNCERTAINTY,
)
from e2ip_plugins.leverage.module import Neighbours
from e2ip_plugins.maths.kernels import paths
from e2ip_plugins.readout.layout import Blocks, Edges, Layout, blocks, count, gather_scalars, sum_over_edges
from e2ip_plugins.readout.readout import Readout, model_name
from e2ip_plugins.readout.settings import Settings
from nequip_ext.model.graph_module import GraphModule

#: A field between taps and readout, never an output.
TAP_KEY = "e2ip_tapped_features"

#: Features after the last layer of `nequip_ext.model.backbones`, in their order between layers: all channels of x, then
#: those of y and z; isolated atoms are in the last rows.
LAST_KEY = "e2ip_last_features"

#: An input field that keeps the graph of the readout's outputs outside training (`nequip_ext.inference.gradient`).
KEEP_GRAPH_KEY = "e2ip_keep_graph"


#: Fields that every readout reads, where there are such, apart from features.
_FIELDS = (
    *(AtomicDataDict.ATOM_TYPE_KEY, AtomicDataDict.NODE_ATTRS_KEY, AtomicDataDict.POSITIONS_KEY),
    *(AtomicDataDict.EDGE_INDEX_KEY, AtomicDataDict.EDGE_VECTORS_KEY, AtomicDataDict.EDGE_LENGTH_KEY),
    *(AtomicDataDict.EDGE_CUTOFF_KEY, AtomicDataDict.EDGE_CELL_SHIFT_KEY, AtomicDataDict.CELL_KEY),
    *(AtomicDataDict.BATCH_KEY, AtomicDataDict.NUM_NODES_KEY),
)


class FeatureTap(GraphModule):
    """Copy node features into another field: usually the input of the last layer, whose output has scalars only.

    Parameters
    ----------
    irreps_in : dict
    key : str
        Name of the field.
    factor : float
        The features are multiplied with it.
    """

    def __init__(self, irreps_in: Dict[str, Irreps], key: str = TAP_KEY, factor: float = 1.0) -> None:
        super().__init__()
        self.key = key
        self.factor = factor
        self._init_irreps(irreps_in=irreps_in, irreps_out={key: str(irreps_in[AtomicDataDict.NODE_FEATURES_KEY])})

    def forward(self, data: AtomicDataDict.Type) -> AtomicDataDict.Type:
        features = data[AtomicDataDict.NODE_FEATURES_KEY]
        data[self.key] = features if self.factor == 1.0 else self.factor * features
        return data


class GraphReadout(GraphModule):
    """The core's readout on the features of a NequIP energy model; energies and forces do not depend on it.

    Scalars are the final node features, or, in models with edge features only (Allegro), the sum of these over an
    atom's edges. Anisotropy comes from 2e and 1o channels of the tapped features; without 2e channels, from edges
    pooled with Y2. The pool uses type embeddings of the neighbours instead of their features: a strictly local model
    stays strictly local, and LAMMPS knows the types of ghost atoms.

    Parameters
    ----------
    irreps_in : dict
        Irreps of the energy model's outputs, with `TAP_KEY` and `LAST_KEY` if there are such taps.
    model_dtype : torch.dtype
        Precision of the network; outputs are float64 like NequIP's forces.
    num_species : int
        NequIP's atom types.
    settings, seed
        See `e2ip_plugins.readout.readout.Readout`.
    """

    def __init__(
        self,
        irreps_in: Dict[str, Irreps],
        model_dtype: torch.dtype,
        num_species: int,
        settings: Settings,
        seed: int,
    ) -> None:
        super().__init__()
        tapped = irreps_in.get(TAP_KEY)
        self.scalars_from_edges = AtomicDataDict.NODE_FEATURES_KEY not in irreps_in
        self.scalar_key = LAST_KEY if LAST_KEY in irreps_in else AtomicDataDict.NODE_FEATURES_KEY
        self.radial_key = AtomicDataDict.EDGE_EMBEDDING_KEY
        if self.scalars_from_edges:
            # Edge features vanish at the cutoff like the radial embedding, which keeps the uncertainty smooth.
            self.scalar_key = self.radial_key = AtomicDataDict.EDGE_FEATURES_KEY
        self.radial_blocks = _blocks(irreps_in.get(self.radial_key), 0, 1)
        self.sender_blocks = _blocks(irreps_in.get(AtomicDataDict.NODE_ATTRS_KEY), 0, 1)
        layout = Layout(
            scalars=_blocks(irreps_in[self.scalar_key], 0, 1),
            vectors=_blocks(tapped, 1, -1),
            tensors=_blocks(tapped, 2, 1),
            components_first=self.scalar_key == LAST_KEY,
            num_radial=count(self.radial_blocks),
            num_senders=max(1, count(self.sender_blocks)),
            num_species=num_species,
            strictly_local=self.scalars_from_edges,
        )
        self.readout = Readout(settings, layout, seed=seed, double_outputs=True)
        #: Fields that the readout reads, where there are such; further ones in LAMMPS.
        self.fields = (self.scalar_key, self.radial_key, TAP_KEY, *_FIELDS)
        #: Whether nothing but the readout learns from the readout's loss.
        self.learns_alone = settings.detached
        self.to(model_dtype)

        # NequIP declares Cartesian tensors as "1o". Outputs that are neither invariants nor such tensors, for example
        # six components of a symmetric matrix or standard deviations along axes, are not declared.
        irreps = {(): "0e", (3, 3): "1o"}
        family = self.readout.family
        irreps_out = {key.name: irreps[key.shape] for key in family.output_keys() if key.shape in irreps}
        irreps_out.update({LEVERAGE.name: "0e", FORCE_UNIT_KEY: "0e", PLATEAU_KEY: "0e"})
        kind = "1o" if family.takes_forces else "0e"
        irreps_out[COEFFICIENTS_KEY] = f"{family.num_scalars}x{kind}+{family.num_tensors}x2e"
        energies = self.readout.leverage.energies
        irreps_out[ENERGY_UNCERTAINTY.name] = "0e"
        irreps_out[ENERGY_ERROR_VECTOR.name] = f"{energies.blocks * energies.length}x0e"
        self._init_irreps(irreps_in=irreps_in, irreps_out=irreps_out)
        for key in (TAP_KEY, LAST_KEY):
            self.irreps_out.pop(key, None)

    def _get_metadata_contributions(self) -> Dict[str, str]:
        """Return what NequIP writes into the files that it compiles."""
        name = model_name(self.readout)
        assert name is not None
        return {MODEL_KEY: name}

    def forward(self, data: AtomicDataDict.Type) -> AtomicDataDict.Type:
        keep_graph = data.pop(KEEP_GRAPH_KEY, None) is not None
        source = dict(data)
        if self.learns_alone and not keep_graph:
            source = {name: _without_graph(value) for name, value in source.items()}
        create_graph = self.training or keep_graph
        if create_graph or self.readout.takes_forces:
            outputs = self._read_out(source, create_graph)
        else:
            outputs = self._infer(source)
        for key in (TAP_KEY, LAST_KEY):
            data.pop(key, None)
        for name, value in outputs.items():
            data[name] = value.unsqueeze(-1) if value.dim() == 1 else value
        return data

    def _infer(self, data: AtomicDataDict.Type) -> Dict[str, torch.Tensor]:
        """Return the readout's outputs without a graph: NequIP frees that of the features before it returns outputs.

        Models compiled for training are traced in training mode or by make_fx, which ignores the contexts used here
        (test_compile.py).
        """
        # On a GPU a clone is a launch, which costs more than this mode saves.
        on_gpu = data[self.scalar_key].device.type in paths.TRITON_DEVICES
        if on_gpu or paths.tracer_of(list(data.values())) != paths.NOT_TRACED:
            with torch.no_grad():
                return self._read_out(data, create_graph=False)
        # A sixth faster for small structures. Clones, because autograd refuses tensors of the inference mode.
        with torch.inference_mode():
            outputs = self._read_out(data, create_graph=False)
        return {name: value.clone() for name, value in outputs.items()}

    def _read_out(self, data: AtomicDataDict.Type, create_graph: bool) -> Dict[str, torch.Tensor]:
        invariant = data[self.scalar_key]
        if self.scalars_from_edges:
            centre = data[AtomicDataDict.EDGE_INDEX_KEY][0]
            invariant = sum_over_edges(invariant, centre, AtomicDataDict.num_nodes(data))
        elif self.scalar_key == LAST_KEY:
            invariant = invariant[: AtomicDataDict.num_nodes(data)]
        equivariant = data.get(TAP_KEY, invariant)
        edges = self._edges(data, invariant.dtype) if self.readout.has_pool else None
        species = data[AtomicDataDict.ATOM_TYPE_KEY].reshape(-1)[: invariant.shape[0]]
        # LAMMPS' ML-IAP has no positions, and takes energies and forces only.
        positions = data.get(AtomicDataDict.POSITIONS_KEY) if torch.is_grad_enabled() else None
        cells = data[AtomicDataDict.CELL_KEY].view(-1, 3, 3) if AtomicDataDict.CELL_KEY in data else None
        outputs = self.readout(
            invariant,
            equivariant,
            species,
            self._neighbours(data),
            edges,
            positions=positions,
            create_graph=create_graph,
            frames=data.get(AtomicDataDict.BATCH_KEY),
            num_frames=0 if self.training else AtomicDataDict.num_frames(data),
            cells=cells,
        )
        std = outputs.get(ENERGY_UNCERTAINTY.name)
        if std is not None and cells is not None and STRESS_COV.name not in outputs:
            # A target of nequip-compile has the same outputs for all models: 0 where nothing was fitted.
            outputs[STRESS_COV.name] = std.new_zeros(std.shape[0], 6, 6)
            outputs[STRESS_UNCERTAINTY.name] = std.new_zeros(std.shape[0], 6)
        return outputs

    def _neighbours(self, data: AtomicDataDict.Type) -> Optional[Neighbours]:
        if AtomicDataDict.LMP_MLIAP_DATA_KEY in data:
            return None  # the leverage of ghost atoms is unknown in LAMMPS
        data = with_edge_vectors_(data, with_lengths=True)
        lengths = data[AtomicDataDict.EDGE_LENGTH_KEY].reshape(-1)
        envelope = data.get(AtomicDataDict.EDGE_CUTOFF_KEY)
        # Without an envelope of the backbone there is no smooth weight for an average.
        envelope = torch.zeros_like(lengths) if envelope is None else envelope.reshape(-1)
        centre, neighbour = data[AtomicDataDict.EDGE_INDEX_KEY]
        return Neighbours(lengths, envelope, neighbour, centre)

    def _edges(self, data: AtomicDataDict.Type, dtype: torch.dtype) -> Edges:
        data = with_edge_vectors_(data, with_lengths=False)
        radial = gather_scalars(data[self.radial_key], self.radial_blocks)
        if len(self.sender_blocks) > 0:
            senders = gather_scalars(data[AtomicDataDict.NODE_ATTRS_KEY], self.sender_blocks)
        else:
            senders = radial.new_ones((AtomicDataDict.num_nodes(data), 1))
        # NequIP's edges point from centre [0] to neighbour [1].
        centre, neighbour = data[AtomicDataDict.EDGE_INDEX_KEY]
        return Edges(data[AtomicDataDict.EDGE_VECTORS_KEY].to(dtype), radial, neighbour, centre, senders)


#: Integer types with the same number of bits.
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


def _without_graph(value: Any) -> Any:
    """Detach a tensor, also in models that NequIP compiles for training: its tracer drops ``detach``."""
    if not isinstance(value, torch.Tensor) or value.dtype not in _BITS:
        return value
    return value.view(_BITS[value.dtype]).view(value.dtype)


def _blocks(irreps: Optional[Irreps], l: int, parity: int) -> Blocks:
    return blocks([] if irreps is None else [irreps], l, parity)


def graph_readouts(model: Any) -> Dict[str, Any]:
    """Return every `GraphReadout` in a module by its name there."""
    # By the name of the class, because packages carry their own class.
    return {name: module for name, module in model.named_modules() if type(module).__name__ == GraphReadout.__name__}


def find_readout(model: Any) -> Optional[Readout]:
    """Return the readout inside a model, a dictionary of models or a training module; None for stock models."""
    return next((module.readout for module in graph_readouts(model).values()), None)


def find_name(model: Any) -> Optional[str]:
    """Return the name of a model's readout, see `model_name`; files that NequIP compiled have it in their metadata."""
    readout = find_readout(model)
    compiled = getattr(getattr(model, "model", None), "get_metadata", None)
    return compiled().get(MODEL_KEY) if readout is None and compiled is not None else model_name(readout)


def settings_of(readout: Readout) -> Settings:
    """Return a readout's settings in this installation's class; raise `InputError` for those that it cannot read.

    Packages carry a class of their own.
    """
    return Settings.from_dict(readout.settings.to_dict(), "this model")
