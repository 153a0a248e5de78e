"""The reader of labels in NequIP: of data sets, after keys and transforms, and of batches."""

import mmap
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np
import torch
from ase import Atoms
from ase.data import chemical_symbols
from nequip.data import AtomicDataDict
from torch import Tensor
from torch.utils.data import Dataset, Subset

from e2ip_plugins.errors import InputError
from e2ip_plugins.keys import FAMILY_KEY
from e2ip_plugins.predictions.checks import check_atoms
from e2ip_plugins.predictions.chunks import split_slice
from e2ip_plugins.predictions.fingerprints import are_predictions
from e2ip_plugins.predictions.labelled import Label, LabelledFrame
from e2ip_plugins.predictions.trajectories import read_all

#: Fields of NequIP that hold references, with the names of these labels in `LabelledFrame` and in ASE.
FIELDS = {
    AtomicDataDict.FORCE_KEY: "forces",
    AtomicDataDict.TOTAL_ENERGY_KEY: "energy",
    AtomicDataDict.STRESS_KEY: "stress",
}

#: Module of NequIP's own transforms.
_TRANSFORMS = "nequip.data.transforms."


def check_reference(data: Mapping[str, Any], field: str, where: str = "data") -> None:
    """Raise `InputError` where the data has no reference values for ``field``; ``where`` names split and file."""
    if field not in data:
        name = FIELDS[field]
        raise InputError(
            f"the {where} has no reference {name} ('{field}'): if the file has another name for it, say so in the "
            f"data section, for example 'key_mapping: {{REF_{name}: {field}}}'; its fields: {', '.join(sorted(data))}"
        )


# Batches


def reference_forces(data: AtomicDataDict.Type, where: str = "data") -> Tensor:
    """Return reference forces (N, 3) in eV/Å of a batch; NaN for atoms that have a component which is not finite.

    Raises
    ------
    InputError
        For data without forces.
    """
    check_reference(data, AtomicDataDict.FORCE_KEY, where)
    forces = data[AtomicDataDict.FORCE_KEY]
    finite = torch.isfinite(forces).all(dim=-1, keepdim=True)
    return torch.where(finite, forces, torch.full_like(forces, float("nan")))


def reference_energies(data: AtomicDataDict.Type, where: str = "data") -> Tensor:
    """Return reference energies (F,) in eV of the frames of a batch; `InputError` for data without them."""
    check_reference(data, AtomicDataDict.TOTAL_ENERGY_KEY, where)
    return data[AtomicDataDict.TOTAL_ENERGY_KEY].reshape(-1)


def with_references(data: AtomicDataDict.Type, frame: LabelledFrame) -> AtomicDataDict.Type:
    """Return NequIP's dictionary of a frame with its reference forces and energy, NaN where they do not count."""
    dtype = data[AtomicDataDict.POSITIONS_KEY].dtype
    labels = (frame.counted_forces, frame.counted_energy.reshape(1, 1), frame.counted_stress[None])
    fields = (AtomicDataDict.FORCE_KEY, AtomicDataDict.TOTAL_ENERGY_KEY, AtomicDataDict.STRESS_KEY)
    return {**data, **{name: torch.as_tensor(values, dtype=dtype) for name, values in zip(fields, labels, strict=True)}}


# Data sets


class InMemory(NamedTuple):
    """Frames of a data set in memory, before its transforms.

    Attributes
    ----------
    numbered : list of (int, dict)
        Frames of a part of a data set (``split_dataset``) have the numbers that they have in the whole.
    whole : Dataset
        The data set of all frames.
    """

    numbered: List[Tuple[int, AtomicDataDict.Type]]
    whole: Any


def whole_of(dataset: Any) -> Any:
    """Return the data set that a part of one comes from."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def transforms_of(dataset: Any) -> Sequence[Any]:
    """Return the transforms that a data set applies to its frames."""
    return getattr(whole_of(dataset), "transforms", ())


def label_transforms(dataset: Any) -> Sequence[Any]:
    """Return the transforms that may change labels: without NequIP's slow ones, unless others may need these."""
    transforms = transforms_of(dataset)
    if not all(type(transform).__module__.startswith(_TRANSFORMS) for transform in transforms):
        return transforms
    apart = (f"{_TRANSFORMS}neighborlist", f"{_TRANSFORMS}type_mapper")
    return [transform for transform in transforms if type(transform).__module__ not in apart]


def in_memory(dataset: Any) -> Optional[InMemory]:
    """Return the frames of a data set, None where they are not in memory."""
    numbers: Optional[Sequence[int]] = None
    while isinstance(dataset, Subset):
        numbers = dataset.indices if numbers is None else [dataset.indices[i] for i in numbers]
        dataset = dataset.dataset
    frames = getattr(dataset, "data_list", None)
    if frames is None:
        return None
    return InMemory([(int(i), frames[i]) for i in (range(len(frames)) if numbers is None else numbers)], dataset)


def first_of(dataset: Any) -> AtomicDataDict.Type:
    """Return the first frame of a data set, before transforms where it is in memory."""
    frames = in_memory(dataset)
    return dataset[0] if frames is None else frames.numbered[0][1]


def known_species(transforms: Iterable[Any]) -> Optional[List[str]]:
    """Return the chemical symbols that a mapper to atom types takes; None where there is no such mapper."""
    for transform in transforms:
        table = getattr(transform, "lookup_table", None)
        if table is not None:
            return [chemical_symbols[number] for number in (table >= 0).nonzero().flatten().tolist()]
    return None


def types_in(dataset: Any) -> Set[str]:
    """Return the atom types of the frames of a data set in memory; none where no mapper makes them."""
    frames, types = in_memory(dataset), set()
    numbered = [] if frames is None else frames.numbered
    for transform in transforms_of(dataset):
        if hasattr(transform, "lookup_table"):
            numbers = {int(n) for _, data in numbered for n in data[AtomicDataDict.ATOMIC_NUMBERS_KEY].unique()}
            types |= {transform.model_type_names[int(transform.lookup_table[number])] for number in numbers}
    return types


def labelled_frames(dataset: Dataset, where: str = "data") -> Iterator[LabelledFrame]:
    """Yield the frames of a data set as a training gets them: with keys mapped, and after all transforms.

    Of data that are not in memory the first frame alone is looked at.

    Parameters
    ----------
    dataset : Dataset
    where : str
        Split and file, for messages.

    Raises
    ------
    InputError
        Before the transforms see it, for a frame with species that the mapper to atom types does not take, or with
        positions that are not finite.
    """
    frames = in_memory(dataset)
    if frames is None:
        yield labelled(dataset[0], f"frame 0 of the {where}")
        return
    known, predicted = known_species(transforms_of(dataset)), predicted_labels(frames.whole)
    transforms = label_transforms(dataset)
    for index, data in frames.numbered:
        name = f"frame {index} of the {where}"
        numbers = data.get(AtomicDataDict.ATOMIC_NUMBERS_KEY)
        check_atoms(
            _array(data, AtomicDataDict.ATOMIC_NUMBERS_KEY),
            data[AtomicDataDict.POSITIONS_KEY].numpy(),
            name,
            None if numbers is None else known,
        )
        data = dict(data)
        for transform in transforms if numbers is not None or known is None else ():
            data = transform(data)
        yield labelled(data, name, predicted.get(index, {}))


def labelled(
    data: AtomicDataDict.Type, where: str = "", predicted: Optional[Mapping[str, str]] = None
) -> LabelledFrame:
    """Return a frame as a training gets it; ``predicted`` are the columns of labels that are predictions, by name."""
    positions = data[AtomicDataDict.POSITIONS_KEY].numpy()
    species = AtomicDataDict.ATOMIC_NUMBERS_KEY if AtomicDataDict.ATOMIC_NUMBERS_KEY in data else None
    numbers = _array(data, species or AtomicDataDict.ATOM_TYPE_KEY)
    numbers = numbers if len(numbers) else np.zeros(len(positions), dtype=int)
    cell, pbc = _array(data, AtomicDataDict.CELL_KEY), _array(data, AtomicDataDict.PBC_KEY)
    atoms = Atoms(numbers, positions, cell=cell.reshape(3, 3) if len(cell) else None, pbc=pbc if len(pbc) else False)

    def label(field: str, *shape: int) -> Optional[Label]:
        values = data.get(field)
        name = FIELDS[field]
        if values is None:
            return None
        column = (predicted or {}).get(name)
        return Label(values.numpy().reshape(shape), column or field, predicted=column is not None)

    forces, energy = label(AtomicDataDict.FORCE_KEY, -1, 3), label(AtomicDataDict.TOTAL_ENERGY_KEY)
    return LabelledFrame(atoms, where, forces, energy, label(AtomicDataDict.STRESS_KEY, 3, 3))


def _array(data: AtomicDataDict.Type, field: str) -> np.ndarray:
    """Return a field in one dimension, without elements where there is none."""
    return data[field].reshape(-1).numpy() if field in data else np.zeros(0, dtype=int)


def predicted_labels(dataset: Any) -> Dict[int, Dict[str, str]]:
    """Return which labels of which frames of a data set are predictions of a model, and no references, with the columns
    of the file that they are read from.

    Files with predictions hold these under ASE's own names, and NequIP takes columns with these names before those that
    ``key_mapping`` names.
    """
    path = getattr(dataset, "file_path", None)
    if path is None or not _mentions(split_slice(Path(path))[0], FAMILY_KEY.encode()):
        return {}
    found: Dict[int, Dict[str, str]] = {}
    for index, atoms in enumerate(read_all(Path(path))):
        columns = {**atoms.arrays, **atoms.info, **(atoms.calc.results if atoms.calc is not None else {})}
        data = dataset.data_list[index]
        for prefix in (name.removesuffix("forces") for name in columns if str(name).endswith("forces")):
            if are_predictions(atoms.info, np.asarray(columns[f"{prefix}forces"]), prefix):
                pairs = [(name, prefix + name, data.get(field)) for field, name in FIELDS.items()]
                same = {name: column for name, column, loaded in pairs if _same(columns.get(column), loaded)}
                found.setdefault(index, {}).update(same)
    return found


def _same(column: Any, loaded: Optional[Tensor]) -> bool:
    """Return whether what NequIP has loaded is the column of a file."""
    if column is None or loaded is None:
        return False
    one, two = np.ravel(column), loaded.numpy().ravel()
    if one.size == 6 and two.size == 9:  # Voigt's order
        one, two = one[:3], two[[0, 4, 8]]
    return one.shape == two.shape and np.allclose(one, two, rtol=1e-5, equal_nan=True)


def _mentions(path: Path, text: bytes) -> bool:
    """Return whether a file contains a text; False where it is empty or cannot be read."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(text) >= 0
    # An empty file has no map.
    except (OSError, ValueError):
        return False
