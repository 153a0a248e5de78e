"""An e²IP model that evaluates NequIP alone; its readout runs when someone asks for the uncertainties."""

import copy
from typing import Any, Dict, Iterable

import torch
from nequip.data import AtomicDataDict

from nequip_ext.model.readout import graph_readouts


class HostModel:
    """Stand-in for an eager e²IP model: energy and forces to the last bit, and no readout until `read_out`.

    Of the last call it keeps what the readout reads, without a graph: features, positions and edges. A readout that
    takes forces has another evaluation of the model in place of that. Making one takes a while in large models; a copy
    for every evaluation (``copy.copy``) does not.

    Parameters
    ----------
    model : GraphModel
    """

    def __init__(self, model: Any) -> None:
        ((path, self._readout),) = graph_readouts(model).items()
        self.model, self._host = model, _without(model, path)
        self._again = bool(self._readout.readout.takes_forces)
        #: Names of the fields that the readout reads; None where a package's code does not say: then all are kept.
        self._fields = getattr(self._readout, "fields", None)
        self.family_name = self._readout.readout.family_name

    def __call__(self, data: AtomicDataDict.Type) -> AtomicDataDict.Type:
        inputs = dict(data)
        output = self._host(data)
        self._inputs = _detached(inputs, inputs) if self._again else _detached(output, self._fields or output)
        return output

    def read_out(self) -> AtomicDataDict.Type:
        """Return the readout's outputs for the last call; of one that takes forces, all that the model puts out."""
        if not self._again:
            with torch.no_grad():
                return self._readout._read_out(dict(self._inputs), create_graph=False)
        with torch.inference_mode(False), torch.enable_grad():
            return self.model(self._inputs)


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


def _detached(data: AtomicDataDict.Type, names: Iterable[str]) -> Dict[str, Any]:
    """Return fields without graphs, and without memory of ASE's atoms, which dynamics moves in place.

    Graphs that are kept until the next evaluation make it slower.
    """
    kept = {name: data[name].detach() for name in names if name in data}
    shared = (AtomicDataDict.POSITIONS_KEY, AtomicDataDict.CELL_KEY)
    kept.update({name: kept[name].clone() for name in shared if name in kept})
    return kept
