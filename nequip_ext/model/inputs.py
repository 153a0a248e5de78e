"""Inputs of NequIP models: types and neighbours of a frame, and the fields that a graph model reads."""

from typing import Any, Callable, Dict, List, Sequence

from nequip.data import AtomicDataDict
from nequip.nn import graph_model

from nequip_ext.compat import basic_transforms


def transforms_of(metadata: Any, names: Sequence[str], types: Dict[str, str]) -> List[Callable]:
    """Return the transforms that add types, by element, and neighbours to NequIP's dictionary of a frame."""
    return basic_transforms(metadata, float(metadata[graph_model.R_MAX_KEY]), list(names), types)


def inputs_of(model: Any, data: AtomicDataDict.Type) -> AtomicDataDict.Type:
    """Return the fields of ``data`` that the energy part of a ``GraphModel``, ``model.model.func``, reads."""
    inputs = {key: data[key] for key in model.model_input_fields if key in data}
    if AtomicDataDict.CELL_KEY in inputs:
        inputs[AtomicDataDict.CELL_KEY] = inputs[AtomicDataDict.CELL_KEY].view(-1, 3, 3)
    return inputs
