"""The reader of labels: references of MACE's configurations and batches, with their keys and weights.

No other module of this adapter names a reference or a weight, except `mace_ext.training.loss`. Loaded while MACE is:
imports of MACE wait until they are used.
"""

import dataclasses
import os
from argparse import Namespace
from functools import cached_property
from typing import Any, Dict, Hashable, Iterable, Iterator, Mapping, Optional, Set, Tuple

import numpy as np
import torch
from ase import Atoms
from torch import Tensor

from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.labelled import Label, LabelledFrame

#: Labels that have a key on the command line, and whether they are columns of atoms or values of a frame.
FORCES, ENERGY = "forces", "energy"

#: Name in MACE of a frame's stress.
STRESS = "stress"

#: Names in MACE of a frame's labels. A training learns from stress or virials.
_STRESSES = (STRESS, "virials")

#: Set while missing labels weigh nothing. An environment variable, so that workers of a data loader know, too.
_WITHOUT_MISSING = "E2IP_WITHOUT_MISSING_LABELS"


def keys_of_head(head: Mapping[str, Any], args: Namespace) -> Dict[str, str]:
    """Return the keys under which MACE reads forces and energy of a MACE head.

    Parameters
    ----------
    head : mapping
        Entry of ``--heads``, empty for none. What it does not say is that of the command line.
    args
        Parsed arguments.
    """
    columns, values = head.get("arrays_keys", {}), head.get("info_keys", {})
    return {
        FORCES: columns.get(FORCES, head.get("forces_key", args.forces_key)),
        ENERGY: values.get(ENERGY, head.get("energy_key", args.energy_key)),
    }


def names_of_labels(atoms: Atoms, label: str) -> Set[str]:
    """Return the names under which a frame of a file could have its ``forces`` or its ``energy``."""
    columns = atoms.arrays if label == FORCES else atoms.info
    return {*columns, *({label} & set(getattr(atoms.calc, "results", {})))}


def is_of_calculator(atoms: Atoms, label: str, key: Optional[str]) -> bool:
    """Return whether MACE takes a frame's label from ASE's calculator, which it does for ASE's own names."""
    return key == label and label in getattr(atoms.calc, "results", {})


def labelled_frame(config: Any, where: str = "") -> LabelledFrame:
    """Return a configuration of MACE, a ``mace.data.Configuration``, with the labels that it has."""
    atoms = Atoms(config.atomic_numbers, config.positions, cell=config.cell, pbc=config.pbc)
    stress = next((label for name in _STRESSES if (label := _label(config, name)) is not None), None)
    # What MACE embeds beside the species.
    state: Hashable = tuple(str(config.properties.get(name)) for name in ("total_charge", "total_spin"))
    weight = 1.0 if config.weight is None else float(config.weight)
    return LabelledFrame(atoms, where, _label(config, FORCES), _label(config, ENERGY), stress, state, weight)


def _label(config: Any, name: str) -> Optional[Label]:
    values = config.properties.get(name)
    if values is None:
        return None
    # As `AtomicData.from_config` reads weights.
    of_frame, of_label = (1.0 if w is None else float(w) for w in (config.weight, config.property_weights.get(name)))
    return Label(np.asarray(values, dtype=np.float64), name, of_frame * of_label)


def with_references(config: Any, frame: LabelledFrame) -> Any:
    """Return a configuration with the reference forces and energy of a frame, NaN where they do not count."""
    labels = {FORCES: frame.counted_forces, ENERGY: frame.counted_energy, STRESS: frame.counted_stress}
    return dataclasses.replace(
        config,
        weight=1.0,
        properties={**config.properties, **labels},
        property_weights={**config.property_weights, **dict.fromkeys(labels, 1.0)},
    )


def reference_stresses(batch: Any) -> Tensor:
    """Return the reference stresses (F, 3, 3) of a batch in eV/Å³; NaN where there is none that counts."""
    stress = batch[STRESS].view(-1, 3, 3)
    # MACE reads a stress that a frame does not have as zeros.
    counts = (batch["weight"] * batch[f"{STRESS}_weight"] > 0) & (stress != 0).flatten(1).any(1)
    return torch.where(counts.view(-1, 1, 1), stress, torch.full_like(stress, float("nan")))


def reference_energies(batch: Any) -> Tensor:
    """Return the reference energies (F,) of a batch in eV; NaN where there is none that counts."""
    counts = batch["weight"] * batch[f"{ENERGY}_weight"] > 0
    return torch.where(counts, batch[ENERGY], torch.full_like(batch[ENERGY], float("nan")))


def reference_forces(batch: Any) -> Tensor:
    """Return the reference forces (N, 3) of a batch in eV/Å; NaN for atoms that count nowhere.

    Those are atoms of frames without forces, of frames or forces of weight zero, and atoms with a component that is not
    finite.
    """
    forces, counts = batch["forces"], (atom_weights(batch) > 0) & finite_references(batch)
    return torch.where(counts.unsqueeze(-1), forces, torch.full_like(forces, float("nan")))


def finite_references(batch: Any) -> Tensor:
    """Return whether all components of an atom's reference force are finite, (N,), whatever its weight."""
    return torch.isfinite(batch["forces"]).all(-1)


def atom_weights(batch: Any) -> Tensor:
    """Return the weights (N,) of a batch's reference forces: that of the frame times that of its forces."""
    return (batch["weight"] * batch["forces_weight"])[batch["batch"]]


def learned_atoms(batch: Any) -> Tensor:
    """Return whether a training learns anything (N,) from the frames that a batch's atoms belong to."""
    weights = sum(batch[f"{name}_weight"] for name in (ENERGY, FORCES, *_STRESSES))
    return (batch["weight"] * weights > 0)[batch["batch"]]


def without_missing(config: Any) -> Any:
    """Return a configuration in which labels that it does not have weigh nothing.

    With ASE's own names as keys, ``--forces_key forces`` say, MACE gives missing labels the weight of existing ones and
    reads them as zeros.
    """
    missing = [name for name, values in config.properties.items() if values is None]
    return dataclasses.replace(config, property_weights={**config.property_weights, **dict.fromkeys(missing, 0.0)})


def weigh_missing_labels(weigh: bool) -> None:
    """Say whether labels that a configuration does not have keep MACE's weights or, with False, weigh nothing.

    That holds for `with_labels` in this process and those that it starts. Every training says so before it reads data.
    """
    if weigh:
        os.environ.pop(_WITHOUT_MISSING, None)
    else:
        os.environ[_WITHOUT_MISSING] = "1"


def with_labels(config: Any) -> Any:
    """Return what a training makes a graph of: `without_missing` in one with a readout, otherwise what MACE has."""
    return without_missing(config) if _WITHOUT_MISSING in os.environ else config


def count_labels(frames: Iterable[LabelledFrame]) -> Tuple[int, Dict[str, int]]:
    """Return how many frames have weight zero, and how many of the others have no forces, and no energy, that count.

    The frames are to have no negative weight.
    """
    unused, lacking = 0, {FORCES: 0, ENERGY: 0}
    for frame in frames:
        unused += not frame.counts
        for name in lacking:
            label: Optional[Label] = getattr(frame, name)
            lacking[name] += frame.counts and (label is None or not label.counts)
    return unused, lacking


class FiniteForces:
    """A loader whose non-finite reference forces read as the RMS of the others: MACE's force scale stays right."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            finite = torch.isfinite(batch.forces)
            if not finite.all():
                batch.forces = batch.forces.where(finite, torch.full_like(batch.forces, self.forces_rms))
            yield batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def _finite(self) -> Iterable[Tensor]:
        """Yield the finite force components of every labelled frame.

        Reads the data set, not the loader: iterating a loader would change the order of the batches.
        """
        for frame in self.loader.dataset:
            if float(frame.weight * frame.forces_weight) > 0:
                yield frame.forces[torch.isfinite(frame.forces)].double()

    def check(self) -> None:
        """Raise `InputError` for data without forces: of files that are not in memory no forces were looked for yet."""
        if not any(len(components) for components in self._finite()):
            raise InputError(
                "no frame of the training data has finite reference forces; of HDF5 see mace_prepare_data --forces_key"
            )

    @cached_property
    def forces_rms(self) -> float:
        """Root mean square of the finite force components of all labelled frames, in eV/Å."""
        total, count = 0.0, 0
        for components in self._finite():
            total += float(components.square().sum())
            count += components.numel()
        return (total / count) ** 0.5
