"""What NequIP models take of a frame: types and neighbours, and of those what a graph model reads."""

from typing import Any, Callable, Dict, List, Sequence

from nequip.data import AtomicDataDict
from nequip.nn import graph_model

from nequip_ext.compat import basic_transforms


def transforms_of(metadata: Any, names: Sequence[str], types: Dict[str, str]) -> List[Callable]:
    """What makes NequIP's dictionary of a frame one with types, given by element, and neighbours."""
    return basic_transforms(metadata, float(metadata[graph_model.R_MAX_KEY]), list(names), types)


def inputs_of(model: Any, data: AtomicDataDict.Type) -> AtomicDataDict.Type:
    """What the energy part of a ``GraphModel``, ``model.model.func``, takes of ``data``."""
    inputs = {key: data[key] for key in model.model_input_fields if key in data}
    if AtomicDataDict.CELL_KEY in inputs:
        inputs[AtomicDataDict.CELL_KEY] = inputs[AtomicDataDict.CELL_KEY].view(-1, 3, 3)
    return inputs
