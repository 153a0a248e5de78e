"""Fit of the leverage of a NequIP model: its passes over training and validation batches."""

import time
from typing import Any, Iterable, Iterator, List, Sequence, Sized, Tuple

import torch
from nequip.data import AtomicDataDict, from_ase
from nequip.utils import RankedLogger

from e2ip_plugins.fitting.fit import Labelled, Report, fit_leverage, some
from e2ip_plugins.predictions.checks import check_atoms
from e2ip_plugins.predictions.labelled import Frame
from nequip_ext.model.elements import Types, by_element
from nequip_ext.model.inputs import inputs_of, transforms_of
from nequip_ext.model.readout import find_readout
from nequip_ext.training.reference import reference_forces

logger = RankedLogger(__name__, rank_zero_only=True)

#: Seconds between two messages of a long pass.
_PATIENCE = 30.0


def fit_model(
    model: Any,
    training: Iterable[AtomicDataDict.Type],
    validation: Iterable[AtomicDataDict.Type],
    known: Iterable[AtomicDataDict.Type] = (),
    constant: bool = False,
) -> Report:
    """Fit the leverage of a model's readout in place.

    Parameters
    ----------
    model : torch.nn.Module
        A ``GraphModel``, in evaluation mode; what it was compiled to for training is not used.
    training, validation : iterable of dict
        Batches on the model's device; validation ones with reference forces, of which NaN and infinite ones do not
        count. In a distributed training every process has its share.
    known : iterable of dict
        Like ``validation``, of training configurations whose errors are compared with those.
    constant : bool
        See `e2ip_plugins.fitting.fit.fit_leverage`.

    Raises
    ------
    InputError
        See there; and for validation batches without forces.
    """
    readout = find_readout(model)
    assert readout is not None
    return fit_leverage(
        readout,
        run_energies(model, _told(training, "training")),
        _run_forces(model, _told(validation, "validation")),
        species=model.type_names,
        constant=constant,
        known=_run_forces(model, _told(known, "training")),
    )


def run_energies(model: Any, batches: Iterable[AtomicDataDict.Type]) -> Iterator[None]:
    """Run a model on batches, without forces: for what its readout sees."""
    for data in batches:
        with torch.no_grad():
            model.model.func(inputs_of(model, data))
        yield None


def _run_forces(model: Any, batches: Iterable[AtomicDataDict.Type]) -> Iterator[Labelled]:
    for data in batches:
        reference = reference_forces(data)
        forces = forces_of(model, data)
        frames = data.get(AtomicDataDict.BATCH_KEY)
        if frames is None:
            frames = torch.zeros(len(forces), dtype=torch.long, device=forces.device)
        yield Labelled(residual=reference - forces, frames=frames, forces=forces)


def forces_of(model: Any, data: AtomicDataDict.Type) -> torch.Tensor:
    """Predicted forces (N, 3), without a graph."""
    inputs = {key: data[key] for key in model.model_input_fields if key in data}
    with torch.enable_grad():
        return model.model(inputs)[AtomicDataDict.FORCE_KEY].detach()


def _told(batches: Iterable[Any], name: str) -> Iterator[Any]:
    """Batches, with a message now and then."""
    last, total = time.monotonic(), f" of {len(batches)}" if isinstance(batches, Sized) else ""
    for number, batch in enumerate(batches):
        if time.monotonic() - last > _PATIENCE:
            last = time.monotonic()
            logger.info(f"leverage: {number}{total} batches of {name} frames")
        yield batch


def batches_of(
    model: Any, training: Sequence[Frame], validation: Sequence[Frame], device: str, batch_size: int, types: Types
) -> Tuple["FrameBatches", "FrameBatches", "FrameBatches"]:
    """What `fit_model` takes after the model."""
    known = [training[i] for i in some(len(training), len(validation))]
    options = device, batch_size, types
    return (
        FrameBatches(model, training, *options),
        FrameBatches(model, validation, *options),
        FrameBatches(model, known, *options),
    )


def tell(report: Report) -> None:
    """What a fit found, in the log."""
    for warning in report.warnings:
        logger.warning(f"leverage: {warning}")
    for line in report.lines():
        logger.info(line)


class FrameBatches:
    """Frames as batches for a model, on its device; ``types`` are the model's by element.

    Raises
    ------
    InputError
        For species that are no types of the model, before the first batch.
    """

    def __init__(self, model: Any, frames: Sequence[Frame], device: str, batch_size: int, types: Types = True) -> None:
        names = list(model.type_names)
        known = by_element(types, names)
        self.transforms = transforms_of(model.metadata, names, known)
        for frame in frames:
            check_atoms(frame.atoms.numbers, frame.atoms.positions, frame.where, list(known))
        self.frames, self.device, self.batch_size = frames, device, batch_size

    def __len__(self) -> int:
        return -(-len(self.frames) // self.batch_size)

    def __iter__(self) -> Iterator[AtomicDataDict.Type]:
        for first in range(0, len(self.frames), self.batch_size):
            members: List[AtomicDataDict.Type] = []
            for frame in self.frames[first : first + self.batch_size]:
                data = from_ase(frame.atoms)
                for transform in self.transforms:
                    data = transform(data)
                data[AtomicDataDict.FORCE_KEY] = torch.as_tensor(frame.forces, dtype=data["pos"].dtype)
                members.append(data)
            yield AtomicDataDict.to_(AtomicDataDict.batched_from_list(members), self.device)
