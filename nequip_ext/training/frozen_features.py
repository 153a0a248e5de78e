"""With ``forces: fixed``: the inner model is evaluated once for every structure of a training, not in every epoch."""

from typing import Any, Dict, List, Tuple

import torch
from nequip.data import AtomicDataDict, _key_registry

from e2ip_plugins.readout.frozen_features import FrozenFeatures, structure_key
from nequip_ext.model.readout import LAST_KEY, TAP_KEY, GraphReadout, graph_readouts

#: What the readout reads of the inner model, with rows beyond those of atoms in some models.
_TAPS = (TAP_KEY, LAST_KEY)
_key_registry.register_fields(node_fields=_TAPS)


def remember(pl_module: torch.nn.Module) -> None:
    """Let models whose forces are fixed remember what their readout reads, and all that they put out beside it."""
    for model in _models(pl_module):
        readouts = list(graph_readouts(model).values())
        # What needs a graph is computed every time.
        if len(readouts) == 1 and not readouts[0].readout.takes_forces and "forward" not in vars(model):
            model.forward = _Forward(model.forward, readouts[0])


def forget(pl_module: torch.nn.Module) -> None:
    """End of `remember`."""
    for model in _models(pl_module):
        if isinstance(vars(model).get("forward"), _Forward):
            del model.forward


def _models(pl_module: torch.nn.Module) -> List[Any]:
    return [module for module in pl_module.modules() if getattr(module, "is_graph_model", False)]


class _Forward:
    """Takes the place of a ``GraphModel``'s ``forward``, ``compute``."""

    def __init__(self, compute: Any, readout: GraphReadout) -> None:
        self.compute, self.readout, self.remembered = compute, readout, FrozenFeatures()

    def __call__(self, data: AtomicDataDict.Type) -> AtomicDataDict.Type:
        batch = AtomicDataDict.with_batch_(dict(data))
        keys = _keys(batch)
        parts = self.remembered.get(keys)
        if parts is not None and all(part.keys() == parts[0].keys() for part in parts):
            return self.readout(AtomicDataDict.batched_from_list(list(parts)))
        read: Dict[str, torch.Tensor] = {}
        written: Dict[str, torch.Tensor] = {}
        # Nothing is seen inside what NequIP has compiled for training: that is computed every time.
        with (
            self.readout.register_forward_pre_hook(lambda _, inputs: read.update(inputs[0])),
            self.readout.register_forward_hook(lambda _, inputs, outputs: written.update(outputs)),
        ):
            output = self.compute(data)
        if read:
            fields = {**batch, **read, **{name: value for name, value in output.items() if name not in written}}
            fields |= {name: fields[name][: len(batch[AtomicDataDict.BATCH_KEY])] for name in _TAPS if name in fields}
            known = _key_registry._GRAPH_FIELDS | _key_registry._NODE_FIELDS | _key_registry._EDGE_FIELDS
            fields = {name: fields[name] for name in fields if name in known or name == AtomicDataDict.EDGE_INDEX_KEY}
            for index, key in enumerate(keys):
                self.remembered.put(key, AtomicDataDict.frame_from_batched(fields, index))
        return output


def _keys(batch: AtomicDataDict.Type) -> Tuple[bytes, ...]:
    """Return keys of the frames, by types, positions, cell, and periodicity by the edges."""
    counts = batch[AtomicDataDict.NUM_NODES_KEY].tolist()
    frames = batch[AtomicDataDict.BATCH_KEY][batch[AtomicDataDict.EDGE_INDEX_KEY][0]]
    edges = torch.bincount(frames, minlength=len(counts))
    cells = batch.get(AtomicDataDict.CELL_KEY, torch.zeros(len(counts)))
    nodes = [batch[name].split(counts) for name in (AtomicDataDict.POSITIONS_KEY, AtomicDataDict.ATOM_TYPE_KEY)]
    return tuple(map(structure_key, *nodes, cells, edges))
