"""`TorchSimModel`: many structures at a time in torch-sim, with the uncertainties of every atom.

torch-sim (https://github.com/TorchSim/torch-sim) runs dynamics and relaxations of batches of structures on one device
and finds by itself how many fit. It is the extra ``torchsim``; docs/howto/torch-sim.md has examples.
"""

import copy
from pathlib import Path
from typing import Any, Dict, List, Optional, Union

import torch
from nequip.data import AtomicDataDict
from nequip.data.transforms import NeighborListTransform

from e2ip_plugins.errors import InputError
from e2ip_plugins.md.torchsim import UncertainModel
from e2ip_plugins.predictions.on_request import ALWAYS, is_on_request
from e2ip_plugins.scores.results import warn_if_unfitted
from nequip_ext.inference.batches import Batches, of_model, open_model
from nequip_ext.inference.on_request import HostModel
from nequip_ext.model.readout import find_readout
from nequip_ext.training.labels import known_species

try:
    from nequip.integrations.torchsim import NequIPTorchSimCalc
except ModuleNotFoundError as error:
    message = (
        "nequip_ext.inference.torchsim needs torch-sim and NequIP 0.17 or newer: pip install "
        '"e2ip-plugins[nequip,torchsim]"'
    )
    raise ModuleNotFoundError(message, name=error.name) from error


class TorchSimModel(UncertainModel, NequIPTorchSimCalc):
    """NequIP's model of torch-sim, whose results hold the uncertainties, too.

    Parameters
    ----------
    model : str, Path or torch.nn.Module
        ``….ckpt``, ``….nequip.zip``, or ``….nequip.pt2`` of a target ``<readout>_batch``; or an eager model, whose
        types are elements. With a readout, in eV and Å.
    calibration : str or Path, optional
        File of ``e2ip calibrate``, to be applied to the uncertainties.
    uncertainties : str
        ``"always"``: every call computes them. ``"on request"``: the results of a call compute them once, when one of
        them is read; calls whose energies and forces alone are read, as by integrators, cost what stock NequIP costs.
    device : str or torch.device
    neighborlist_backend : str
        Of NequIP. ``"matscipy"`` finds neighbours on the CPU, one structure after another, as ASE's calculator does;
        ``"alchemiops"`` finds those of the batch on its device.
    **options
        Of NequIP's ``NequIPTorchSimCalc``.

    Attributes
    ----------
    uq_family : str
        Name of the distribution, as in files.
    uq_model : str
        Name of the readout.

    Raises
    ------
    InputError
        Files that hold no NequIP model, a model without a readout, a file compiled for ASE, a calibration of another
        model, ``"on request"`` with a compiled file; at an evaluation: positions that are not finite, species that the
        model or the calibration does not know.
    """

    def __init__(
        self,
        model: Union[str, Path, torch.nn.Module],
        calibration: Union[str, Path, None] = None,
        uncertainties: str = ALWAYS,
        device: Union[str, torch.device] = "cpu",
        neighborlist_backend: str = "matscipy",
        **options: Any,
    ) -> None:
        on_request = is_on_request(uncertainties)
        opened, where = _opened(model, str(device))
        if opened.family is None:
            raise InputError(
                f"{where}: has no readout of e2ip-plugins; e2ip fit gives it one, NequIPTorchSimCalc runs it without"
            )
        readout = find_readout(opened.model)
        if on_request and readout is None:
            raise InputError(
                f"{where}: uncertainties='on request': the readout is a part of the compiled file; take its checkpoint "
                "or package, or 'always'"
            )
        self.describe(opened.family, opened.uq_model, calibration, on_request, where)
        for transform in opened.transforms:
            if isinstance(transform, NeighborListTransform):
                transform.backend = neighborlist_backend
        super().__init__(opened.model, device, transforms=list(opened.transforms), **options)
        warn_if_unfitted(readout)
        self._host = HostModel(opened.model) if on_request else None

    def stand_in(self, on_request: bool) -> Any:
        """Return what is called in the place of ``self.model``."""
        return copy.copy(self._host) if on_request else _Observed(self.model)

    def known_symbols(self) -> Optional[List[str]]:
        """Return the chemical symbols that the model knows."""
        return known_species(self.transforms)


class _Observed:
    """Stand-in for a model, which keeps the last ``output``."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model, self.output = model, {}  # type: ignore[var-annotated]

    def __call__(self, data: AtomicDataDict.Type) -> Dict[str, Any]:
        # Compiled files read views in the wrong order; NequIP copies them in 0.19.1 and later.
        self.output = self._model({name: value.contiguous() for name, value in data.items()})
        return self.output


def _opened(model: Union[str, Path, torch.nn.Module], device: str) -> "tuple[Batches, str]":
    """Return a model with its transforms, and its name in messages."""
    if isinstance(model, torch.nn.Module):
        return of_model(model, device), "the model"
    opened = open_model(Path(model), device=device)
    if opened.one_by_one:
        raise InputError(
            f"{model}: takes one structure at a time: compile the model anew with nequip-compile --target "
            f"{opened.family.name if opened.family else 'e2ip'}_batch"
        )
    return opened, str(model)
