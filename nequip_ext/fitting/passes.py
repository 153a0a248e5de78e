"""Fit of the leverage of a NequIP model: its passes over training and validation batches."""

from typing import Optional, Sequence

import torch
from nequip.data import AtomicDataDict, from_ase
from nequip.nn import graph_model
from torch.utils.data import Dataset

from e2ip_plugins.fitting.batches import (
    Batching,
    InOrder,
    OnProgress,
    Pass,
    fit_loaders,
    in_order,
    to_standard_error,
)
from e2ip_plugins.fitting.energies import EnergyResiduals
from e2ip_plugins.fitting.fit import fit_leverage, is_constant
from e2ip_plugins.fitting.force_errors import ForceErrors
from e2ip_plugins.fitting.records import TRAINING, TRAINING_ERRORS, Records
from e2ip_plugins.fitting.report import FitReport
from e2ip_plugins.fitting.training_atoms import TrainingBatch
from e2ip_plugins.predictions.labelled import LabelledFrame
from e2ip_plugins.predictions.stored_frames import check_species
from nequip_ext.model.elements import Types, by_element
from nequip_ext.model.inputs import inputs_of, transforms_of
from nequip_ext.model.readout import find_readout
from nequip_ext.training.labels import reference_energies, reference_forces, with_references


class Graphs(Dataset):
    """NequIP's dictionaries of frames, made when asked for; ``types`` are the model's by element.

    Raises
    ------
    InputError
        For species that are no types of the model, before the first dictionary.
    """

    def __init__(self, frames: Sequence[LabelledFrame], model: graph_model.GraphModel, types: Types = True) -> None:
        names = list(model.type_names)
        known = by_element(types, names)
        # First, because types that are no elements are an error of their own.
        self.frames, self.transforms = frames, transforms_of(model.metadata, names, known)
        check_species(frames, list(known))

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, index: int) -> AtomicDataDict.Type:
        data = from_ase(self.frames[index].atoms)
        for transform in self.transforms:
            data = transform(data)
        return with_references(data, self.frames[index])


def batching(batch_size: int) -> Batching:
    """Return how NequIP's dictionaries become batches."""
    return Batching(batch_size, AtomicDataDict.batched_from_list)


def fit_model(
    model: graph_model.GraphModel,
    training: Optional[InOrder],
    validation: InOrder,
    training_subset: Optional[InOrder] = None,
    constant_readout: bool = False,
    on_progress: OnProgress = to_standard_error,
    records: Optional[Records] = None,
) -> FitReport:
    """Fit the leverage of a model's readout in place.

    Parameters
    ----------
    model : GraphModel
        In evaluation mode; what it was compiled to for training is not used.
    training, validation : InOrder
        Batches; validation ones with reference forces, of which NaN and infinite ones do not count. In a distributed
        training every process has its share. Without ``training`` (None), see `e2ip_plugins.fitting.fit.fit_leverage`.
    training_subset : InOrder, optional
        Like ``validation``, of training configurations whose errors are compared with those.
    constant_readout : bool
        See `e2ip_plugins.fitting.fit.fit_leverage`.
    on_progress : callable
        Takes lines about the progress.
    records : Records, optional
        See `e2ip_plugins.fitting.fit.fit_leverage`.

    Raises
    ------
    InputError
        See there; and for validation batches without forces.
    """
    device = next(model.parameters()).device

    def features(numbers: torch.Tensor, batch: AtomicDataDict.Type) -> TrainingBatch:
        batch = AtomicDataDict.to_(batch, device)
        run_features(model, batch)
        return TrainingBatch(numbers[frames_of(batch).cpu()])

    def residuals(numbers: torch.Tensor, batch: AtomicDataDict.Type) -> ForceErrors:
        batch = AtomicDataDict.to_(batch, device)
        reference, forces = reference_forces(batch), forces_of(model, batch)
        return ForceErrors(reference - forces, numbers[frames_of(batch).cpu()], forces)

    def energies(numbers: torch.Tensor, batch: AtomicDataDict.Type) -> Optional[EnergyResiduals]:
        batch = AtomicDataDict.to_(batch, device)
        return energy_errors(model, batch) if AtomicDataDict.TOTAL_ENERGY_KEY in batch else None

    readout = find_readout(model)
    assert readout is not None
    of_training = () if training_subset is None else Pass(training_subset, residuals, TRAINING_ERRORS, on_progress)
    return fit_leverage(
        readout,
        None if training is None else Pass(training, features, TRAINING, on_progress),
        Pass(validation, residuals, "validation set", on_progress),
        species=model.type_names,
        constant_readout=constant_readout,
        training_errors=of_training,
        energies=Pass(validation, energies, "energies of the validation set", on_progress),
        records=records,
    )


def fit_frames(
    model: graph_model.GraphModel,
    training: Optional[Sequence[LabelledFrame]],
    validation: Sequence[LabelledFrame],
    batch_size: int,
    types: Types,
    on_progress: OnProgress,
    records: Optional[Records] = None,
) -> FitReport:
    """Fit the leverage of a model's readout to frames, in place; ``types`` are the model's by element."""
    readout = find_readout(model)
    assert readout is not None
    valid = Graphs(validation, model, types)
    constant_readout = is_constant(readout)
    if training is None:
        loader = in_order([valid], batching(batch_size))
        return fit_model(model, None, loader, constant_readout=constant_readout, on_progress=on_progress)
    train = Graphs(training, model, types)
    part = (1, 1) if records is None or records.work.part is None else records.work.part
    loaders = fit_loaders(train, [valid], batching(batch_size), batching(batch_size), part)
    return fit_model(model, *loaders, constant_readout=constant_readout, on_progress=on_progress, records=records)


def frames_of(data: AtomicDataDict.Type) -> torch.Tensor:
    """Return the frame (N,) of every atom of a batch."""
    frames = data.get(AtomicDataDict.BATCH_KEY)
    positions = data[AtomicDataDict.POSITIONS_KEY]
    return torch.zeros(len(positions), dtype=torch.long, device=positions.device) if frames is None else frames


def energy_errors(model: graph_model.GraphModel, data: AtomicDataDict.Type) -> EnergyResiduals:
    """Return errors of energies, and of stresses where there are any; a readout that takes forces gets them."""
    readout, stresses = find_readout(model), data.get(AtomicDataDict.STRESS_KEY)
    with_stress = stresses is not None and AtomicDataDict.CELL_KEY in data and bool(torch.isfinite(stresses).any())
    forces = with_stress or (readout is not None and readout.takes_forces)
    with torch.set_grad_enabled(forces):
        output = (model.model if forces else model.model.func)(inputs_of(model, data))
    predicted = output[AtomicDataDict.TOTAL_ENERGY_KEY].detach().reshape(-1)
    errors = EnergyResiduals(reference_energies(data) - predicted, frames_of(data))
    if not with_stress or AtomicDataDict.STRESS_KEY not in output:
        return errors
    volumes = torch.linalg.det(data[AtomicDataDict.CELL_KEY].view(-1, 3, 3)).abs()
    residual = stresses.view(-1, 3, 3) - output[AtomicDataDict.STRESS_KEY].detach().view(-1, 3, 3)
    return errors._replace(stress=residual, volumes=volumes)


def run_features(model: graph_model.GraphModel, data: AtomicDataDict.Type) -> None:
    """Run a model on a batch without forces, so that `last_call_of` sees features and outputs of its readout."""
    with torch.no_grad():
        model.model.func(inputs_of(model, data))


def forces_of(model: graph_model.GraphModel, data: AtomicDataDict.Type) -> torch.Tensor:
    """Return predicted forces (N, 3) without a graph."""
    inputs = {key: data[key] for key in model.model_input_fields if key in data}
    with torch.enable_grad():
        return model.model(inputs)[AtomicDataDict.FORCE_KEY].detach()
