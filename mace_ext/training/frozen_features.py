"""With ``forces: fixed``: MACE's own model is evaluated once for every structure of a training, not in every epoch.

Nor is it evaluated again for the fit of the leverage and the final tables.
"""

import inspect
import itertools
import weakref
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
from torch import Tensor

from e2ip_plugins.readout.frozen_features import FrozenFeatures, structure_key

#: Outputs of MACE by atom and by structure, as far as a training reads them.
_BY_ATOM, _BY_FRAME = ("forces", "node_feats", "node_energy"), ("energy", "interaction_energy", "virials", "stress")
#: Options that an output answers. Of the others, graphs for a ``training`` are of no use here.
_ANSWERS = {"compute_force": "forces", "compute_virials": "virials", "compute_stress": "stress"}
#: By model, while it exists: the model itself, which is saved between two contexts, must not carry them.
_OF_MODELS: "weakref.WeakKeyDictionary[Any, FrozenFeatures]" = weakref.WeakKeyDictionary()


@contextmanager
def remembering(model: Any, more: bool = True) -> Iterator[None]:
    """Let an e²IP model whose forces are fixed use MACE's outputs that it remembers, also of earlier contexts.

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
    model.host_forward = _HostForward(model.host_forward, _OF_MODELS.setdefault(model, FrozenFeatures()), more)
    try:
        yield
    finally:
        del model.host_forward


class _HostForward:
    """Takes the place of ``host_forward``, ``compute``."""

    def __init__(self, compute: Callable, remembered: FrozenFeatures, more: bool) -> None:
        self.compute, self.remembered, self.more = compute, remembered, more
        self.signature = inspect.signature(compute)

    def __call__(self, data: Dict[str, Tensor], *options: Any, **named: Any) -> Dict[str, Optional[Tensor]]:
        frames = [slice(start, end) for start, end in itertools.pairwise(data["ptr"].tolist())]
        call = self.signature.bind(data, *options, **named)
        call.apply_defaults()
        wanted = {_ANSWERS.get(name, name) for name, on in call.arguments.items() if on is True and name != "training"}
        keys = _keys(data, frames)
        parts = self.remembered.get(keys)
        # Whoever wants less than the training is served as well.
        names = set.intersection(*map(set, parts)) if parts else set()
        if parts and wanted <= names:
            return {name: torch.cat([tensors[name] for tensors in parts]) for name in names}
        output = self.compute(data, *options, **named)
        for i, (key, atoms) in enumerate(zip(keys, frames, strict=True)) if self.more else ():
            rows = {**dict.fromkeys(_BY_ATOM, atoms), **dict.fromkeys(_BY_FRAME, slice(i, i + 1))}
            kept = {name: output[name][row] for name, row in rows.items() if output.get(name) is not None}
            self.remembered.put(key, kept)
        return output


def _keys(data: Dict[str, Tensor], frames: List[slice]) -> Tuple[bytes, ...]:
    """Return keys of the frames, by species, positions, cell, and periodicity by the edges."""
    cells = data["cell"].reshape(len(frames), -1, 3)
    edges = torch.bincount(data["batch"][data["edge_index"][1]], minlength=len(frames))
    heads = data.get("head", torch.zeros(len(frames)))
    species, positions = ([data[name][atoms] for atoms in frames] for name in ("node_attrs", "positions"))
    return tuple(map(structure_key, species, positions, cells, edges, heads))
