"""Which elements belong to the types of a saved model: in NequIP types have free names, which usually are elements."""

from pathlib import Path
from typing import Any, Dict, Iterator, Mapping, Sequence, Union

import torch

from nequip_ext.model.configs import package_config

#: Types by element, or True where types are elements, as NequIP's calculators take it.
Types = Union[bool, Dict[str, str]]

_MAP = "chemical_species_to_atom_type_map"


def types_of(path: Union[str, Path]) -> Types:
    """Return the map in the data section of the training that a checkpoint or package comes from.

    Without one it is True, so that types which are no elements raise an error where elements are needed.
    """
    types = next(_mappers(_data_section(Path(path))), {})
    return types if any(element != name for element, name in types.items()) else True


def by_element(types: Types, names: Sequence[str]) -> Dict[str, str]:
    """Return types by element; ``names`` are the model's types."""
    return {name: name for name in names} if isinstance(types, bool) else types


def _data_section(path: Path) -> Any:
    try:
        if path.suffix == ".zip":
            return package_config(path)
        return torch.load(path, map_location="cpu", weights_only=False)["hyper_parameters"]["info_dict"]["data"]
    # Opening the file as a model says what is wrong with it.
    except Exception:
        return None


def _mappers(section: Any) -> Iterator[Dict[str, str]]:
    """Yield every map from elements to types in a section of a config."""
    if isinstance(section, Mapping):
        if isinstance(section.get(_MAP), Mapping):
            yield {str(element): str(name) for element, name in section[_MAP].items()}
        if "package_path" in section:  # e2ip fit gave a package a readout
            yield from _mappers(_data_section(Path(section["package_path"])))
        section = list(section.values())
    if isinstance(section, Sequence) and not isinstance(section, str):
        for part in section:
            yield from _mappers(part)
