"""``uncertainty_gradient``: how the uncertainty of a MACE model changes when atoms move."""

from typing import Dict, Tuple

import torch
from mace.modules import models
from torch import Tensor

from e2ip_plugins.errors import InputError
from e2ip_plugins.keys import LEVERAGE
from e2ip_plugins.readout.gradient import Uncertainty, differentiate
from mace_ext.model.readout import find_family, frame_outputs, has_leverage


def uncertainty_gradient(
    model: models.ScaleShiftMACE,
    data: Dict[str, Tensor],
    uncertainty: Uncertainty = "forces_epistemic_std",
    create_graph: bool = False,
) -> Tuple[Tensor, Tensor]:
    """Return an uncertainty and the gradient of its sum in the positions, for uncertainty-biased MD.

    Forces are not computed. `MACECalculator.uncertainty_gradient` is the same for ASE frames.

    Parameters
    ----------
    model : ScaleShiftMACE
        An e²IP model from a ``.model`` file or checkpoint, not the TorchScript file.
    data : dict
        A batch as the model takes it, ``batch.to_dict()``.
    uncertainty : str or callable
        An output key; or a function from the dictionary of all output keys to a tensor.
    create_graph : bool
        Whether the results can be differentiated once more, in positions and weights.

    Returns
    -------
    value : (N,) for the default
        In eV/Å.
    gradient : (N, 3)
        ∂(Σ value)/∂(positions), eV/Å². If ``data["positions"]`` requires gradients, the results' graph begins there.

    Raises
    ------
    InputError
        For models without readout and unknown keys.
    """
    family = find_family(model)
    if family is None or isinstance(model, torch.jit.ScriptModule):
        raise InputError(
            f"uncertainty_gradient needs a model with an e2ip readout, from the .model file of a run with --readout, "
            f"not from its TorchScript file; this {type(model).__name__} is none (e2ip fit gives a stock model one)"
        )
    data = dict(data)
    with torch.enable_grad():
        if not data["positions"].requires_grad:
            data["positions"] = data["positions"].detach().requires_grad_(True)
        computed = model.uncertainty_outputs(data)
        keys = family.output_keys() + ((LEVERAGE,) if has_leverage(model) else ())
        keys += frame_outputs(model)
        outputs = {key.name: computed[key.name] for key in keys}
        return differentiate(outputs, data["positions"], uncertainty, create_graph)
