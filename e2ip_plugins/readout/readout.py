"""The readout: from features of NequIP or MACE to every output of a family. Layout, trunk and family in one."""

import hashlib
from typing import Any, Dict, Final, List, Optional, Tuple, cast

import torch
from torch import Tensor, nn

from e2ip_plugins import __version__
from e2ip_plugins.formats import READOUTS
from e2ip_plugins.leverage.module import Leverage, Neighbours
from e2ip_plugins.readout.forces import forces_of
from e2ip_plugins.readout.kernels import fused
from e2ip_plugins.readout.layout import Edges, Layout, count, gather, gather_scalars
from e2ip_plugins.readout.settings import Settings
from e2ip_plugins.readout.trunk import EdgePool, EdgeTensors, Trunk


class Readout(nn.Module):
    """Parameters and derived keys of every atom's force distribution.

    Names of submodules avoid ``scale``, ``shift``, ``readouts`` and ``atomic_energies``: MACE slices every
    state entry whose name contains one of these when it drops a data set's head.

    Parameters
    ----------
    settings : Settings
        Kept as ``settings``; its family's name also as ``family_name``, which scripted readouts keep.
    layout : Layout
    num_heads : int
        Data sets (MACE calls them heads): one trunk each, in ``trunks``.
    seed : int
    double_outputs : bool
        Whether a float32 readout's outputs are float64, from the coefficients on.
    """

    _version = READOUTS.number
    takes_forces: Final[bool]
    scalar_blocks: List[Tuple[int, int]]
    vector_blocks: List[Tuple[int, int]]
    tensor_blocks: List[Tuple[int, int]]
    components_first: Final[bool]
    has_pool: Final[bool]
    double_outputs: Final[bool]
    force_unit: Tensor

    def __init__(
        self,
        settings: Settings,
        layout: Layout,
        num_heads: int = 1,
        seed: int = 0,
        double_outputs: bool = False,
    ) -> None:
        super().__init__()
        self.settings = settings
        self.family_name = settings.family
        self.family = settings.build()
        self.scalar_blocks, self.vector_blocks, self.tensor_blocks = layout[:3]
        self.components_first = layout.components_first
        self.double_outputs = double_outputs
        self.takes_forces = self.family.takes_forces
        num_scalars, num_vectors, num_tensors = (count(blocks) for blocks in layout[:3])
        self.has_pool = self.family.num_tensors > 0 and num_tensors == 0
        if self.has_pool:
            self.pool = EdgePool(layout.num_senders or num_scalars, layout.num_radial, seed=seed)
            num_tensors = self.pool.channels
        wanted = (self.family.num_scalars, self.family.num_tensors, self.family.initial_scalars)
        self.trunks = nn.ModuleList(
            [Trunk(num_scalars, num_vectors, num_tensors, *wanted, seed=seed + i) for i in range(num_heads)]
        )
        self.leverage = Leverage(num_scalars, layout.num_species, num_heads, layout.strictly_local)
        self.register_buffer("force_unit", torch.tensor(float(settings.force_unit)))

    def forward(
        self,
        invariant: Tensor,
        equivariant: Tensor,
        species: Tensor,
        neighbours: Optional[Neighbours] = None,
        edges: Optional[Edges] = None,
        node_heads: Optional[Tensor] = None,
        positions: Optional[Tensor] = None,
        create_graph: bool = False,
        frames: Optional[Tensor] = None,
        num_frames: int = 0,
        cells: Optional[Tensor] = None,
    ) -> Dict[str, Tensor]:
        """Return the outputs of the family and ``e2ip_leverage`` (N, …); with ``num_frames`` those of frames (F, …).

        For the family's loss also ``e2ip_force_unit`` (N,) and ``e2ip_coefficients`` (N, C).

        Parameters
        ----------
        invariant, equivariant : (N, F), (N″, G)
            Features as the layout describes them; of the second the first N rows are read.
        species : (N,) int
            Index among the model's species.
        neighbours : Neighbours, optional
            For the leverage; None: of the atom alone.
        edges : Edges, optional
            Needed where ``has_pool``.
        node_heads : (N,) int, optional
            Data set of every atom, where there are several.
        positions : (N, 3), optional
            What the features were computed from, with a graph, in Å; for families that take forces. Without them, the
            outputs of such a family are left out.
        create_graph : bool
            Whether such outputs are going to be differentiated, in training for example.
        frames : (N,) int, optional
            Frame of every atom; None: all are of one.
        num_frames : int
            0: `e2ip_plugins.keys.FRAME_OUTPUTS` are left out.
        cells : (F, 3, 3), optional
            In Å; None: stresses have no error bars.
        """
        atoms = (invariant, equivariant, species, neighbours, edges, node_heads)
        arguments = (*atoms, positions, create_graph, frames, num_frames)
        if torch.jit.is_scripting():
            outputs, vectors = self._plain(*arguments)
        else:
            outputs, vectors = self._predict(*arguments)
        if vectors is not None:
            outputs["energy_error_vector"] = vectors
            std = torch.linalg.vector_norm(vectors, dim=1)
            outputs["energy_uncertainty"] = std
            if cells is not None and self.leverage.energies.stress_factors.shape[0] > 0:
                # Not a determinant, which compiled files would need LAPACK for.
                areas = torch.linalg.cross(cells[:, 0], cells[:, 1], dim=-1)
                volumes = (areas * cells[:, 2]).sum(-1).abs().to(std.dtype)
                covariance = self.leverage.energies.stress_covariance(std, volumes, node_heads, frames)
                outputs["stress_cov"] = covariance
                outputs["stress_uncertainty"] = covariance.diagonal(dim1=1, dim2=2).sqrt()
        return outputs

    def _predict(self, *arguments: Any) -> Tuple[Dict[str, Tensor], Optional[Tensor]]:
        """As `_plain`, on a GPU with few launches where that is possible."""
        species, (create_graph, frames, num_frames) = arguments[2], arguments[7:]
        inputs = (*arguments[:6], num_frames > 0)
        outputs = None if create_graph else fused.predict(self, *inputs)
        if outputs is None:
            return self._plain(*arguments)
        weights, whitened = outputs.pop("weights"), outputs.pop("whitened")
        if num_frames == 0:
            return outputs, None
        vectors = self.leverage.energies.of_weights(weights, whitened, species, frames, num_frames)
        return outputs, vectors.to(outputs["e2ip_nu"].dtype)

    def _plain(
        self,
        invariant: Tensor,
        equivariant: Tensor,
        species: Tensor,
        neighbours: Optional[Neighbours],
        edges: Optional[Edges],
        node_heads: Optional[Tensor],
        positions: Optional[Tensor],
        create_graph: bool,
        frames: Optional[Tensor],
        num_frames: int,
    ) -> Tuple[Dict[str, Tensor], Optional[Tensor]]:
        """Return the outputs of atoms and, where wanted and possible, the error vectors of frames."""
        scalars = gather_scalars(invariant, self.scalar_blocks)
        coefficients = self._coefficients(scalars, equivariant, edges, node_heads)
        force_unit = self.force_unit
        if self.double_outputs:
            coefficients, force_unit = coefficients.double(), force_unit.double()
        if self.takes_forces and not create_graph:
            scalars = scalars.detach()
        support = self.leverage(scalars, species, node_heads, neighbours)
        outputs: Dict[str, Tensor] = {}
        if self.takes_forces:
            if positions is not None:
                forces = forces_of(coefficients, positions, create_graph)
                outputs = self.family(forces, force_unit, support)
                outputs["e2ip_coefficients"] = forces
        else:
            outputs = self.family(coefficients, force_unit, support)
            outputs["e2ip_coefficients"] = coefficients
        outputs["e2ip_leverage"] = support.leverage.to(coefficients.dtype)
        outputs["e2ip_force_unit"] = force_unit.expand(coefficients.shape[0])
        vectors: Optional[Tensor] = None
        if num_frames > 0 and "forces_uncertainty" in outputs:
            std = torch.linalg.vector_norm(outputs["forces_uncertainty"], dim=-1)
            if std.dtype != scalars.dtype:
                std = std.to(scalars.dtype)
            grows = self.family.takes_support
            vectors = self.leverage.energies(support, std, species, node_heads, frames, num_frames, grows)
            if vectors.dtype != coefficients.dtype:
                vectors = vectors.to(coefficients.dtype)
        return outputs, vectors

    def _coefficients(
        self, scalars: Tensor, equivariant: Tensor, edges: Optional[Edges], node_heads: Optional[Tensor]
    ) -> Tensor:
        """Return the coefficients (N, C) of all atoms, each from the trunk of its head."""
        # Where NequIP truncates to local atoms, so does everything below.
        equivariant = equivariant[: scalars.shape[0]]
        vectors = gather(equivariant, self.vector_blocks, 3, self.components_first)
        tensors = gather(equivariant, self.tensor_blocks, 5, self.components_first)
        pooled: Optional[EdgeTensors] = None
        if self.has_pool:
            assert edges is not None
            senders = edges.senders
            if senders is None:
                senders = scalars
            pooled = self.pool(edges.vectors, edges.radial, senders, edges.sender, edges.receiver)
        # Every trunk is evaluated: one left out of the graph would stall DDP.
        by_head: List[Tensor] = []
        for trunk in self.trunks:
            by_head.append(trunk(scalars, vectors, tensors, pooled))
        coefficients = by_head[0]
        if len(by_head) > 1:
            assert node_heads is not None
            coefficients = torch.stack(by_head)[node_heads, torch.arange(scalars.shape[0], device=scalars.device)]
        return coefficients

    def _save_to_state_dict(self, destination: Dict[str, Any], prefix: str, keep_vars: bool) -> None:
        # PyTorch keeps the number of the format beside the state, and does so with the release for messages.
        if hasattr(destination, "_metadata"):
            destination._metadata[prefix[:-1]]["release"] = __version__
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self, state_dict: Dict[str, Tensor], prefix: str, local_metadata: Dict[str, Any], *args: Any
    ) -> None:
        # PyTorch keeps the version of every module beside its state; copies of the state may lack it.
        READOUTS.check(local_metadata.get("version", READOUTS.number), "this checkpoint", local_metadata.get("release"))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def unfitted(readout: Optional[nn.Module]) -> str:
    """Return a warning about a readout that takes a leverage which was never fitted; empty for all others."""
    # Packages carry their own code, whose families may know no leverage.
    family: Any = getattr(readout, "family", None)
    if not getattr(family, "takes_support", False) or bool(cast(Readout, readout).leverage.fitted):
        return ""
    return (
        "this model's evidence mode is 'leverage', but its leverage was never fitted: it predicts as in mode "
        "'coupled', and e2ip_leverage is -1; a training fits the model that it leaves, or says at its end why it "
        "cannot; `e2ip fit` fits any"
    )


def vector_length(readout: Optional[nn.Module], head: int = 0) -> int:
    """Return how many numbers an error vector of energies has; 0 where those of a head have no error bars."""
    if readout is None:
        return 0
    energies = cast(Readout, readout).leverage.energies
    lengths = energies.lengths.reshape(energies.blocks, len(energies.floors), -1)
    return energies.blocks * energies.length if bool(lengths[:, head].any()) else 0


def model_name(readout: Optional[nn.Module]) -> Optional[str]:
    """Return the name of a readout in files, ``readout-`` and a hash; None for None.

    The hash is of its weights and its leverage: the same on every device, in float32 and float64, scripted or not;
    another one after training, after `e2ip fit`, and where some of the heads are left out.
    """
    if readout is None:
        return None
    digest = hashlib.sha256()
    # Not the state: a scripted one has also the buffers that are not saved.
    leverage = [(name, values) for name, values in readout.named_buffers() if name.startswith("leverage.")]
    for name, values in sorted([*readout.named_parameters(), *leverage], key=lambda pair: pair[0]):
        digest.update(name.encode())
        digest.update(values.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
    # Not the hash alone: readers of extxyz take 1234e5678901 for a number.
    return f"readout-{digest.hexdigest()[:12]}"
