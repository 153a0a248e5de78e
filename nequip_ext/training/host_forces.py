"""``forces: host``: the host's own loss alone trains energies and forces, while the readout learns beside it.

`nequip_ext.model.readout.GraphReadout` detaches what it reads, `nequip_ext.training.loss.ForceLoss` has the host's
value, and what is here keeps the readout's gradients out of the norm by which Lightning clips the others.
"""

import functools
from typing import Any, Callable

import torch

from nequip_ext.model.readout import graph_readouts


def clip_apart(pl_module: Any) -> None:
    """Let the gradients of a readout, and those of everything else, be clipped as if the other were not there."""
    clip = pl_module.configure_gradient_clipping
    if not isinstance(clip, functools.partial):
        pl_module.configure_gradient_clipping = functools.partial(_clip_apart, pl_module, clip)


def _clip_apart(pl_module: torch.nn.Module, clip: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    own = {parameter for readout in graph_readouts(pl_module).values() for parameter in readout.parameters()}
    others = [parameter for parameter in pl_module.parameters() if parameter not in own]
    for hidden in (list(own), others):
        gradients = [parameter.grad for parameter in hidden]
        for parameter in hidden:
            parameter.grad = None
        clip(*args, **kwargs)
        for parameter, gradient in zip(hidden, gradients, strict=True):
            parameter.grad = gradient
