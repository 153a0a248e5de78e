"""The e²IP model: the stock `ScaleShiftMACE` and a readout that shares its node features."""

import warnings
from contextlib import contextmanager
from types import FunctionType
from typing import Any, Callable, Dict, Final, Iterator, Optional, Tuple

import torch
from e3nn.util.jit import compile_mode
from mace.modules import models
from mace.modules.utils import get_edge_vectors_and_lengths
from torch import Tensor

from e2ip_plugins.errors import InputError
from e2ip_plugins.keys import COEFFICIENTS_KEY, FORCE_UNIT_KEY, PLATEAU_KEY
from e2ip_plugins.leverage.module import Neighbours
from e2ip_plugins.readout.kernels import fused
from e2ip_plugins.readout.layout import Edges
from e2ip_plugins.readout.readout import Readout
from e2ip_plugins.readout.settings import Settings
from mace_ext import seams
from mace_ext.model.pickling import constructor
from mace_ext.model.readout import build_readout


def _renamed(function: Callable, name: str) -> Callable:
    """Return a method under another name: TorchScript knows no ``super()`` and compiles methods by ``__name__``."""
    copied = FunctionType(function.__code__, function.__globals__, name, function.__defaults__, function.__closure__)
    copied.__annotations__ = function.__annotations__
    return copied


@compile_mode("script")
class ScaleShiftMACE(models.ScaleShiftMACE):
    """MACE's model with an e²IP readout on its node features; energy and forces are MACE's to the last bit.

    It has the name of the stock class because MACE tells models apart by that name.

    Parameters
    ----------
    e2ip_settings : dict
        `Settings.to_dict` of the readout: MACE rebuilds models by ``model.__class__(**config)``.
    e2ip_axes, e2ip_regions, e2ip_stress : int, int, bool
        Numbers of axes, and of regions of each kind, in the leverage, and whether stresses have error bars: MACE then
        copies tensors of the same shape.
    **kwargs
        Arguments of the stock class.
    """

    #: Whether nothing but the readout learns from the readout's loss: ``forces: host`` or ``fixed``.
    learns_alone: Final[bool] = False

    #: Whether a call for an evaluation returns what the loss needs beside the predictions; see `for_loss`.
    returns_loss_inputs: Final[bool] = False

    loss_inputs: Final[Tuple[str, ...]] = (COEFFICIENTS_KEY, FORCE_UNIT_KEY, PLATEAU_KEY)

    host_forward = _renamed(models.ScaleShiftMACE.forward, "host_forward")

    def __init__(
        self,
        *,
        e2ip_settings: Dict[str, Any],
        e2ip_axes: int = 1,
        e2ip_regions: int = 1,
        e2ip_stress: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.set_readout(build_readout(self, Settings.from_dict(e2ip_settings, "this model"), seed=0))
        self.e2ip_readout.leverage.resize(e2ip_axes, e2ip_regions)
        if e2ip_stress:
            self.e2ip_readout.leverage.energies.make_stress_factors()

    def set_readout(self, readout: Readout) -> None:
        """Attach a readout that `mace_ext.model.readout.build_readout` made for this model."""
        self.e2ip_readout = readout
        self.learns_alone = readout.settings.detached  # type: ignore[misc]

    def __reduce__(self):
        return constructor("model.model", "open_model"), (self.e2ip_readout.settings.to_dict(),), self.__dict__

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
        """The stock outputs and, unless ``lammps_mliap``, those of `e2ip_plugins.readout.readout.Readout`.

        What only the loss reads is among them with ``training``, and within `for_loss`.
        """
        outputs: Dict[str, Tensor] = {}
        takes_forces = self.e2ip_readout.takes_forces and compute_force and not lammps_mliap
        if takes_forces and not training:
            # A second pass: MACE frees the graph that this needs, or with ``training`` rounds forces differently.
            outputs = self._outputs_with_forces(data.copy(), False)
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
        if training:
            differentiated: Optional[Tensor] = None
            if takes_forces:
                differentiated = data["positions"]
            elif self.learns_alone:
                node_feats = node_feats.detach()
            # As in `read_out`.
            positions, shifts = data["positions"].detach(), data["shifts"].detach()
            outputs = self._outputs(data, node_feats, positions, shifts, differentiated, takes_forces, True)
        elif not takes_forces:
            outputs = self.read_out(data, node_feats)
        for key, value in outputs.items():
            if training or self.returns_loss_inputs or key not in self.loss_inputs:
                output[key] = value
        return output

    def read_out(self, data: Dict[str, Tensor], node_feats: Tensor) -> Dict[str, Tensor]:
        """Return the outputs, without a graph, of a readout that takes no forces.

        Parameters
        ----------
        data : dict
            As `host_forward` leaves it.
        node_feats : (N, F)
            Features that it returned.
        """
        # Detached, so that nothing before the weights of the pool learns from its edges.
        positions, shifts = data["positions"].detach(), data["shifts"].detach()
        return self._outputs(data, node_feats.detach(), positions, shifts, None, False)

    def uncertainty_outputs(self, data: Dict[str, Tensor]) -> Dict[str, Tensor]:
        """Return the readout's outputs with their graph back to ``data["positions"]``; forces are not computed.

        Without gradients a readout that takes forces returns its leverage alone.
        """
        return self._outputs_with_forces(data, True)

    def _outputs_with_forces(self, data: Dict[str, Tensor], create_graph: bool) -> Dict[str, Tensor]:
        node_feats = self.host_forward(data, compute_force=False)["node_feats"]
        assert node_feats is not None
        positions, shifts = data["positions"], data["shifts"]
        differentiated: Optional[Tensor] = None
        if torch.is_grad_enabled():
            differentiated = positions
        if not create_graph:
            positions, shifts = positions.detach(), shifts.detach()
        return self._outputs(data, node_feats, positions, shifts, differentiated, create_graph)

    def _envelope(self, lengths: Tensor) -> Tensor:
        """Return MACE's cutoff function of lengths (E, 1)."""
        envelope: Optional[Tensor] = None
        if not torch.jit.is_scripting():
            envelope = _launched_envelope(self.radial_embedding.cutoff_fn, lengths)
        if envelope is None:
            envelope = self.radial_embedding.cutoff_fn(lengths)
        return envelope

    def _outputs(
        self,
        data: Dict[str, Tensor],
        node_feats: Tensor,
        positions: Tensor,
        shifts: Tensor,
        differentiated: Optional[Tensor],
        create_graph: bool,
        training: bool = False,
    ) -> Dict[str, Tensor]:
        """Return the readout's outputs for node features (N, F); ``differentiated`` and ``create_graph`` as `Readout`
        has them. ``training``: those of frames are left out.
        """
        index = data["edge_index"]
        vectors, lengths = get_edge_vectors_and_lengths(positions=positions, edge_index=index, shifts=shifts)
        cutoff = self._envelope(lengths)
        neighbours = Neighbours(lengths.squeeze(-1), cutoff.squeeze(-1), index[0], index[1])
        edges: Optional[Edges] = None
        if self.e2ip_readout.has_pool:
            # The same as MACE's radial embedding, but the cutoff has been computed already.
            reach = lengths
            if hasattr(self.radial_embedding, "distance_transform"):
                reach = self.radial_embedding.distance_transform(
                    lengths, data["node_attrs"], index, self.atomic_numbers
                )
            radial = self.radial_embedding.bessel_fn(reach) * cutoff
            edges = Edges(vectors, radial, index[0], index[1], None)
        node_heads: Optional[Tensor] = None
        if len(self.e2ip_readout.trunks) > 1:
            node_heads = torch.zeros_like(data["batch"])
            if "head" in data:
                node_heads = data["head"][data["batch"]]
        species = torch.argmax(data["node_attrs"], dim=1)
        frames = 0 if training else data["ptr"].numel() - 1
        return self.e2ip_readout(
            node_feats,
            node_feats,
            species,
            neighbours,
            edges,
            node_heads,
            differentiated,
            create_graph,
            data["batch"],
            frames,
            data["cell"].detach().view(-1, 3, 3),
        )


def _launched_envelope(function: Any, lengths: Tensor) -> Optional[Tensor]:
    """Return MACE's polynomial cutoff in one launch; None where it is another function, or no kernel runs."""
    # Modules of e3nn may be scripted.
    if getattr(function, "original_name", type(function).__name__) != "PolynomialCutoff":
        return None
    return fused.polynomial_envelope(lengths, function.r_max, function.p)


def open_model(settings: Dict[str, Any]) -> ScaleShiftMACE:
    """Return a model without any state if its settings can be read: what opening a ``.model`` file calls first.

    See `mace_ext.model.pickling`.
    """
    Settings.from_dict(settings, "this model")
    problem = seams.problem()
    if problem:
        warnings.warn(f"this model predicts uncertainties, but MACE's tools show none here: {problem}", stacklevel=2)
    else:
        seams.warn_if_untested()
    return ScaleShiftMACE.__new__(ScaleShiftMACE)


@contextmanager
def for_loss(model: Any) -> Iterator[None]:
    """Let an e²IP model, which may be wrapped by DDP, return what its loss reads in evaluations, too."""
    model = getattr(model, "module", model)
    if not isinstance(model, ScaleShiftMACE) or model.returns_loss_inputs:
        yield
        return
    model.returns_loss_inputs = True  # type: ignore[misc]
    try:
        yield
    finally:
        del model.returns_loss_inputs


def add_readout(model: models.ScaleShiftMACE, settings: Settings, seed: int = 0) -> None:
    """Turn a stock model into an e²IP model in place; its weights stay as they are.

    Raises
    ------
    InputError
        If the model is not MACE's own `ScaleShiftMACE`.
    """
    if type(model) is not models.ScaleShiftMACE:
        raise InputError(
            f"--readout {settings.family} needs --model MACE or ScaleShiftMACE, not {type(model).__name__}"
        )
    readout = build_readout(model, settings, seed)
    model.__class__ = ScaleShiftMACE
    model.set_readout(readout)
