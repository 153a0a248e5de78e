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
from e2ip_plugins.predictions.checks import check_atoms, check_finite
from nequip_ext.training.reference import check_reference, in_memory, known_species, nan_where_not_finite


class E2IPDataStatisticsManager(DataStatisticsManager):
    """The statistics of ``nequip.data.CommonDataStatisticsManager``, checked before training.

    Training data without forces or energies, with energies that are not finite, or with species that
    ``chemical_species`` lacks, ends the run with `InputError`;
    atoms with NaN or infinite reference forces are left out of the force statistics and counted in a warning.

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
        forces = {"field": AtomicDataDict.FORCE_KEY, "ignore_nan": True}
        metrics = [
            {"name": "num_neighbors_mean", "field": NumNeighbors(), "metric": Mean()},
            {"name": "per_type_num_neighbors_mean", "field": NumNeighbors(), "metric": Mean(), "per_type": True},
            {"name": "per_atom_energy_mean", "field": PerAtomModifier("total_energy"), "metric": Mean()},
            {"name": "forces_rms", "metric": RootMeanSquare(), **forces},
            {"name": "per_type_forces_rms", "metric": RootMeanSquare(), "per_type": True, **forces},
        ]
        super().__init__(metrics, dataloader_kwargs or {}, type_names)

    def get_statistics(self, data_source: Iterable[AtomicDataDict.Type]) -> Dict[str, Any]:
        """Statistics by name; see the class for errors and warnings."""
        atoms = masked = 0
        _check_in_order(getattr(data_source, "dataset", None))

        def checked() -> Iterator[AtomicDataDict.Type]:
            nonlocal atoms, masked
            for data in data_source:
                for field in (AtomicDataDict.FORCE_KEY, AtomicDataDict.TOTAL_ENERGY_KEY):
                    check_reference(data, field, "training data")
                # Of data that are not in memory; the loader shuffles them, so that a number would be wrong.
                check_finite(data[AtomicDataDict.TOTAL_ENERGY_KEY].numpy(), "a frame of the training data")
                forces, bad = nan_where_not_finite(data[AtomicDataDict.FORCE_KEY])
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
                "the statistics of the training data have no batch: fewer frames than batch_size in stats_manager's "
                "dataloader_kwargs, with drop_last"
            )
        if masked == atoms:
            raise InputError("no atom of the training data has finite reference forces")
        if masked > 0:
            warnings.warn(
                f"{masked} of {atoms} atoms of the training data have NaN or infinite reference forces: "
                "they are masked in statistics, force loss and metrics",
                stacklevel=2,
            )
        return statistics


def _check_in_order(dataset: Any) -> None:
    """`InputError` with the frame's number, of data in memory: NequIP's own names neither frame nor element."""
    frames, transforms = in_memory(dataset)
    known = known_species(transforms)
    for index, frame in frames or ():
        where = f"frame {index} of the training data"
        numbers = frame.get(AtomicDataDict.ATOMIC_NUMBERS_KEY, torch.zeros(0, dtype=torch.long))
        check_atoms(numbers.reshape(-1).numpy(), frame[AtomicDataDict.POSITIONS_KEY].numpy(), where, known)
        check_finite(frame.get(AtomicDataDict.TOTAL_ENERGY_KEY, torch.zeros(1)).numpy(), where)
