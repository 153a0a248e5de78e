"""Uncertainties as calculators and prediction files have them: in units, calibrated, with the names of their origin."""

import sys
import warnings
from pathlib import Path
from typing import Any, Dict, Iterable, Mapping, Optional, Sequence, Tuple, Type

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from e2ip_plugins import keys
from e2ip_plugins.errors import InputError, UncertaintyWarning
from e2ip_plugins.families.interface import Family, committee_views
from e2ip_plugins.predictions.columns import our_names
from e2ip_plugins.readout.gradient import Uncertainty, evaluate
from e2ip_plugins.readout.readout import unfitted
from e2ip_plugins.scores.calibration import Calibration

_FRAME_NAMES = tuple(key.name for key in keys.FRAME_OUTPUTS)

#: Modules of this project, in which no warning is shown.
_PACKAGES = ("e2ip_plugins", "nequip_ext", "mace_ext")


def model_results(
    family: Type[Family],
    outputs: Dict[str, Tensor],
    force_factor: float,
    *,
    energy_factor: float = 1.0,
    calibration: Optional[Calibration] = None,
    species: Iterable[str] = (),
    uq_model: Optional[str] = None,
    periodic: bool = True,
) -> Dict[str, Any]:
    """Return what an ASE calculator adds to its ``results``: arrays in eV and Å, and the names of their origin.

    Parameters
    ----------
    family : subclass of Family
    outputs : dict
        Output keys of the family (N, …) in the model's units. ``e2ip_leverage`` and `FRAME_OUTPUTS` (1, …) are passed
        on if they are among them, the latter where they were fitted.
    force_factor, energy_factor : float
        The model's units of force and energy in eV/Å and eV. Covariances carry the former squared, standard deviations
        once.
    calibration : Calibration, optional
    species : iterable of str
        Chemical symbols of the atoms; needed with a calibration.
    uq_model : str, optional
        Name of the readout.
    periodic : bool
        Whether the frame has a stress.

    Raises
    ------
    InputError
        For a calibration of another family or of other species.
    """
    views = _in_units(family, outputs, (force_factor, energy_factor), calibration, species)
    results = {name: value.cpu().numpy() for name, value in views.items()}
    results.update(energy_results({name: results.pop(name, ()) for name in _FRAME_NAMES}, 0, periodic))
    return {**results, **origin(family, uq_model, calibration)}


def origin(family: Type[Family], uq_model: Optional[str], calibration: Optional[Calibration]) -> Dict[str, str]:
    """Return the names of family, readout and calibration, as frames and results have them."""
    names = {keys.FAMILY_KEY: family.uq_family, keys.MODEL_KEY: uq_model}
    if calibration is not None:
        names[keys.CALIBRATION_KEY] = Path(calibration.path).name
    return {name: value for name, value in names.items() if value is not None}


def energy_results(outputs: Mapping[str, Any], frame: int, periodic: bool = True) -> Dict[str, Any]:
    """Return the results of one frame from arrays or tensors (F, …) of `FRAME_OUTPUTS`; none where none were fitted.

    Those of the stress are for frames that are ``periodic`` in all directions.
    """
    names = _FRAME_NAMES if periodic else [key.name for key in keys.ENERGY_OUTPUTS]
    values = {name: outputs[name][frame] for name in names if len(outputs.get(name, ()))}
    if not values or not float(values[keys.ENERGY_UNCERTAINTY.name]) > 0.0:
        return {}
    of_stress = (keys.STRESS_UNCERTAINTY.name, keys.STRESS_COV.name)
    if of_stress[0] in values and not np.asarray(values[of_stress[0]]).any():
        values = {name: value for name, value in values.items() if name not in of_stress}
    return {name: float(value) if np.ndim(value) == 0 else np.asarray(value) for name, value in values.items()}


def standard_results(results: Mapping[str, Any]) -> Dict[str, Any]:
    """Return a calculator's results without those of this package, for functions of ASE that know its own names alone.

    Examples
    --------
    >>> standard_results({"energy": -1.0, "forces_cov": None, "e2ip_nu": None, "uq_family": "niw"})
    {'energy': -1.0}
    """
    ours = set(our_names())
    return {name: value for name, value in results.items() if name not in ours}


def committee_results(
    members: Sequence[Tuple[Type[Family], Dict[str, Tensor]]],
    force_factor: float,
    forces: ArrayLike,
    energy_factor: float = 1.0,
    energies: ArrayLike = (),
) -> Dict[str, Any]:
    """Return the same for a committee, whose mixture is of no family: it has the common views alone.

    Parameters
    ----------
    members : sequence of (Family, dict)
        Family and outputs of each of the M members, as `model_results` takes them.
    force_factor, energy_factor : float
    forces : (M, N, 3) array
        Forces of the members in eV/Å.
    energies : (M,) array, optional
        Energies of the members in eV, for the standard deviation of their mean's error where all members have one.
    """
    of_members = [family.outputs_in_units(outputs, force_factor) for family, outputs in members]
    views = {key.name: torch.stack([views[key.name] for views in of_members]) for key in keys.FORCE_VIEWS}
    results = committee_views(views, torch.as_tensor(forces, device=views["forces_cov"].device))
    if all(keys.LEVERAGE.name in outputs for _, outputs in members):
        results[keys.LEVERAGE.name] = torch.stack([outputs[keys.LEVERAGE.name] for _, outputs in members]).mean(0)
    arrays: Dict[str, Any] = {name: value.cpu().numpy() for name, value in results.items()}
    of_energies = [float(outputs.get(keys.ENERGY_UNCERTAINTY.name, torch.zeros(1))[0]) for _, outputs in members]
    if len(np.ravel(energies)) == len(members) and min(of_energies) > 0.0:
        variance = np.square(energy_factor * np.array(of_energies)).mean() + np.var(np.asarray(energies), ddof=1)
        arrays[keys.ENERGY_UNCERTAINTY.name] = float(np.sqrt(variance))
    return arrays


def in_units(
    uncertainty: Uncertainty,
    family: Type[Family],
    force_factor: float,
    calibration: Optional[Calibration] = None,
    species: Iterable[str] = (),
    energy_factor: float = 1.0,
) -> Uncertainty:
    """Return an uncertainty, to be differentiated, as `model_results` has it; parameters as there.

    Raises
    ------
    InputError
        For a calibration of another family or of other species, or with a floor.
    """
    if calibration is None and force_factor == energy_factor == 1.0:
        return uncertainty
    if calibration is not None and calibration.floor.value > 0.0:
        raise InputError(
            f"{calibration.path}: has a floor, and uncertainties with a floor have no gradient here; use a calculator "
            "without it, or a calibration of method scale"
        )
    factors = force_factor, energy_factor
    return lambda outputs: evaluate(uncertainty, _in_units(family, outputs, factors, calibration, species))


def _in_units(
    family: Type[Family],
    outputs: Dict[str, Tensor],
    factors: Tuple[float, float],
    calibration: Optional[Calibration],
    species: Iterable[str],
) -> Dict[str, Tensor]:
    force_factor, energy_factor = factors
    if calibration is None:
        views = family.outputs_in_units(outputs, force_factor)
    else:
        calibration.check(family, species, "this structure")
        views = calibration.in_units(family, outputs, force_factor, species)
    # The leverage, which is no output of the family, has no unit.
    others = {name: value for name, value in outputs.items() if name == keys.LEVERAGE.name}
    units = dict.fromkeys(_FRAME_NAMES, energy_factor)
    units[keys.STRESS_UNCERTAINTY.name] = force_factor**3 / energy_factor**2
    units[keys.STRESS_COV.name] = units[keys.STRESS_UNCERTAINTY.name] ** 2
    energies = {name: unit * outputs[name] for name, unit in units.items() if name in outputs}
    return {**views, **others, **energies, **calibrated_energies(calibration, energies)}


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
        Arrays or tensors of N atoms in eV and Å, the family's parameters among them, in any shape; and of
        frames `ENERGY_OUTPUTS` in eV.
    species : iterable of str
        Chemical symbols of the atoms.
    """
    parameters = {
        key.name: torch.as_tensor(columns[key.name], dtype=torch.float64).reshape(-1, *key.shape)
        for key in family.parameter_keys
    }
    views = calibration.in_units(family, parameters, 1.0, species)
    changed = {name: value.reshape(columns[name].shape) for name, value in views.items() if name in columns}
    return {**changed, **calibrated_energies(calibration, columns)}


def calibrated_energies(calibration: Optional[Calibration], columns: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the uncertainty and the error vector of energies among the ``columns``, times a calibration's factor.

    Nothing is returned without a calibration, and of one that has no factor for energies.
    """
    if calibration is None or calibration.energies is None:
        return {}
    return {
        key.name: calibration.energy_factor * columns[key.name] for key in keys.ENERGY_OUTPUTS if key.name in columns
    }


def warn_if_unfitted(readout: Any, where: str = "") -> None:
    """Warn of a readout, None included, that takes a leverage which was never fitted; ``where`` precedes the text."""
    text, level = unfitted(readout), 1
    if text:
        # The warning is about a line of the user's, outside these packages.
        while sys._getframe(level).f_globals["__name__"].partition(".")[0] in _PACKAGES:
            level += 1
        warnings.warn(f"{where}{text}", UncertaintyWarning, stacklevel=level + 1)
