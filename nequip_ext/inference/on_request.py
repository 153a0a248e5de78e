"""An e²IP model that evaluates NequIP alone; its readout runs when someone asks for the uncertainties."""

import copy
from typing import Any, Dict

import torch
from nequip.data import AtomicDataDict

from nequip_ext.model.readout import graph_readouts


def readout_path(model: Any) -> str:
    """Return the name, in an eager e²IP model, of the module with its readout; it takes a while in large models."""
    (path,) = graph_readouts(model)
    return path


class HostModel:
    """Stand-in for an eager e²IP model: energy and forces to the last bit, and no readout until `read_out`.

    Of the last call it keeps what the readout reads, without a graph: features, positions and edges. A readout that
    takes forces has another evaluation of the model in place of that.

    Parameters
    ----------
    model : GraphModel
    path : str
        Its `readout_path`.
    """

    def __init__(self, model: Any, path: str) -> None:
        self._model, self._readout = model, model.get_submodule(path)
        self._host = _without(model, path)
        self.family_name = self._readout.readout.family_name

    def __call__(self, data: AtomicDataDict.Type) -> AtomicDataDict.Type:
        again = self._readout.readout.takes_forces
        inputs = dict(data) if again else None
        output = self._host(data)
        self._inputs = _detached(output if inputs is None else inputs)
        return output

    def read_out(self) -> AtomicDataDict.Type:
        """Return what the model puts out for the last call, the readout's outputs among it."""
        if self._readout.readout.takes_forces:
            with torch.enable_grad():
                return self._model(self._inputs)
        return self._readout(dict(self._inputs))


def _without(module: torch.nn.Module, path: str) -> torch.nn.Module:
    """Return a module that shares all modules and weights with the first, except the one at a path."""
    name, _, further = path.partition(".")
    copied, children = copy.copy(module), dict(module._modules)
    if further:
        child = module.get_submodule(name)
        children[name] = _without(child, further)
    else:
        del children[name]
    copied._modules = children
    return copied


def _detached(fields: AtomicDataDict.Type) -> Dict[str, torch.Tensor]:
    return {name: value.detach() if torch.is_tensor(value) else value for name, value in fields.items()}
