"""Uncertainties as calculators and prediction files have them: in units, calibrated, with the names of their origin."""

import sys
import warnings
from pathlib import Path
from typing import Any, Dict, Iterable, Mapping, Optional, Sequence, Tuple, Type

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from e2ip_plugins.errors import InputError, UncertaintyWarning
from e2ip_plugins.families.interface import Family, committee_views
from e2ip_plugins.keys import CALIBRATION_KEY, FAMILY_KEY, FORCE_VIEWS, FRAME_KEYS, LEVERAGE, MODEL_KEY
from e2ip_plugins.predictions.columns import uncertainties
from e2ip_plugins.readout.gradient import Uncertainty, evaluate
from e2ip_plugins.readout.readout import unfitted
from e2ip_plugins.scores.calibration import Calibration

#: Modules of this project, in which no warning is shown.
_PACKAGES = ("e2ip_plugins", "nequip_ext", "mace_ext")


def model_results(
    family: Type[Family],
    outputs: Dict[str, Tensor],
    force_factor: float,
    *,
    calibration: Optional[Calibration] = None,
    species: Iterable[str] = (),
    uq_model: Optional[str] = None,
) -> Dict[str, Any]:
    """Return what an ASE calculator adds to its ``results``: arrays in eV and Å, and the names of their origin.

    Parameters
    ----------
    family : subclass of Family
    outputs : dict
        Output keys of the family (N, …) in the model's units; ``e2ip_leverage`` is passed on if it is among them.
    force_factor : float
        The model's force unit in eV/Å. Covariances carry it squared, standard deviations once.
    calibration : Calibration, optional
    species : iterable of str
        Chemical symbols of the atoms; needed with a calibration.
    uq_model : str, optional
        Name of the readout.

    Raises
    ------
    InputError
        For a calibration of another family or of other species.
    """
    names = {FAMILY_KEY: family.uq_family, MODEL_KEY: uq_model}
    if calibration is not None:
        names[CALIBRATION_KEY] = Path(calibration.path).name
    views = _in_units(family, outputs, force_factor, calibration, species)
    results = {name: value.cpu().numpy() for name, value in views.items()}
    return {**results, **{key: name for key, name in names.items() if name is not None}}


def standard_results(results: Mapping[str, Any]) -> Dict[str, Any]:
    """Return a calculator's results without those of this package, for functions of ASE that know its own names alone.

    Examples
    --------
    >>> standard_results({"energy": -1.0, "forces_cov": None, "e2ip_nu": None, "uq_family": "niw"})
    {'energy': -1.0}
    """
    ours = {*uncertainties(), *FRAME_KEYS}
    return {name: value for name, value in results.items() if name not in ours}


def committee_results(
    members: Sequence[Tuple[Type[Family], Dict[str, Tensor]]], force_factor: float, forces: ArrayLike
) -> Dict[str, Any]:
    """Return the same for a committee, whose mixture is of no family: it has the common views alone.

    Parameters
    ----------
    members : sequence of (Family, dict)
        Family and outputs of each of the M members, as `model_results` takes them.
    force_factor : float
    forces : (M, N, 3) array
        Forces of the members in eV/Å.
    """
    of_members = [family.outputs_in_units(outputs, force_factor) for family, outputs in members]
    views = {key.name: torch.stack([views[key.name] for views in of_members]) for key in FORCE_VIEWS}
    results = committee_views(views, torch.as_tensor(forces, device=views["forces_cov"].device))
    if all(LEVERAGE.name in outputs for _, outputs in members):
        results[LEVERAGE.name] = torch.stack([outputs[LEVERAGE.name] for _, outputs in members]).mean(0)
    return {name: value.cpu().numpy() for name, value in results.items()}


def in_units(
    uncertainty: Uncertainty,
    family: Type[Family],
    force_factor: float,
    calibration: Optional[Calibration] = None,
    species: Iterable[str] = (),
) -> Uncertainty:
    """Return an uncertainty, to be differentiated, as `model_results` has it; parameters as there.

    Raises
    ------
    InputError
        For a calibration of another family or of other species, or with a floor.
    """
    if calibration is None and force_factor == 1.0:
        return uncertainty
    if calibration is not None and calibration.floor.value > 0.0:
        raise InputError(
            f"{calibration.path}: has a floor, and uncertainties with a floor have no gradient here; use a calculator "
            "without it, or a calibration of method scale"
        )
    return lambda outputs: evaluate(uncertainty, _in_units(family, outputs, force_factor, calibration, species))


def _in_units(
    family: Type[Family],
    outputs: Dict[str, Tensor],
    force_factor: float,
    calibration: Optional[Calibration],
    species: Iterable[str],
) -> Dict[str, Tensor]:
    if calibration is None:
        views = family.outputs_in_units(outputs, force_factor)
    else:
        calibration.check(family, species, "this structure")
        views = calibration.in_units(family, outputs, force_factor, species)
    # The leverage, which is no output of the family, has no unit.
    return {**views, **{name: value for name, value in outputs.items() if name == LEVERAGE.name}}


def calibrated_columns(
    calibration: Calibration, family: Type[Family], columns: Mapping[str, Any], species: Iterable[str]
) -> Dict[str, Tensor]:
    """Return those of the ``columns`` that a calibration changes, in their shapes and in double precision.

    Parameters
    ----------
    calibration : Calibration
        One that has been checked for family and species.
    family : subclass of Family
    columns : dict
        Arrays or tensors of N atoms in eV and Å, the family's parameters among them, in any shape.
    species : iterable of str
        Chemical symbols of the atoms.
    """
    parameters = {
        key.name: torch.as_tensor(columns[key.name], dtype=torch.float64).reshape(-1, *key.shape)
        for key in family.parameter_keys
    }
    views = calibration.in_units(family, parameters, 1.0, species)
    return {name: value.reshape(columns[name].shape) for name, value in views.items() if name in columns}


def warn_if_unfitted(readout: Any, where: str = "") -> None:
    """Warn of a readout, None included, that takes a leverage which was never fitted; ``where`` precedes the text."""
    text, level = unfitted(readout), 1
    if text:
        # The warning is about a line of the user's, outside these packages.
        while sys._getframe(level).f_globals["__name__"].partition(".")[0] in _PACKAGES:
            level += 1
        warnings.warn(f"{where}{text}", UncertaintyWarning, stacklevel=level + 1)
