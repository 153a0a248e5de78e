"""`TorchSimModel`: many structures at a time in torch-sim, with the uncertainties of every atom.

torch-sim (https://github.com/TorchSim/torch-sim) runs dynamics and relaxations of batches of structures on one device
and finds by itself how many fit. It is the extra ``torchsim``; docs/howto/torch-sim.md has examples.
"""

from pathlib import Path
from typing import Any, List, Union

import torch
from ase.data import chemical_symbols

from e2ip_plugins.errors import InputError
from e2ip_plugins.md.torchsim import UncertainModel
from e2ip_plugins.predictions.on_request import ALWAYS, is_on_request
from e2ip_plugins.readout.readout import model_name
from e2ip_plugins.scores.results import warn_if_unfitted
from mace_ext.inference.on_request import HostModel
from mace_ext.model.files import open_file
from mace_ext.model.readout import find_family, find_readout
from mace_ext.observed_model import ObservedModel

try:
    from torch_sim.models.mace import MaceModel
except ModuleNotFoundError as error:
    message = 'mace_ext.inference.torchsim needs torch-sim: pip install "e2ip-plugins[mace,torchsim]"'
    raise ModuleNotFoundError(message, name=error.name) from error


class TorchSimModel(UncertainModel, MaceModel):
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
        if options.get("compile_mode") is not None:
            raise InputError(f"compile_mode={options['compile_mode']!r}: readouts need an eager model; leave it out")
        net = model if isinstance(model, torch.nn.Module) else open_file(Path(model))
        family, readout = find_family(net), find_readout(net)
        if family is None:
            raise InputError(
                f"{where}: has no readout of e2ip-plugins; e2ip fit gives it one, MaceModel runs it without"
            )
        heads: Any = net.heads
        if len(heads) > 1:
            raise InputError(f"{where}: has {len(heads)} heads, and this takes one; choose one with mace_select_head")
        self.describe(family, model_name(readout), calibration, on_request, where)
        super().__init__(net, **options)
        if find_readout(self.model) is None:
            raise InputError(f"{where}: lost its readout in the conversion that torch-sim's options ask for")
        warn_if_unfitted(readout)
        self.model.requires_grad_(False)

    def stand_in(self, on_request: bool) -> ObservedModel:
        """Return what is called in the place of ``self.model``."""
        return HostModel(self.model) if on_request else ObservedModel(self.model)

    def known_symbols(self) -> List[str]:
        """Return the chemical symbols that the model knows."""
        return [chemical_symbols[z] for z in self.z_table.zs]
