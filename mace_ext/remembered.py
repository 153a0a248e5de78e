"""With ``forces: fixed``: the stock model is evaluated once for every structure of a training, not in every epoch."""

import itertools
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch
from torch import Tensor

from e2ip_plugins.tools.remembered import Remembered, key_of

#: Outputs of MACE by atom and by structure, as far as a training reads them.
_BY_ATOM, _BY_FRAME = ("forces", "node_feats", "node_energy"), ("energy", "interaction_energy", "virials", "stress")


@contextmanager
def remembering(model: Any) -> Iterator[None]:
    """Let an e²IP model whose forces are fixed remember the stock outputs until the end of a training."""
    readout = getattr(model, "e2ip_readout", None)
    # What depends on more than the structure, or needs a graph, is computed every time.
    fixed = readout is not None and readout.settings.forces == "fixed" and not readout.takes_forces
    if not fixed or hasattr(model, "joint_embedding"):
        yield
        return
    model.host_forward = _HostForward(model.host_forward)
    try:
        yield
    finally:
        del model.host_forward


class _HostForward:
    """In the place of ``host_forward``."""

    def __init__(self, compute: Any) -> None:
        self.compute, self.remembered = compute, Remembered()

    def __call__(self, data: Dict[str, Tensor], *options: Any, **named: Any) -> Dict[str, Optional[Tensor]]:
        ends = data["ptr"].tolist()
        frames = [slice(start, end) for start, end in itertools.pairwise(ends)]
        keys = _keys(data, frames, (*options, *sorted(named.items())))
        found = self.remembered.get(keys)
        if found is not None:
            return {name: torch.cat([tensors[name] for tensors in found]) for name in found[0]}
        output = self.compute(data, *options, **named)
        for i, (key, atoms) in enumerate(zip(keys, frames, strict=True)):
            parts = {name: output[name][atoms] for name in _BY_ATOM if output.get(name) is not None}
            parts |= {name: output[name][i : i + 1] for name in _BY_FRAME if output.get(name) is not None}
            self.remembered.put(key, parts)
        return output


def _keys(data: Dict[str, Tensor], frames: List[slice], options: Any) -> Tuple[bytes, ...]:
    """Of species, positions, cell, and periodicity by the edges."""
    cells = data["cell"].reshape(len(frames), -1, 3)
    edges = torch.bincount(data["batch"][data["edge_index"][1]], minlength=len(frames))
    said = torch.tensor(list(repr(options).encode()), dtype=torch.uint8)
    heads = data.get("head", torch.zeros(len(frames)))
    return tuple(
        key_of(data["node_attrs"][atoms], data["positions"][atoms], cells[i], edges[i], heads[i], said)
        for i, atoms in enumerate(frames)
    )
