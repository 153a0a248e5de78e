"""`TorchSimModel`: many structures at a time in torch-sim, with the uncertainties of every atom.

torch-sim (https://github.com/TorchSim/torch-sim) runs dynamics and relaxations of batches of structures on one device
and finds by itself how many fit. It is the extra ``torchsim``; docs/mace-inference.md has examples.
"""

import logging
from pathlib import Path
from typing import Any, Dict, Optional, Union

import torch
from ase.data import chemical_symbols
from torch import Tensor

from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.checks import check_atoms
from e2ip_plugins.readout.readout import model_name, unfitted
from e2ip_plugins.scores.calibration import Calibration
from mace_ext.model.files import open_file
from mace_ext.model.readout import find_family, find_readout, output_keys

try:
    from torch_sim.models.mace import MaceModel
except ModuleNotFoundError as error:
    told = 'mace_ext.inference.torchsim needs torch-sim: pip install "e2ip-plugins[mace,torchsim]"'
    raise ModuleNotFoundError(told, name=error.name) from error


class TorchSimModel(MaceModel):
    """torch-sim's model of MACE, whose results hold the uncertainties, too.

    Parameters
    ----------
    model : str, Path or torch.nn.Module
        ``.model`` file of `mace_run_train` or `e2ip fit`, or what is in it; with a readout, in eV and Å.
    calibration : str or Path, optional
        File of ``e2ip calibrate``, to be applied to the uncertainties.
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
        self, model: Union[str, Path, torch.nn.Module], calibration: Union[str, Path, None] = None, **options: Any
    ) -> None:
        where = "the model" if isinstance(model, torch.nn.Module) else str(model)
        net = model if isinstance(model, torch.nn.Module) else open_file(Path(model), "cpu")
        family, name = find_family(net), model_name(find_readout(net))
        if family is None:
            raise InputError(
                f"{where}: has no readout of e2ip-plugins; e2ip fit gives it one, MaceModel runs it without"
            )
        heads: Any = net.heads
        if len(heads) > 1:
            raise InputError(
                f"{where}: has {len(heads)} heads, and torch-sim knows of none; choose one with mace_select_head"
            )
        self._calibration = None if calibration is None else Calibration.read(calibration)
        if self._calibration is not None:
            self._calibration.check(family, (), where, name)
        super().__init__(net, **options)
        self._family, self.uq_family, self.uq_model = family, family.uq_family, name
        warning = unfitted(find_readout(net))
        if warning:
            logging.warning(warning)
        self.model.requires_grad_(False)

    def forward(self, state: Any, **options: Any) -> Dict[str, Tensor]:
        """torch-sim's results, and every output of the family and ``e2ip_leverage`` (N, …) by their usual names.

        Units are those of the package: eV and Å. ``N`` counts the atoms of all structures, as the forces do.
        """
        self._check(state)
        seen: Dict[str, Optional[Tensor]] = {}
        handle = self.model.register_forward_hook(lambda module, inputs, output: seen.update(output))
        try:
            results = super().forward(state, **options)
        finally:
            handle.remove()
        found = {key.name: seen.get(key.name) for key in output_keys(self._family, seen)}
        outputs = {name: value.detach() for name, value in found.items() if value is not None}
        if self._calibration is not None:
            species = [chemical_symbols[z] for z in self.atomic_numbers.tolist()]
            self._calibration.check_species(species, "the batch")
            outputs.update(self._calibration.in_units(self._family, outputs, 1.0, species))
        return {**results, **outputs}

    def _check(self, state: Any) -> None:
        """`InputError` for what MACE would predict numbers of that mean nothing."""
        numbers, positions = (
            state[name] if isinstance(state, dict) else getattr(state, name) for name in ("atomic_numbers", "positions")
        )
        known = [chemical_symbols[z] for z in self.z_table.zs]
        check_atoms(numbers.cpu().numpy(), positions.detach().cpu().numpy(), "the batch", known)
