"""``uncertainty_gradient``: how the uncertainty of a NequIP model changes when atoms move."""

from typing import Tuple

import torch
from nequip.data import AtomicDataDict
from nequip.nn import graph_model
from torch import Tensor

from e2ip_plugins.errors import InputError
from e2ip_plugins.keys import FRAME_OUTPUTS, LEVERAGE
from e2ip_plugins.readout.gradient import Uncertainty, differentiate
from nequip_ext.model.inputs import inputs_of
from nequip_ext.model.readout import KEEP_GRAPH_KEY, find_readout


def uncertainty_gradient(
    model: graph_model.GraphModel,
    data: AtomicDataDict.Type,
    uncertainty: Uncertainty = "forces_epistemic_std",
    create_graph: bool = False,
) -> Tuple[Tensor, Tensor]:
    """Return an uncertainty and the gradient of its sum in the positions, for uncertainty-biased MD.

    Energies and forces are not computed. `E2IPCalculator.uncertainty_gradient` is the same for ASE frames.

    Parameters
    ----------
    model : GraphModel
        One built by `E2IPModel`, eager: compiled files have no graph to differentiate.
    data : dict
        One frame or a batch as the model takes it, neighbour list included.
    uncertainty : str or callable
        An output key; or a function from the dictionary of all output keys, (N,) ones without NequIP's trailing
        axis, to a tensor.
    create_graph : bool
        Whether the results can be differentiated once more, in positions and weights.

    Returns
    -------
    value : (N,) for the default
        In eV/Å.
    gradient : (N, 3)
        ∂(Σ value)/∂(positions), eV/Å². If ``data["pos"]`` requires gradients, the results' graph begins there.

    Raises
    ------
    InputError
        For models without readout or graph, and unknown keys.
    """
    sequence = getattr(getattr(model, "model", None), "func", None)
    if sequence is None:
        raise InputError(
            f"uncertainty_gradient needs an eager model built by nequip_ext.E2IPModel, not a {type(model).__name__}: "
            "load a checkpoint or package (E2IPCalculator.from_saved_model), not a compiled file"
        )
    readout = find_readout(model)
    if readout is None:
        raise InputError("uncertainty_gradient needs a model with an e2ip readout (nequip_ext.E2IPModel)")
    inputs = inputs_of(model, data)
    positions = inputs[AtomicDataDict.POSITIONS_KEY]
    with torch.enable_grad():
        if not positions.requires_grad:
            positions = positions.detach().requires_grad_(True)
        inputs[AtomicDataDict.POSITIONS_KEY] = positions
        inputs[KEEP_GRAPH_KEY] = positions
        computed = sequence(inputs)
        keys = [key for key in (*readout.family.output_keys(), LEVERAGE, *FRAME_OUTPUTS) if key.name in computed]
        outputs = {key.name: computed[key.name] if key.shape else computed[key.name].squeeze(-1) for key in keys}
        return differentiate(outputs, positions, uncertainty, create_graph)
