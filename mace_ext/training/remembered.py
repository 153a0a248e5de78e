"""With ``forces: fixed``: the stock model is evaluated once for every structure of a training, not in every epoch.

Nor once more for the fit of the leverage and the final tables.
"""

import inspect
import itertools
import weakref
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch
from torch import Tensor

from e2ip_plugins.readout.frozen_features import FrozenFeatures, structure_key

#: Outputs of MACE by atom and by structure, as far as a training reads them.
_BY_ATOM, _BY_FRAME = ("forces", "node_feats", "node_energy"), ("energy", "interaction_energy", "virials", "stress")
#: Options that an output answers. Of the others, graphs for a ``training`` are of no use here.
_ANSWERS = {"compute_force": "forces", "compute_virials": "virials", "compute_stress": "stress"}
#: By model, for as long as there is the model.
_OF_MODELS: "weakref.WeakKeyDictionary[Any, FrozenFeatures]" = weakref.WeakKeyDictionary()


@contextmanager
def remembering(model: Any, more: bool = True) -> Iterator[None]:
    """Let an e²IP model whose forces are fixed use the stock outputs that it remembers, also of contexts before.

    Parameters
    ----------
    more : bool
        Whether it remembers further ones: those of a test set are wanted once.
    """
    readout = getattr(model, "e2ip_readout", None)
    # What depends on more than the structure, or needs a graph, is computed every time.
    fixed = readout is not None and readout.settings.forces == "fixed" and not readout.takes_forces
    if not fixed or hasattr(model, "joint_embedding"):
        yield
        return
    # Not kept by the model, which is saved between two contexts.
    model.host_forward = _HostForward(model.host_forward, _OF_MODELS.setdefault(model, FrozenFeatures()), more)
    try:
        yield
    finally:
        del model.host_forward


class _HostForward:
    """In the place of ``host_forward``."""

    def __init__(self, compute: Any, remembered: FrozenFeatures, more: bool) -> None:
        self.compute, self.remembered, self.more = compute, remembered, more
        self.signature = inspect.signature(compute)

    def __call__(self, data: Dict[str, Tensor], *options: Any, **named: Any) -> Dict[str, Optional[Tensor]]:
        ends = data["ptr"].tolist()
        frames = [slice(start, end) for start, end in itertools.pairwise(ends)]
        given = self.signature.bind(data, *options, **named)
        given.apply_defaults()
        wanted = {_ANSWERS.get(name, name) for name, on in given.arguments.items() if on is True and name != "training"}
        keys = _keys(data, frames)
        found = self.remembered.get(keys)
        # Who wants less than the training is served as well.
        there = set.intersection(*map(set, found)) if found else set()
        if found and wanted <= there:
            return {name: torch.cat([tensors[name] for tensors in found]) for name in there}
        output = self.compute(data, *options, **named)
        if not self.more:
            return output
        for i, (key, atoms) in enumerate(zip(keys, frames, strict=True)):
            parts = {name: output[name][atoms] for name in _BY_ATOM if output.get(name) is not None}
            parts |= {name: output[name][i : i + 1] for name in _BY_FRAME if output.get(name) is not None}
            self.remembered.put(key, parts)
        return output


def _keys(data: Dict[str, Tensor], frames: List[slice]) -> Tuple[bytes, ...]:
    """Of species, positions, cell, and periodicity by the edges."""
    cells = data["cell"].reshape(len(frames), -1, 3)
    edges = torch.bincount(data["batch"][data["edge_index"][1]], minlength=len(frames))
    heads = data.get("head", torch.zeros(len(frames)))
    return tuple(
        structure_key(data["node_attrs"][atoms], data["positions"][atoms], cells[i], edges[i], heads[i])
        for i, atoms in enumerate(frames)
    )
