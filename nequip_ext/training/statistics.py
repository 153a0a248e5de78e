"""``E2IPDataStatisticsManager``: NequIP's data statistics, over atoms with finite reference forces."""

import warnings
from typing import Any, Dict, Iterable, Iterator, List, Optional

import torch
from nequip.data import (
    AtomicDataDict,
    DataStatisticsManager,
    Mean,
    NumNeighbors,
    PerAtomModifier,
    RootMeanSquare,
)

from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.checks import check_finite
from e2ip_plugins.predictions.data_sets import masked_forces
from nequip_ext.training.data_sets import check_labels
from nequip_ext.training.labels import in_memory, labelled_frames, reference_energies, reference_forces
from nequip_ext.training.restarts import loss_leaves_out_nan


class E2IPDataStatisticsManager(DataStatisticsManager):
    """The statistics of ``nequip.data.CommonDataStatisticsManager``, checked before training.

    Training data without forces or energies, with energies that are not finite, or with species that
    ``chemical_species`` lacks, ends the run with `InputError`;
    atoms with NaN or infinite reference forces are left out of the force statistics and counted in a warning, and so
    are frames with NaN energies where the loss in the config has ``ignore_nan``.

    Example usage in config:

    .. code-block:: yaml

        data:
          stats_manager:
            _target_: nequip_ext.E2IPDataStatisticsManager
            dataloader_kwargs: {batch_size: 10}
            type_names: ${model_type_names}
    """

    def __init__(
        self, dataloader_kwargs: Optional[Dict[str, Any]] = None, type_names: Optional[List[str]] = None
    ) -> None:
        forces, energy = {"field": AtomicDataDict.FORCE_KEY, "ignore_nan": True}, AtomicDataDict.TOTAL_ENERGY_KEY
        metrics = [
            {"name": "num_neighbors_mean", "field": NumNeighbors(), "metric": Mean()},
            {"name": "per_type_num_neighbors_mean", "field": NumNeighbors(), "metric": Mean(), "per_type": True},
            {"name": "per_atom_energy_mean", "field": PerAtomModifier(energy), "metric": Mean(), "ignore_nan": True},
            {"name": "forces_rms", "metric": RootMeanSquare(), **forces},
            {"name": "per_type_forces_rms", "metric": RootMeanSquare(), "per_type": True, **forces},
        ]
        super().__init__(metrics, dataloader_kwargs or {}, type_names)

    def get_statistics(self, data_source: Iterable[AtomicDataDict.Type]) -> Dict[str, Any]:
        """Statistics by name; see the class for errors and warnings."""
        atoms = masked = frames = without_energy = 0
        ignore_nan = loss_leaves_out_nan()
        # By their numbers in the file: a loader shuffles, and NequIP's own messages name neither frame nor element.
        dataset: Any = getattr(data_source, "dataset", None)
        if in_memory(dataset) is not None:
            for frame in labelled_frames(dataset, "training data"):
                check_labels(frame, {AtomicDataDict.TOTAL_ENERGY_KEY: ignore_nan}, apart=False)

        def checked() -> Iterator[AtomicDataDict.Type]:
            nonlocal atoms, masked, frames, without_energy
            for data in data_source:
                forces, energies = (of(data, "training data") for of in (reference_forces, reference_energies))
                without = torch.isnan(energies) if ignore_nan else torch.zeros_like(energies, dtype=torch.bool)
                # Of data that are not in memory; the loader shuffles them, so that a number would be wrong.
                check_finite(energies[~without].numpy(), "a frame of the training data")
                frames, without_energy = frames + len(without), without_energy + int(without.sum())
                bad = torch.isnan(forces).any(-1)
                atoms, masked = atoms + bad.numel(), masked + int(bad.sum())
                yield {**data, AtomicDataDict.FORCE_KEY: forces}

        try:
            statistics = super().get_statistics(checked())
        except RuntimeError as error:
            # Of NequIP's batches.
            if "inconsistent keys" not in str(error):
                raise
            raise InputError(
                f"some frames of the training data have labels that others lack ({error}): NequIP needs the same in "
                "all frames; remove these frames, or give them NaN: of forces, or of a stress with 'ignore_nan: "
                "{stress: true}' in E2IPLoss and E2IPMetrics"
            ) from error
        if atoms == 0:
            raise InputError(
                "the training data have no batch: fewer frames than batch_size in stats_manager's dataloader_kwargs"
            )
        if masked == atoms:
            raise InputError("no atom of the training data has finite reference forces")
        text = masked_forces(masked, atoms, "of the training data")
        if text:
            warnings.warn(text, stacklevel=2)
        if without_energy:
            warnings.warn(
                f"{without_energy} of {frames} frames of the training data have NaN reference energies: they are left "
                "out of the mean energy per atom",
                stacklevel=2,
            )
        return statistics
