"""Checks of the data sets of a training: what NequIP notices after the training, or not at all."""

from typing import Any, Dict, Iterable, Iterator, List, Mapping, Optional

import numpy as np
import torch
from nequip.data import AtomicDataDict
from nequip.train import MetricsManager
from torch.utils.data import Dataset

from e2ip_plugins.errors import InputError
from e2ip_plugins.keys import FAMILY_KEY
from e2ip_plugins.predictions.checks import check_finite
from e2ip_plugins.predictions.columns import ASE_RESULTS
from e2ip_plugins.predictions.data_sets import check_frame
from e2ip_plugins.predictions.labelled import Label, LabelledFrame
from nequip_ext.compat import metric_entries
from nequip_ext.model.model import lacking_types
from nequip_ext.training.labels import (
    FIELDS,
    check_reference,
    first_of,
    in_memory,
    labelled_frames,
    transforms_of,
    types_in,
)

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
    **{
        field: f", or give them NaN and E2IPLoss and E2IPMetrics 'ignore_nan: {{{field}: true}}'"
        for field in (AtomicDataDict.TOTAL_ENERGY_KEY, AtomicDataDict.STRESS_KEY)
    },
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


def check_atom_types(model: torch.nn.Module, datasets: Iterable[Dataset]) -> None:
    """Raise `InputError` where data number their atom types in another order than a trained model.

    NequIP compares how many there are at most.
    """
    models = [part for part in model.modules() if getattr(part, "is_graph_model", False)]
    expected = [list(part.type_names) for part in models]  # type: ignore[arg-type]
    for transform in (transform for dataset in datasets for transform in transforms_of(dataset)):
        names = list(getattr(transform, "model_type_names", ()))
        for known in expected:
            if names != known[: len(names)]:
                raise InputError(
                    f"the data have the atom types [{', '.join(names)}], the model has [{', '.join(known)}], in "
                    f"this order: give chemical_species=[{','.join(known)}]"
                )


def check_lacking_types(config: Dict[str, Any], datasets: Iterable[Dataset]) -> List[str]:
    """Return warnings about atom types for which statistics in a model's config are NaN.

    Raises
    ------
    InputError
        Where the data in memory have atoms of these types: their energies would be NaN.
    """
    lacking = lacking_types(config)
    present = set().union(*map(types_in, datasets)) if lacking else set()
    texts = []
    for name, types in lacking.items():
        known = [kind for kind in types if kind in present]
        if known:
            raise InputError(
                f"{name} is NaN for {', '.join(known)}, of which the data have atoms: those of the training data have "
                "non-finite labels, or there are none. Give numbers instead of the statistic, or use 'stats_manager: "
                "_target_: nequip_ext.E2IPDataStatisticsManager' in the data section, which leaves such labels out"
            )
        texts.append(
            f"{name} is NaN for {', '.join(types)}, of which the training data have no atoms: the model will predict "
            f"NaN for {', '.join(types)}. Leave these out of chemical_species, or give numbers for all types "
            "instead of the statistic"
        )
    return texts


def check_datasets(
    split: str, configs: List[Dict[str, Any]], datasets: List[Dataset], labels: Mapping[str, bool] = ENERGIES
) -> None:
    """Raise `InputError`, with the file's name, where `check_labels` does, and for frames without a reference.

    Data that are not in memory are looked at by their first frame only.

    Parameters
    ----------
    split : str
    configs, datasets : list
        Of data sets, and what was made of them.
    labels : mapping
        See `labels_of`. In test data they need not be finite.
    """
    for config, dataset in zip(configs, datasets, strict=True):
        where = f"{split} data ({_file_of(config)})"
        missing: Dict[str, List[str]] = {field: [] for field in (AtomicDataDict.FORCE_KEY, *labels)}
        count = 0
        for frame in labelled_frames(dataset, where):
            count += 1
            check_labels(frame, {} if split == "test" else labels)
            for field, without in missing.items():
                if getattr(frame, FIELDS[field]) is None:
                    without.append(frame.where)
        for field, without in missing.items():
            if 0 < len(without) < count:
                raise InputError(
                    f"{len(without)} of {count} frames of the {where} have no '{field}', the first is "
                    f"{without[0].partition(' of the ')[0]}: NequIP needs the same labels in all frames; remove these"
                    f"{_NAN.get(field, '')}"
                )
            if without:
                check_reference(first_of(dataset), field, where)


def check_labels(frame: LabelledFrame, labels: Mapping[str, bool], apart: bool = True) -> None:
    """Raise `InputError` as `check_frame` does, and for labels that are predictions of a model, or infinite where NaN
    is left out; ``labels`` as `labels_of` returns them."""
    check_frame(frame, apart=apart)
    for field, name in FIELDS.items():
        label: Optional[Label] = getattr(frame, name)
        if label is None:
            continue
        if label.predicted:
            raise InputError(
                f"{frame.where}: its {name} are predictions of a model ({FAMILY_KEY} is in the frame), no reference. "
                f"{_way_to_references(label.key)}; where the file has no references, take other frames"
            )
        if field in labels:
            values = np.where(np.isnan(label.values), 0.0, label.values) if labels[field] else label.values
            way_out = f"NaN is left out where loss and metrics both have 'ignore_nan: {{{field}: true}}'"
            check_finite(values, frame.where, name, way_out)


def _way_to_references(column: str) -> str:
    """Return how a training reads references instead of predictions, which a column of the file holds."""
    if column not in ASE_RESULTS:
        return f"key_mapping names the column '{column}': name the references there instead"
    return (
        "NequIP reads columns named energy, forces and stress before those that key_mapping names: where the file has "
        "references, too, give 'exclude_keys: [energy, forces, stress]' in the data section, and name them in "
        "key_mapping"
    )


def configurations(datasets: Iterable[Dataset]) -> Iterator[LabelledFrame]:
    """Yield the frames of data in memory."""
    for dataset in datasets:
        if in_memory(dataset) is not None:
            yield from labelled_frames(dataset)


def _file_of(config: Dict[str, Any]) -> Any:
    """Return the file of a data set by its config, also of a part of one."""
    inner = config.get("dataset")
    return config.get("file_path", _file_of(inner) if isinstance(inner, dict) else config.get("_target_"))
