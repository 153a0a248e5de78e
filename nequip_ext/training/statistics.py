"""``E2IPDataStatisticsManager``: NequIP's data statistics, over atoms with finite reference forces."""

import warnings
from typing import Any, Dict, Iterable, Iterator, List, Optional

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
from nequip_ext.training.data_sets import ENERGIES, check_frames, in_memory
from nequip_ext.training.reference import check_reference, nan_where_not_finite


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
        # By their numbers in the file: a loader shuffles, and NequIP's own messages name neither frame nor element.
        numbered, transforms = in_memory(getattr(data_source, "dataset", None))
        check_frames(numbered or (), transforms, "training data", ENERGIES, apart=False)

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
                "the training data have no batch: fewer frames than batch_size in stats_manager's dataloader_kwargs"
            )
        if masked == atoms:
            raise InputError("no atom of the training data has finite reference forces")
        text = masked_forces(masked, atoms, "of the training data")
        if text:
            warnings.warn(text, stacklevel=2)
        return statistics
