"""The e²IP model: the stock `ScaleShiftMACE` and a readout that shares its node features."""

import warnings
from types import FunctionType
from typing import Any, Callable, Dict, Final, List, Optional, Tuple

import torch
from e3nn import o3
from e3nn.util.jit import compile_mode
from mace.modules import models
from mace.modules.utils import get_edge_vectors_and_lengths
from mace.modules.wrapper_ops import get_layout
from torch import Tensor, nn

from e2ip_plugins.errors import InputError
from e2ip_plugins.families.e2ip import derive_niw
from e2ip_plugins.readout.trunk import EdgePool, EvidentialHead
from mace_ext import seams
from mace_ext.pickling import constructor

#: Version of the settings that a model carries; a change of meaning raises it.
CONFIG_VERSION = 1


class Readout(nn.Module):
    """Node features of a MACE model to the distribution parameters, one evidential head per MACE head.

    Names of submodules avoid ``scale``, ``shift``, ``readouts`` and ``atomic_energies``: MACE slices every
    state entry whose name contains one of these when it drops a MACE head.

    Parameters
    ----------
    layers : list of Irreps
        Irreps of each layer's node features; MACE concatenates the layers.
    ir_mul : bool
        Layout of the features: cuEquivariance puts components first.
    num_radial : int
        Radial functions, for the edge pool of models without 2e features.
    num_heads : int
        MACE heads.
    config : dict
        See `readout_config`.
    seed : int
    """

    scalar_slices: List[Tuple[int, int]]
    vector_slices: List[Tuple[int, int]]
    tensor_slices: List[Tuple[int, int]]
    ir_mul: Final[bool]
    has_pool: Final[bool]

    def __init__(
        self,
        layers: List[o3.Irreps],
        ir_mul: bool,
        num_radial: int,
        num_heads: int,
        config: Dict[str, Any],
        seed: int = 0,
    ) -> None:
        super().__init__()
        if config["version"] != CONFIG_VERSION:
            raise InputError(
                f"this model was made by another version of e2ip-plugins (readout version {config['version']}, "
                f"this installation reads {CONFIG_VERSION}); install a matching e2ip-plugins"
            )
        self.scalar_slices = _slices(layers, "0e")
        self.vector_slices = _slices(layers, "1o")
        self.tensor_slices = _slices(layers, "2e")
        self.ir_mul = ir_mul
        self.has_pool = len(self.tensor_slices) == 0
        num_scalars = sum(mul for _, mul in self.scalar_slices)
        num_tensors = sum(mul for _, mul in self.tensor_slices)
        if self.has_pool:
            self.pool = EdgePool(num_scalars, num_radial, seed=seed)
            num_tensors = self.pool.channels
        self.heads = nn.ModuleList(
            [
                EvidentialHead(
                    num_scalars,
                    sum(mul for _, mul in self.vector_slices),
                    num_tensors,
                    evidence_mode=config["evidence"],
                    preset=config["preset"],
                    force_unit=config["force_unit"],
                    seed=seed + i,
                )
                for i in range(num_heads)
            ]
        )

    def _gather(self, node_feats: Tensor, slices: List[Tuple[int, int]], dim: int) -> Tensor:
        """Channels (N, C, dim) of one irrep from all layers."""
        num_atoms = node_feats.shape[0]
        parts: List[Tensor] = []
        for start, mul in slices:
            block = node_feats[:, start : start + mul * dim]
            if self.ir_mul:
                parts.append(block.reshape(num_atoms, dim, mul).transpose(1, 2))
            else:
                parts.append(block.reshape(num_atoms, mul, dim))
        if len(parts) == 0:
            return node_feats.new_zeros((num_atoms, 0, dim))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def forward(
        self, node_feats: Tensor, node_heads: Tensor, edge_vectors: Tensor, radial: Tensor, edge_index: Tensor
    ) -> Dict[str, Tensor]:
        """Parameter keys (N, ...) from node features (N, F) and the MACE head index (N,) of every atom.

        ``edge_vectors`` (E, 3) in Å and ``radial`` (E, num_radial) are read by the edge pool only.
        """
        scalars = self._gather(node_feats, self.scalar_slices, 1).squeeze(-1)
        vectors = self._gather(node_feats, self.vector_slices, 3)
        if self.has_pool:
            tensors = self.pool(edge_vectors, radial, scalars, edge_index[0], edge_index[1])
        else:
            tensors = self._gather(node_feats, self.tensor_slices, 5)
        # Every head is evaluated: a head left out of the graph would stall DDP.
        outputs: List[Dict[str, Tensor]] = []
        for head in self.heads:
            outputs.append(head(scalars, vectors, tensors))
        if len(outputs) == 1:
            return outputs[0]
        atoms = torch.arange(node_feats.shape[0], device=node_feats.device)
        selected: Dict[str, Tensor] = {}
        for key in outputs[0].keys():
            selected[key] = torch.stack([output[key] for output in outputs])[node_heads, atoms]
        return selected


def _renamed(function: Callable, name: str) -> Callable:
    """A method under another name. TorchScript knows no ``super()`` and compiles methods by ``__name__``."""
    copied = FunctionType(function.__code__, function.__globals__, name, function.__defaults__, function.__closure__)
    copied.__annotations__ = function.__annotations__
    return copied


@compile_mode("script")
class ScaleShiftMACE(models.ScaleShiftMACE):
    """MACE's model with an e²IP readout on its node features; energy and forces are MACE's to the last bit.

    MACE tells models apart by the name of their class, hence the name. Saved models are pickles of the
    whole object: the class stays importable under this path for ever.

    Parameters
    ----------
    e2ip_config : dict
        See `readout_config`.
    **kwargs
        Of the stock class.
    """

    host_forward = _renamed(models.ScaleShiftMACE.forward, "host_forward")

    def __init__(self, *, e2ip_config: Dict[str, Any], **kwargs) -> None:
        super().__init__(**kwargs)
        self._add_readout(e2ip_config, 0)

    def _add_readout(self, config: Dict[str, Any], seed: int) -> None:
        self.e2ip_config = dict(config)
        parameter = next(self.parameters())
        self.e2ip_head = Readout(
            layers=[o3.Irreps(str(product.linear.irreps_out)) for product in self.products],
            ir_mul=get_layout(getattr(self.products[0], "cueq_config", None)) == "ir_mul",
            num_radial=self.radial_embedding.out_dim,
            num_heads=len(self.heads),
            config=config,
            seed=seed,
        ).to(dtype=parameter.dtype, device=parameter.device)

    def __reduce__(self):
        return constructor("model", "empty_model"), (), self.__dict__

    def forward(
        self,
        data: Dict[str, Tensor],
        training: bool = False,
        compute_force: bool = True,
        compute_virials: bool = False,
        compute_stress: bool = False,
        compute_displacement: bool = False,
        compute_hessian: bool = False,
        compute_edge_forces: bool = False,
        compute_atomic_stresses: bool = False,
        lammps_mliap: bool = False,
    ) -> Dict[str, Optional[Tensor]]:
        """The stock outputs and, unless ``lammps_mliap``, the parameter and derived keys (see `e2ip_plugins.keys`)."""
        output = self.host_forward(
            data,
            training,
            compute_force,
            compute_virials,
            compute_stress,
            compute_displacement,
            compute_hessian,
            compute_edge_forces,
            compute_atomic_stresses,
            lammps_mliap,
        )
        node_feats = output["node_feats"]
        if lammps_mliap or node_feats is None:
            return output
        if not training:
            node_feats = node_feats.detach()
        # Detached: nothing before the pool's own weights learns from its edges.
        outputs = self._outputs(data, node_feats, data["positions"].detach(), data["shifts"].detach())
        for key, value in outputs.items():
            output[key] = value
        return output

    def uncertainty_outputs(self, data: Dict[str, Tensor]) -> Dict[str, Tensor]:
        """Every key of ours with its graph back to ``data["positions"]``; no forces (see `mace_ext.gradient`)."""
        node_feats = self.host_forward(data, compute_force=False)["node_feats"]
        return self._outputs(data, node_feats, data["positions"], data["shifts"])

    def _outputs(
        self, data: Dict[str, Tensor], node_feats: Tensor, positions: Tensor, shifts: Tensor
    ) -> Dict[str, Tensor]:
        """Parameter and derived keys of every atom."""
        vectors, radial = node_feats, node_feats
        if self.e2ip_head.has_pool:
            vectors, radial = self._edges(data, positions, shifts)
        node_heads = torch.zeros_like(data["batch"])
        if "head" in data:
            node_heads = data["head"][data["batch"]]
        outputs = self.e2ip_head(node_feats, node_heads, vectors, radial, data["edge_index"])
        for key, value in derive_niw(outputs).items():
            outputs[key] = value
        del outputs["e2ip_sigma0_sym6"]
        return outputs

    def _edges(self, data: Dict[str, Tensor], positions: Tensor, shifts: Tensor) -> Tuple[Tensor, Tensor]:
        """Edge vectors (E, 3) in Å and radial functions with cutoff (E, num_radial), for the edge pool."""
        vectors, lengths = get_edge_vectors_and_lengths(
            positions=positions, edge_index=data["edge_index"], shifts=shifts
        )
        radial, cutoff = self.radial_embedding(lengths, data["node_attrs"], data["edge_index"], self.atomic_numbers)
        if cutoff is not None:
            radial = radial * cutoff
        return vectors, radial


def empty_model() -> ScaleShiftMACE:
    """A model without any state: what a ``.model`` file calls first (see `mace_ext.pickling`)."""
    problem = seams.problem()
    if problem:
        warnings.warn(f"this model predicts uncertainties, but MACE's tools show none here: {problem}", stacklevel=2)
    return ScaleShiftMACE.__new__(ScaleShiftMACE)


def readout_config(preset: str, evidence: str, force_unit: float) -> Dict[str, Any]:
    """What a model must know to rebuild its readout, and a checkpoint to tell whether it fits."""
    return {
        "version": CONFIG_VERSION,
        "preset": preset,
        "evidence": evidence,
        "force_unit": float(force_unit),
    }


def add_readout(model: models.ScaleShiftMACE, config: Dict[str, Any], seed: int = 0) -> None:
    """Turn a stock model into an e²IP model in place, its weights untouched.

    Raises
    ------
    InputError
        If the model is not MACE's own `ScaleShiftMACE`.
    """
    if type(model) is not models.ScaleShiftMACE:
        raise InputError(f"--readout e2ip needs --model MACE or ScaleShiftMACE, not {type(model).__name__}")
    model.__class__ = ScaleShiftMACE
    model._add_readout(config, seed)


def _slices(layers: List[o3.Irreps], irrep: str) -> List[Tuple[int, int]]:
    """(start, channels) of an irrep in the concatenated features of all layers."""
    found, offset = [], 0
    for irreps in layers:
        for (mul, ir), part in zip(irreps, irreps.slices(), strict=True):
            if mul > 0 and str(ir) == irrep:
                found.append((offset + part.start, mul))
        offset += irreps.dim
    return found
