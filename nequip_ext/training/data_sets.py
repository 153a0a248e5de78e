"""Checks of the data sets of a training: what NequIP notices after the training, or not at all."""

from typing import Any, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch
from ase import Atoms
from ase.data import chemical_symbols
from nequip.data import AtomicDataDict
from nequip.train import MetricsManager
from torch.utils.data import Dataset, Subset

from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.data_sets import check_frame
from e2ip_plugins.predictions.labelled import Label, LabelledFrame
from nequip_ext.compat import metric_entries
from nequip_ext.training.reference import check_reference

#: Frames with their numbers.
Numbered = Iterable[Tuple[int, AtomicDataDict.Type]]

#: Labels of a loss of energies and forces: by field, whether NaN is left out.
ENERGIES = {AtomicDataDict.TOTAL_ENERGY_KEY: False}

#: How names of metrics of a field begin.
_METRICS = {
    AtomicDataDict.TOTAL_ENERGY_KEY: ("total_energy_", "per_atom_energy_"),
    AtomicDataDict.STRESS_KEY: ("stress_",),
}

#: Another way out for frames without a label.
_NAN = {
    AtomicDataDict.FORCE_KEY: " or give them NaN",
    AtomicDataDict.STRESS_KEY: ", or give them NaN and E2IPLoss and E2IPMetrics 'ignore_nan: {stress: true}'",
}


def labels_of(metrics: Optional[torch.nn.Module]) -> Dict[str, bool]:
    """Return the fields that the `MetricsManager` s in a module compare, beside forces, and whether all ignore NaN."""
    modules = [] if metrics is None else metrics.modules()
    managers = [module for module in modules if isinstance(module, MetricsManager)]
    entries = [entry for manager in managers for entry in metric_entries(manager).items()]
    labels = dict(ENERGIES)
    for field, prefixes in _METRICS.items():
        ignored = [ignore_nan for name, (_, ignore_nan) in entries if name.startswith(prefixes)]
        labels.update({field: all(ignored)} if ignored else {})
    return labels


def in_memory(dataset: Any) -> Tuple[Optional[List[Tuple[int, AtomicDataDict.Type]]], Sequence[Any]]:
    """Return the numbered frames of a data set, None where they are not in memory, and its transforms.

    The transforms have not been applied to these frames. Frames of a part of a data set (``split_dataset``) have the
    numbers that they have in the whole.
    """
    numbers: Optional[Sequence[int]] = None
    while isinstance(dataset, Subset):
        numbers = dataset.indices if numbers is None else [dataset.indices[i] for i in numbers]
        dataset = dataset.dataset
    frames, transforms = getattr(dataset, "data_list", None), getattr(dataset, "transforms", ())
    if frames is None:
        return None, transforms
    return [(int(i), frames[i]) for i in (range(len(frames)) if numbers is None else numbers)], transforms


def known_species(transforms: Iterable[Any]) -> Optional[List[str]]:
    """Return the chemical symbols that a mapper to atom types takes; None where there is no such mapper."""
    for transform in transforms:
        table = getattr(transform, "lookup_table", None)
        if table is not None:
            return [chemical_symbols[number] for number in (table >= 0).nonzero().flatten().tolist()]
    return None


def check_atom_types(model: torch.nn.Module, datasets: Iterable[Dataset]) -> None:
    """Raise `InputError` where data number their atom types in another order than a trained model.

    NequIP compares how many there are at most.
    """
    models = [part for part in model.modules() if getattr(part, "is_graph_model", False)]
    expected = [list(part.type_names) for part in models]  # type: ignore[arg-type]
    for transform in (transform for dataset in datasets for transform in in_memory(dataset)[1]):
        names = list(getattr(transform, "model_type_names", ()))
        for known in expected:
            if names != known[: len(names)]:
                raise InputError(
                    f"the data have the atom types [{', '.join(names)}], the model has [{', '.join(known)}], in "
                    f"this order: give chemical_species=[{','.join(known)}]"
                )


def check_datasets(
    split: str, configs: List[Dict[str, Any]], datasets: List[Dataset], labels: Mapping[str, bool] = ENERGIES
) -> None:
    """Raise `InputError`, with the file's name, where `check_frames` does, and for frames without a reference.

    Data that are not in memory are looked at by their first frame only.

    Parameters
    ----------
    split : str
    configs, datasets : list
        Of data sets, and what was made of them.
    labels : mapping
        See `labels_of`. In test data they need not be finite.
    """
    finite = [field for field, ignore_nan in labels.items() if not ignore_nan and split != "test"]
    for config, dataset in zip(configs, datasets, strict=True):
        where = f"{split} data ({_file_of(config)})"
        numbered, transforms = in_memory(dataset)
        numbered = [(0, dataset[0])] if numbered is None else numbered
        check_frames(numbered, transforms, where, finite)
        for field in (AtomicDataDict.FORCE_KEY, *labels):
            missing = [index for index, frame in numbered if field not in frame]
            if 0 < len(missing) < len(numbered):
                raise InputError(
                    f"{len(missing)} of {len(numbered)} frames of the {where} have no '{field}', the first is frame "
                    f"{missing[0]}: NequIP needs the same labels in all frames; remove these{_NAN.get(field, '')}"
                )
            if missing:
                check_reference(numbered[0][1], field, where)


def check_frames(
    numbered: Numbered, transforms: Iterable[Any], where: str, finite: Iterable[str], apart: bool = True
) -> None:
    """Raise `InputError` as `check_frame` does, with the frame's number; references of ``finite`` must be that."""
    known = known_species(transforms)
    for index, frame in numbered:
        labelled = _labelled(frame, f"frame {index} of the {where}")
        names = [field.removeprefix("total_") for field in finite]
        known_here = known if AtomicDataDict.ATOMIC_NUMBERS_KEY in frame else None
        check_frame(labelled, names, known_here, apart)


def configurations(datasets: Iterable[Dataset]) -> Iterator[LabelledFrame]:
    """Yield the frames of data in memory."""
    for index, frame in (numbered for dataset in datasets for numbered in in_memory(dataset)[0] or ()):
        if AtomicDataDict.ATOMIC_NUMBERS_KEY in frame or AtomicDataDict.ATOM_TYPE_KEY in frame:
            yield _labelled(frame, f"frame {index}")


def _labelled(frame: AtomicDataDict.Type, where: str) -> LabelledFrame:
    positions, cell = frame[AtomicDataDict.POSITIONS_KEY].numpy(), _array(frame, AtomicDataDict.CELL_KEY, 3, 3)
    numbers = frame.get(AtomicDataDict.ATOMIC_NUMBERS_KEY, frame.get(AtomicDataDict.ATOM_TYPE_KEY))
    numbers = np.zeros(len(positions), dtype=int) if numbers is None else numbers.reshape(-1).numpy()
    pbc = _array(frame, AtomicDataDict.PBC_KEY)

    def label(field: str, *shape: int) -> Optional[Label]:
        return Label(frame[field].numpy().reshape(shape), field) if field in frame else None

    forces, energy = label(AtomicDataDict.FORCE_KEY, -1, 3), label(AtomicDataDict.TOTAL_ENERGY_KEY)
    atoms = Atoms(numbers, positions, cell=cell, pbc=False if pbc is None else pbc)
    return LabelledFrame(atoms, where, forces, energy, label(AtomicDataDict.STRESS_KEY, 3, 3))


def _array(frame: AtomicDataDict.Type, field: str, *shape: int) -> Optional[np.ndarray]:
    return frame[field].reshape(shape or -1).numpy() if field in frame else None


def _file_of(config: Dict[str, Any]) -> Any:
    """Return the file of a data set by its config, also of a part of one."""
    inner = config.get("dataset")
    return config.get("file_path", _file_of(inner) if isinstance(inner, dict) else config.get("_target_"))
