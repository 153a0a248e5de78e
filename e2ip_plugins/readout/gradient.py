"""Gradients of an uncertainty in the atomic positions: the bias force of uncertainty-driven MD.

Outside training NequIP and MACE keep the graph of the energy alone. So the adapters evaluate the model again for this,
without forces: ``nequip_ext.uncertainty_gradient``, ``mace_ext.uncertainty_gradient``.
"""

from typing import Callable, Dict, List, Tuple, Union

import torch
from torch import Tensor, nn

from e2ip_plugins.errors import InputError

#: An output key, or a function of all of them.
Uncertainty = Union[str, Callable[[Dict[str, Tensor]], Tensor]]


def differentiate(
    outputs: Dict[str, Tensor], positions: Tensor, uncertainty: Uncertainty, create_graph: bool
) -> Tuple[Tensor, Tensor]:
    """Return the value u of an uncertainty and ∂(Σ u)/∂(positions).

    Parameters
    ----------
    outputs
        Every output key of a family, computed from ``positions`` with a graph.
    positions : (N, 3)
        In Å.
    uncertainty
        Name of a key, or a function from ``outputs`` to a tensor, of which the sum is differentiated.
    create_graph : bool
        Whether value and gradient can be differentiated once more.

    Returns
    -------
    value
        As the key or function gives it.
    gradient : (N, 3)
        In the value's unit per Å. An atom's row collects what moving it does to all atoms' uncertainties.
    """
    value = evaluate(uncertainty, outputs)
    if isinstance(uncertainty, str) and not value.requires_grad and not value.any():
        raise InputError(
            f"{uncertainty} is zero for every atom, as the epistemic part is of families that have none: take "
            "e2ip_leverage or forces_uncertainty"
        )
    if not isinstance(value, Tensor) or not value.requires_grad:
        raise InputError(
            "the uncertainty has no graph back to the positions: is it one that this readout does not have (families "
            "without an epistemic part: take e2ip_leverage or forces_uncertainty)? A function must return a tensor "
            "computed from the outputs that it is given, and nothing works inside torch.inference_mode()"
        )
    (gradient,) = torch.autograd.grad(value.sum(), positions, create_graph=create_graph)
    if not create_graph:
        value = value.detach()
    return value, gradient


def evaluate(uncertainty: Uncertainty, outputs: Dict[str, Tensor]) -> Tensor:
    """Return the value of an uncertainty; `InputError` for unknown keys."""
    if callable(uncertainty):
        return uncertainty(outputs)
    if uncertainty not in outputs:
        raise InputError(f"unknown uncertainty '{uncertainty}'; choose from: {', '.join(outputs)}; or give a function")
    return outputs[uncertainty]


def feature_gradient(readout: nn.Module, gradient: Callable[[Uncertainty], Tuple[Tensor, Tensor]]) -> Tensor:
    """Return ∂(sum of the first atom's invariant features)/∂(positions) (N, 3), in 1/Å.

    Parameters
    ----------
    readout : Readout
        Whose first input the features are.
    gradient : callable
        Evaluates the model of this readout, and returns an uncertainty's value and gradient as `differentiate` does.
    """
    inputs: List[Tensor] = []
    handle = readout.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    try:
        return gradient(lambda _: inputs[-1][0].sum())[1]
    finally:
        handle.remove()
