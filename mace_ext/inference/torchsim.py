"""`TorchSimModel`: many structures at a time in torch-sim, with the uncertainties of every atom.

torch-sim (https://github.com/TorchSim/torch-sim) runs dynamics and relaxations of batches of structures on one device
and finds by itself how many fit. It is the extra ``torchsim``; docs/howto/torch-sim.md has examples.
"""

import copy
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple, Union

import torch
from ase.data import chemical_symbols
from torch import Tensor

from e2ip_plugins.errors import InputError
from e2ip_plugins.keys import LEVERAGE, OutputKey
from e2ip_plugins.predictions.checks import check_atoms
from e2ip_plugins.predictions.on_request import ALWAYS, ResultsOnRequest, is_on_request
from e2ip_plugins.readout.readout import model_name
from e2ip_plugins.scores.calibration import Calibration
from e2ip_plugins.scores.results import calibrated_energies, warn_if_unfitted
from mace_ext.inference.on_request import HostModel
from mace_ext.model.files import open_file
from mace_ext.model.readout import find_family, find_readout, frame_outputs
from mace_ext.observed_model import ObservedModel

try:
    from torch_sim.models.mace import MaceModel
except ModuleNotFoundError as error:
    message = 'mace_ext.inference.torchsim needs torch-sim: pip install "e2ip-plugins[mace,torchsim]"'
    raise ModuleNotFoundError(message, name=error.name) from error


class TorchSimModel(MaceModel):
    """torch-sim's model of MACE, whose results hold the uncertainties, too.

    Parameters
    ----------
    model : str, Path or torch.nn.Module
        ``.model`` file of `mace_run_train` or `e2ip fit`, or what is in it; with a readout, in eV and Å.
    calibration : str or Path, optional
        File of ``e2ip calibrate``, to be applied to the uncertainties.
    uncertainties : str
        ``"always"``: every call computes them. ``"on request"``: the results of a call compute them once, when one of
        them is read; calls whose energies and forces alone are read, as by integrators, cost what stock MACE costs.
    **options
        Of torch-sim's ``MaceModel``: ``device``, ``dtype`` (default float64), ``compute_stress``, …

    Attributes
    ----------
    uq_family : str
        Name of the distribution, as in files.
    uq_model : str
        Name of the readout.

    Raises
    ------
    InputError
        Files that hold no MACE model, a model without a readout or with several heads, a calibration of another one; at
        an evaluation: positions that are not finite, species that the model or the calibration does not know.
    """

    def __init__(
        self,
        model: Union[str, Path, torch.nn.Module],
        calibration: Union[str, Path, None] = None,
        uncertainties: str = ALWAYS,
        **options: Any,
    ) -> None:
        on_request = is_on_request(uncertainties)
        where = "the model" if isinstance(model, torch.nn.Module) else str(model)
        net = model if isinstance(model, torch.nn.Module) else open_file(Path(model))
        family, readout = find_family(net), find_readout(net)
        if family is None:
            raise InputError(
                f"{where}: has no readout of e2ip-plugins; e2ip fit gives it one, MaceModel runs it without"
            )
        heads: Any = net.heads
        if len(heads) > 1:
            raise InputError(
                f"{where}: has {len(heads)} heads, and torch-sim knows of none; choose one with mace_select_head"
            )
        self._family, self.uq_family, self.uq_model = family, family.uq_family, model_name(readout)
        self._calibration = None if calibration is None else Calibration.read(calibration)
        if self._calibration is not None:
            self._calibration.check(family, (), where, self.uq_model)
        super().__init__(net, **options)
        self._on_request = on_request
        warn_if_unfitted(readout)
        self.model.requires_grad_(False)

    def forward(self, state: Any, **options: Any) -> Dict[str, Tensor]:
        """Return torch-sim's results, and every output of the family and ``e2ip_leverage`` (N, …) by their usual names,
        with ``energy_uncertainty`` (F,) and ``energy_error_vector`` (F, M) where energies have error bars.

        Units are those of the package: eV and Å. ``N`` counts the atoms of all structures, as the forces do.
        """
        self._check(state)
        observed = HostModel(self.model) if self._on_request else ObservedModel(self.model)
        # A copy, whose attribute of this name comes before the module.
        working = copy.copy(self)
        working.__dict__["model"] = observed
        results = super(TorchSimModel, working).forward(state, **options)
        self.__dict__.update({name: value for name, value in working.__dict__.items() if name != "model"})
        species: List[str] = []
        if self._calibration is not None:
            species = [chemical_symbols[z] for z in self.atomic_numbers.tolist()]
            self._calibration.check_species(species, "the batch")
        if isinstance(observed, HostModel):
            host, names = observed, [key.name for key in self._keys()]
            return ResultsOnRequest(results, lambda: self._uncertainties(host.read_out(), species), names)
        return {**results, **self._uncertainties(observed.output, species)}

    def _keys(self) -> Tuple[OutputKey, ...]:
        return (*self._family.output_keys(), LEVERAGE, *frame_outputs(self.model))

    def _uncertainties(self, output: Dict[str, Tensor], species: Sequence[str]) -> Dict[str, Tensor]:
        # Without forces, families that take forces put out nothing.
        outputs = {key.name: output[key.name].detach() for key in self._keys() if output.get(key.name) is not None}
        if self._calibration is not None:
            outputs.update(self._calibration.in_units(self._family, outputs, 1.0, species))
            outputs.update(calibrated_energies(self._calibration, outputs))
        return outputs

    def _check(self, state: Any) -> None:
        """Raise `InputError` for structures without meaning for the model, of which MACE would predict numbers."""
        numbers, positions = (
            state[name] if isinstance(state, dict) else getattr(state, name) for name in ("atomic_numbers", "positions")
        )
        known = [chemical_symbols[z] for z in self.z_table.zs]
        check_atoms(numbers.cpu().numpy(), positions.detach().cpu().numpy(), "the batch", known)
