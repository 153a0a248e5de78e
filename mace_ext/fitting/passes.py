"""Fit of the leverage of a MACE model: its passes over training and validation batches."""

from contextlib import contextmanager
from typing import Iterator, Optional, Sequence

import torch
from mace import data
from mace.modules import models
from mace.tools import AtomicNumberTable
from mace.tools.torch_geometric import Batch
from torch.utils.data import Dataset

from e2ip_plugins.errors import InputError
from e2ip_plugins.fitting.batches import Batching, InOrder, OnProgress, Pass, to_standard_error
from e2ip_plugins.fitting.energies import EnergyResiduals
from e2ip_plugins.fitting.fit import fit_leverage
from e2ip_plugins.fitting.force_errors import ForceErrors
from e2ip_plugins.fitting.records import TRAINING, TRAINING_ERRORS, Records
from e2ip_plugins.fitting.report import FitReport
from e2ip_plugins.fitting.training_atoms import TrainingBatch
from e2ip_plugins.predictions.labelled import LabelledFrame
from e2ip_plugins.predictions.stored_frames import check_species
from mace_ext.model.files import configuration, species_of
from mace_ext.training.labels import (
    learned_atoms,
    reference_energies,
    reference_forces,
    reference_stresses,
    with_references,
)


class Graphs(Dataset):
    """MACE's graphs of frames, made when asked for: a training set's neighbours may not fit into memory.

    Raises
    ------
    InputError
        For species that the model does not know, before the first graph.
    """

    def __init__(self, frames: Sequence[LabelledFrame], model: models.ScaleShiftMACE, head: str) -> None:
        check_species(frames, species_of(model))
        self.frames, self.model, self.head, self.heads = frames, model, head, list(model.heads)
        self.table = AtomicNumberTable([int(z) for z in model.atomic_numbers])
        self.cutoff = float(model.r_max)

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, index: int) -> data.AtomicData:
        frame = self.frames[index]
        try:
            config = configuration(frame.atoms, self.model, self.head)
        except InputError as error:
            raise InputError(f"{frame.where}: {error}") from error
        config = with_references(config, frame)
        return data.AtomicData.from_config(config, self.table, self.cutoff, self.heads)


def batching(batch_size: int) -> Batching:
    """Return how MACE's graphs become batches."""
    return Batching(batch_size, Batch.from_data_list)


def fit_model(
    model: models.ScaleShiftMACE,
    training: Optional[InOrder],
    validation: InOrder,
    training_subset: Optional[InOrder] = None,
    constant_readout: bool = False,
    on_progress: OnProgress = to_standard_error,
    records: Optional[Records] = None,
) -> FitReport:
    """Fit the leverage of an e²IP model in place; nothing else of it changes, nor does torch's random state.

    Parameters
    ----------
    model : ScaleShiftMACE
        Not wrapped by DDP.
    training, validation
        Batches; in a distributed training every process has its share. Atoms count if the weights of their
        configuration are not zero; those of ``validation`` and ``training_subset`` also need finite reference forces.
        Without ``training`` (None), see `fit_leverage`.
    training_subset
        The same, of training configurations whose errors are compared with those of the validation set.
    constant_readout : bool
        See `fit_leverage`.
    on_progress : callable
        Takes lines about the progress.
    records : Records, optional
        See `fit_leverage`.
    """
    device = next(model.parameters()).device

    def features(numbers: torch.Tensor, batch: Batch) -> TrainingBatch:
        batch = batch.to(device)
        run_features(model, batch)
        return TrainingBatch(numbers[batch.batch.cpu()], learned_atoms(batch))

    def residuals(numbers: torch.Tensor, batch: Batch) -> ForceErrors:
        batch = batch.to(device)
        forces = forces_of(model, batch)
        return ForceErrors(reference_forces(batch) - forces, numbers[batch.batch.cpu()], forces)

    def energies(numbers: torch.Tensor, batch: Batch) -> EnergyResiduals:
        return energy_errors(model, batch.to(device))

    of_training = () if training_subset is None else Pass(training_subset, residuals, TRAINING_ERRORS, on_progress)
    with _frozen(model):
        return fit_leverage(
            model.e2ip_readout,
            None if training is None else Pass(training, features, TRAINING, on_progress),
            Pass(validation, residuals, "validation set", on_progress),
            species_of(model),
            constant_readout,
            training_errors=of_training,
            heads=model.heads,
            energies=Pass(validation, energies, "energies of the validation set", on_progress),
            records=records,
        )


def run_features(model: models.ScaleShiftMACE, batch: Batch) -> None:
    """Run a model on a batch without forces, so that `last_call_of` sees features and outputs of its readout."""
    with torch.no_grad():
        model.uncertainty_outputs(batch.to_dict())


def forces_of(model: models.ScaleShiftMACE, batch: Batch) -> torch.Tensor:
    """Return predicted forces (N, 3) without a graph."""
    return model(batch.to_dict(), compute_force=True)["forces"].detach()


def energy_errors(model: models.ScaleShiftMACE, batch: Batch) -> EnergyResiduals:
    """Return errors of energies, and of stresses where there are any; a readout that takes forces gets them."""
    stresses = reference_stresses(batch)
    with_stress = bool(torch.isfinite(stresses).any())
    forces = model.e2ip_readout.takes_forces or with_stress
    with torch.set_grad_enabled(forces):
        output = model(batch.to_dict(), compute_force=forces, compute_stress=with_stress)
    energies = reference_energies(batch) - output["energy"].detach()
    if not with_stress:
        return EnergyResiduals(energies, batch.batch)
    volumes = torch.linalg.det(batch.cell.view(-1, 3, 3)).abs()
    return EnergyResiduals(energies, batch.batch, stresses - output["stress"].detach(), volumes)


@contextmanager
def _frozen(model: torch.nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, its weights without gradients; both are restored afterwards."""
    modes = {module: module.training for module in model.modules()}
    learning = {parameter: parameter.requires_grad for parameter in model.parameters()}
    try:
        model.eval().requires_grad_(False)
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for parameter, learns in learning.items():
            parameter.requires_grad_(learns)
