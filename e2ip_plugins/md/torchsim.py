"""What the torch-sim models of both adapters share: many structures at a time, with the uncertainties of every atom."""

import copy
import functools
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Type, Union

import torch
from ase.data import chemical_symbols
from torch import Tensor

from e2ip_plugins import keys
from e2ip_plugins.families.interface import Family
from e2ip_plugins.keys import OutputKey
from e2ip_plugins.predictions.checks import check_atoms
from e2ip_plugins.predictions.on_request import ResultsOnRequest
from e2ip_plugins.scores.calibration import Calibration
from e2ip_plugins.scores.results import calibrated_energies


class BatchOnRequest(ResultsOnRequest):
    """Results on request of a batch, of which ``items`` are those that have been computed.

    Integrators of torch-sim 0.6 go through ``items`` after every step.
    """

    def items(self) -> Any:
        """Return names and values without the uncertainties, unless these have been computed."""
        return dict.items(self)


class UncertainModel:
    """Base of torch-sim models with a readout; it precedes the host's torch-sim model among the bases.

    A subclass calls `describe`, and defines `stand_in` and `known_symbols`. The host's class calls ``self.model`` once
    in an evaluation, where the stand-in takes its place.

    Attributes
    ----------
    uq_family : str
        Name of the distribution, as in files.
    uq_model : str or None
        Name of the readout.
    """

    def describe(
        self,
        family: Type[Family],
        uq_model: Optional[str],
        calibration: Union[str, Path, None],
        on_request: bool,
        where: str,
    ) -> None:
        """Keep whose uncertainties are put out, and how.

        Parameters
        ----------
        family : subclass of Family
        uq_model : str, optional
            Name of the readout.
        calibration : str or Path, optional
            File of ``e2ip calibrate``.
        on_request : bool
            Whether uncertainties wait until they are read.
        where : str
            The model's path, for messages.

        Raises
        ------
        InputError
            A calibration of another model.
        """
        self._family, self.uq_family, self.uq_model = family, family.uq_family, uq_model
        self._on_request = on_request
        self._calibration = None if calibration is None else Calibration.read(calibration)
        if self._calibration is not None:
            self._calibration.check(family, (), where, uq_model)

    def stand_in(self, on_request: bool) -> Any:
        """Return what is called in the place of ``self.model``.

        It has the last call's outputs as ``output``, or, on request, returns them from ``read_out()``.
        """
        raise NotImplementedError

    def known_symbols(self) -> Optional[Sequence[str]]:
        """Return the chemical symbols that the model knows; None where that cannot be seen."""
        raise NotImplementedError

    def forward(self, state: Any, **options: Any) -> Dict[str, Tensor]:
        """Return torch-sim's results, and every output of the family and ``e2ip_leverage`` (N, …) by their usual names.

        Where energies have error bars, ``energy_uncertainty`` (F,) and ``energy_error_vector`` (F, M) are among them,
        and for periodic structures those of the stress. Units are those of the package: eV and Å. ``N`` counts the
        atoms of all structures, as the forces do.

        Raises
        ------
        InputError
            Positions that are not finite; species that the model or the calibration does not know.
        """
        read = state.get if isinstance(state, dict) else functools.partial(getattr, state)
        numbers, positions, system_idx, pbc = map(read, ("atomic_numbers", "positions", "system_idx", "pbc"))
        check_atoms(numbers.cpu().numpy(), positions.detach().cpu().numpy(), "the batch", self.known_symbols())
        species = [chemical_symbols[z] for z in numbers.tolist()] if self._calibration is not None else []
        if self._calibration is not None:
            self._calibration.check_species(species, "the batch")
        observed = self.stand_in(self._on_request)
        # A copy, whose attribute of this name comes before the module.
        working = copy.copy(self)
        working.__dict__["model"] = observed
        working._group(numbers, system_idx)
        results = super(UncertainModel, working).forward(state, **options)  # type: ignore[misc]
        self.__dict__.update({name: value for name, value in working.__dict__.items() if name != "model"})
        frames, periodic = len(results["energy"]), bool(torch.as_tensor(pbc).all())

        def uncertainties(output: Dict[str, Tensor]) -> Dict[str, Tensor]:
            return self._calibrated(_tensors(self._family, output, frames, periodic), species)

        if not self._on_request:
            return {**results, **uncertainties(observed.output)}
        names = [key.name for key in (*self._family.output_keys(), keys.LEVERAGE, *keys.FRAME_OUTPUTS)]
        return BatchOnRequest(results, lambda: uncertainties(observed.read_out()), names)

    def _group(self, numbers: Tensor, system_idx: Optional[Tensor]) -> None:
        """Set up the host's model anew for other structures of the same atoms; it looks at the atomic numbers alone."""
        host: Any = self
        known = getattr(self, "system_idx", None)
        if host.atomic_numbers_in_init or system_idx is None or known is None or torch.equal(known, system_idx):
            return
        host.setup_from_system_idx(numbers, system_idx)

    def _calibrated(self, outputs: Dict[str, Tensor], species: List[str]) -> Dict[str, Tensor]:
        if self._calibration is None:
            return outputs
        views = self._calibration.in_units(self._family, outputs, 1.0, species)
        return {**outputs, **views, **calibrated_energies(self._calibration, outputs)}


def _tensors(family: Type[Family], output: Dict[str, Tensor], frames: int, periodic: bool) -> Dict[str, Tensor]:
    """Return the uncertainties among a model's outputs: of atoms (N, …) and, where they were fitted, of frames (F, …).

    Without forces, families that take forces put out nothing.
    """
    present = [key for key in (*family.output_keys(), keys.LEVERAGE) if output.get(key.name) is not None]
    results = {key.name: output[key.name].detach().reshape(-1, *key.shape) for key in present}
    of_frames: Sequence[OutputKey] = keys.ENERGY_OUTPUTS if _fitted(output, keys.ENERGY_UNCERTAINTY) else ()
    if of_frames and periodic and _fitted(output, keys.STRESS_UNCERTAINTY):
        of_frames = keys.FRAME_OUTPUTS
    results.update({key.name: output[key.name].detach().reshape(frames, *key.shape) for key in of_frames})
    return results


def _fitted(output: Dict[str, Tensor], key: OutputKey) -> bool:
    """Return whether a model has constants for the error bars of its frames; they are 0 before a fit."""
    return output.get(key.name) is not None and bool(output[key.name].any())
