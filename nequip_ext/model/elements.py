"""Which elements the types of a saved model are of; types are free names in NequIP, elements only as a rule."""

from pathlib import Path
from typing import Any, Dict, Iterator, Mapping, Sequence, Union

import torch
import yaml
from nequip.model.saved_models.package import _suppress_package_importer_exporter_warnings

#: As NequIP's calculators take it: types by element, or True where they are elements themselves.
Types = Union[bool, Dict[str, str]]

_MAP = "chemical_species_to_atom_type_map"


def types_of(path: Union[str, Path]) -> Types:
    """The mapper in the data section of the training that a checkpoint or package comes from.

    True where none is found, so that types which are no elements are an error of whoever needs them.
    """
    for found in _mappers(_data_section(Path(path))):
        return True if all(element == name for element, name in found.items()) else found
    return True


def by_element(types: Types, names: Sequence[str]) -> Dict[str, str]:
    """Types by element; ``names`` are the model's."""
    return {name: name for name in names} if isinstance(types, bool) else types


def _data_section(path: Path) -> Any:
    try:
        if path.suffix == ".zip":
            with _suppress_package_importer_exporter_warnings():
                return yaml.safe_load(torch.package.PackageImporter(str(path)).load_text("model", "config.yaml"))
        return torch.load(path, map_location="cpu", weights_only=False)["hyper_parameters"]["info_dict"]["data"]
    # Whatever is wrong with the file, opening it as a model says so.
    except Exception:
        return None


def _mappers(section: Any) -> Iterator[Dict[str, str]]:
    """Every mapper from elements to types in a section of a config."""
    if isinstance(section, Mapping):
        if isinstance(section.get(_MAP), Mapping):
            yield {str(element): str(name) for element, name in section[_MAP].items()}
        if "package_path" in section:  # of a package that e2ip fit gave a readout
            yield from _mappers(_data_section(Path(section["package_path"])))
        section = list(section.values())
    if isinstance(section, Sequence) and not isinstance(section, str):
        for part in section:
            yield from _mappers(part)
