"""A post-hoc calibration: constants that correct a model's covariances afterwards, in a small JSON file.

``e2ip calibrate`` fits them (`e2ip_plugins.scores.calibration_fit`). ``e2ip compare``, the calculators and the
evaluation tools of MACE and NequIP apply them. The covariance of an atom becomes factor · covariance + floor · I, with
a factor for its species; the mean and the shape of its distribution stay. A calibration may also have conformal radii:
the radius q of a level p is such that (y - γ)ᵀ covariance⁻¹ (y - γ) ≤ q² holds for a random atom of a new configuration
with a probability of at least p.

Energies have constants of their own, where the validation file has energies with uncertainties: a factor on standard
deviations and error vectors, and conformal radii in units of the calibrated standard deviation.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple, Type, Union

import numpy as np
import torch
from torch import Tensor

from e2ip_plugins import __version__
from e2ip_plugins.errors import InputError
from e2ip_plugins.families.interface import Family
from e2ip_plugins.files import replacing
from e2ip_plugins.formats import CALIBRATIONS
from e2ip_plugins.keys import MODEL_KEY

#: First entry of the file.
CALIBRATION_FORMAT = "e2ip calibration"

#: Unit of the forces that the constants are for.
CALIBRATION_UNIT = "eV/Å"

_FIT_ANOTHER = "fit one with e2ip calibrate to this model's predictions for validation frames"

#: Quantile by level, by group of atoms (`ALL_ATOMS` or a chemical symbol), by name of the uncertainty; see
#: `e2ip_plugins.scores.frame_maxima`.
Tables = Dict[str, Dict[str, Dict[float, float]]]


@dataclass(frozen=True)
class CalibrationConstant:
    """One fitted number.

    Attributes
    ----------
    value : float
    interval : tuple of float
        95 % interval from a bootstrap that draws whole configurations.
    """

    value: float
    interval: Tuple[float, float]


@dataclass(frozen=True)
class EnergyCalibration:
    """Constants for energies, fitted by `e2ip_plugins.scores.energy_fit`.

    Attributes
    ----------
    factor : CalibrationConstant
        What the standard deviation of an energy, and its error vector, are multiplied by.
    radii : dict
        Conformal radius by level: |e| ≤ radius · σ holds for a new frame with a probability of at least the level.
        Infinite where the frames were too few. May be empty.
    frames : int
        Number of frames that they were fitted to.
    scores : dict
        Figures of the energies of the validation file ``before`` and ``after``.
    """

    factor: CalibrationConstant
    radii: Dict[float, float]
    frames: int
    scores: Dict[str, Dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Calibration:
    """Constants fitted to a validation file.

    Attributes
    ----------
    methods : tuple of str
    uq_family : str
        Family of the predictions that the calibration is for.
    factor : dict
        `CalibrationConstant` by species: what the covariance is multiplied by.
    floor : CalibrationConstant
        Variance that is added on the diagonal, in eV²/Å².
    radii : dict
        Conformal radius by level, dimensionless; infinite where the configurations were too few. May be empty.
    configurations, atoms : int
        Numbers of those with finite reference forces.
    frames : tuple of str
        `fingerprint` of every frame of the validation file except isolated atoms.
    file : str
        Name of the validation file, for people.
    scores : dict
        Figures of the validation file ``before`` and ``after``.
    notes : list of str
        What the user should know about the fit.
    path : str
        File that the calibration was read from, for messages.
    frame_maxima : dict
        Quantiles of the largest calibrated uncertainty in a frame of the validation file, of
        `e2ip_plugins.scores.frame_maxima.of_predictions`.
    uq_model : str or None
        Name of the readout of these predictions; None where they had none.
    energies : EnergyCalibration or None
        None where the validation file had no energies with uncertainties.
    """

    methods: Tuple[str, ...]
    uq_family: str
    factor: Dict[str, CalibrationConstant]
    floor: CalibrationConstant
    radii: Dict[float, float]
    configurations: int
    atoms: int
    frames: Tuple[str, ...]
    file: str
    scores: Dict[str, Dict[str, float]] = field(default_factory=dict)
    notes: List[str] = field(default_factory=list)
    path: str = "the calibration"
    frame_maxima: Tables = field(default_factory=dict)
    uq_model: Optional[str] = None
    energies: Optional[EnergyCalibration] = None

    @property
    def energy_factor(self) -> float:
        """Factor on ``energy_uncertainty`` and ``energy_error_vector``; 1 where none was fitted."""
        return 1.0 if self.energies is None else self.energies.factor.value

    @property
    def changes(self) -> bool:
        """Whether any uncertainty is another one with the calibration."""
        constants = (self.energy_factor, *(constant.value for constant in self.factor.values()))
        return self.floor.value > 0.0 or any(value != 1.0 for value in constants)

    @property
    def species(self) -> Tuple[str, ...]:
        """Chemical symbols that have constants."""
        return tuple(self.factor)

    def lines(self) -> List[str]:
        """Return lines of text on the constants, and on their effect on the validation file."""
        lines = [f"{self.file}: {self.configurations} configurations, {self.atoms} atoms, family {self.uq_family}"]
        factors = {"": next(iter(self.factor.values()))} if "scale" in self.methods else {}
        if "species-scale" in self.methods:
            factors = {f", {symbol}": constant for symbol, constant in self.factor.items()}
        for suffix, constant in factors.items():
            low, high = constant.interval
            lines.append(f"factor on the covariance{suffix}: {constant.value:.4g} ({low:.4g} to {high:.4g})")
        if "floor" in self.methods:
            sigma, low, high = (1000.0 * math.sqrt(v) for v in (self.floor.value, *self.floor.interval))
            lines.append(f"floor: {sigma:.2f} meV/Å ({low:.2f} to {high:.2f})")
        for level, radius in self.radii.items():
            if math.isfinite(radius):
                lines.append(f"conformal radius for {level:g}: {radius:.3f}")
        lines += _effects(self.scores, "frames")
        if self.energies is not None:
            energies, (low, high) = self.energies, self.energies.factor.interval
            lines.append(f"energies of {energies.frames} frames")
            if self.methods != ("conformal",):
                lines.append(f"factor on their standard deviations: {self.energy_factor:.4g} ({low:.4g} to {high:.4g})")
            for level, radius in energies.radii.items():
                if math.isfinite(radius):
                    lines.append(f"conformal radius of energies for {level:g}: {radius:.3f}")
            lines += _effects(energies.scores, "energies")
        return lines

    def check(
        self, family: Optional[Type[Family]], species: Iterable[str], where: str, uq_model: Optional[str] = None
    ) -> None:
        """Raise `InputError` unless the calibration is for predictions of this family, these species and this model.

        Parameters
        ----------
        family
            None for predictions without a distribution.
        species
            Chemical symbols.
        where : str
            Name of the predictions, for the message.
        uq_model : str, optional
            Where it is known.
        """
        if family is None:
            raise InputError(
                f"{where}: has no predicted distribution that {self.path} could calibrate; e2ip fit gives a model one"
            )
        if family.uq_family != self.uq_family:
            raise InputError(
                f"{self.path}: is for predictions of family '{self.uq_family}', but {where} has family "
                f"'{family.uq_family}'; {_FIT_ANOTHER}"
            )
        self.check_model(uq_model, where)
        self.check_species(species, where)

    def check_model(self, uq_model: Optional[str], where: str) -> None:
        """Raise `InputError` for another model than that of the validation file, where both are known."""
        if None not in (uq_model, self.uq_model) and uq_model != self.uq_model:
            raise InputError(
                f"{self.path}: was fitted to predictions of another model ({self.uq_model}) than {where} has "
                f"({uq_model}); {_FIT_ANOTHER}"
            )

    def doubt(self, uq_model: Optional[str], where: str) -> str:
        """Return a warning for predictions that name their model if the calibration names none; otherwise ''."""
        if uq_model is None or self.uq_model is not None:
            return ""
        return (
            f"{self.path}: was fitted to predictions without {MODEL_KEY}, as those of an ensemble of stock models are, "
            f"and {where} has one ({uq_model}): is it for this model?"
        )

    def check_species(self, species: Iterable[str], where: str) -> None:
        """Raise `InputError` for species without constants."""
        unknown = sorted(set(map(str, species)) - set(self.species))
        if unknown:
            raise InputError(
                f"{self.path}: was fitted to {', '.join(self.species)} and knows nothing of {', '.join(unknown)}, "
                f"which {where} has; {_FIT_ANOTHER} that hold these species"
            )

    def check_frames(self, frames: Sequence[str], where: str) -> None:
        """Raise `InputError` if one of the ``frames`` (fingerprints) is of the validation file."""
        shared = set(self.frames) & set(frames)
        if shared:
            raise InputError(
                f"{where}: {sum(frame in shared for frame in frames)} of its {len(frames)} frames are among those that "
                f"{self.path} was fitted to ({self.file}); judge a calibration on other frames"
            )

    def apply(self, family: Type[Family], parameters: Dict[str, Tensor], species: Iterable[str]) -> Dict[str, Tensor]:
        """Return the calibrated parameters of N atoms, in eV and Å; `check` tells which parameters are allowed."""
        like = next(iter(parameters.values()))
        values = [self.factor[str(symbol)].value for symbol in species]
        factor = torch.tensor(values, dtype=like.dtype, device=like.device)
        return family.widen(parameters, factor, torch.full_like(factor, self.floor.value))

    def in_units(
        self, family: Type[Family], parameters: Dict[str, Tensor], force_factor: float, species: Iterable[str]
    ) -> Dict[str, Tensor]:
        """Return every output, calibrated: `Family.in_units` with ``force_factor``, which makes forces eV/Å."""
        of_family = {key.name: parameters[key.name] for key in family.parameter_keys}
        calibrated = self.apply(family, family.convert(of_family, force_factor), species)
        return {**calibrated, **family.derive(calibrated)}

    def apply_numpy(
        self, family: Type[Family], parameters: Dict[str, np.ndarray], species: Iterable[str]
    ) -> Dict[str, np.ndarray]:
        """Return `apply` of NumPy arrays, in float64."""
        tensors = {name: torch.as_tensor(values, dtype=torch.float64) for name, values in parameters.items()}
        return {name: values.numpy() for name, values in self.apply(family, tensors, species).items()}

    def write(self, path: Union[str, Path]) -> None:
        """Write the calibration as JSON; infinite radii and maxima become null."""
        content = {
            "format": CALIBRATION_FORMAT,
            "version": CALIBRATIONS.number,
            "e2ip_version": __version__,
            "unit": CALIBRATION_UNIT,
            **{name: _to_json(getattr(self, name)) for name in _FIELDS if name != "frames"},
            **({} if self.energies is None else {"energies": _to_json(self.energies)}),
            # At the end, because there may be thousands.
            "frames": " ".join(self.frames),
        }
        text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        with replacing(path) as unfinished:
            unfinished.write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, path: Union[str, Path]) -> "Calibration":
        """Read a file of `write`.

        Raises
        ------
        InputError
            Missing and broken files, those of a newer format or another unit, constants that mean nothing.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
            raise InputError(f"{path}: cannot be read as a calibration ({reason}); see e2ip calibrate") from error
        if not isinstance(content, dict) or content.get("format") != CALIBRATION_FORMAT:
            raise InputError(f"{path}: is no calibration; e2ip calibrate writes one")
        CALIBRATIONS.check(content.get("version"), f"{path}:", content.get("e2ip_version"))
        if content.get("unit") != CALIBRATION_UNIT:
            raise InputError(f"{path}: is for forces in {content.get('unit')}, not in {CALIBRATION_UNIT}")
        try:
            fields = {name: read(content[name]) for name, read in _FIELDS.items()}
            # Files from before there were uncertainties of energies have no such entry.
            energies = _energies(content["energies"]) if "energies" in content else None
            calibration = cls(path=str(path), energies=energies, **fields)
            _check_values(calibration)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise InputError(f"{path}: is damaged ({reason}); fit it anew with e2ip calibrate") from error
        return calibration


def _check_values(calibration: Calibration) -> None:
    """Raise ``ValueError`` for constants and radii that mean nothing."""
    factors = calibration.factor.values()
    if not factors or any(constant.value <= 0.0 for constant in factors) or calibration.floor.value < 0.0:
        raise ValueError("factors must be positive, the floor not negative")
    if calibration.energy_factor <= 0.0:
        raise ValueError("the factor of energies must be positive")
    for radii in (calibration.radii, *([] if calibration.energies is None else [calibration.energies.radii])):
        if not all(0.0 < level < 1.0 and radius >= 0.0 for level, radius in radii.items()):
            raise ValueError("conformal radii must not be negative, and their levels between 0 and 1")
        if [radii[level] for level in sorted(radii)] != sorted(radii.values()):
            raise ValueError("conformal radii must grow with their levels")


def _effects(scores: Dict[str, Dict[str, float]], what: str) -> List[str]:
    """Return lines of text on figures before and after."""
    titles = {"nll": "NLL", "calibration_error": "CE", "coverage90": "coverage at 90 %"}
    pairs = {name: [scores[when][name] for when in ("before", "after")] for name in titles}
    return [f"{titles[name]} of these {what}: {before:.4f} -> {after:.4f}" for name, (before, after) in pairs.items()]


def _to_json(value: Any) -> Any:
    """Return a field as it is written: a constant with its interval, levels as text, infinite values as None."""
    if isinstance(value, CalibrationConstant):
        return {"value": value.value, "interval95": value.interval}
    if isinstance(value, EnergyCalibration):
        return {name: _to_json(entry) for name, entry in vars(value).items()}
    if isinstance(value, dict):
        return {f"{key:.12g}" if isinstance(key, float) else key: _to_json(entry) for key, entry in value.items()}
    return None if value == math.inf else value


def _constant(entry: Dict[str, Any]) -> CalibrationConstant:
    value, (low, high) = _number(entry["value"]), map(_number, entry["interval95"])
    if low > high:
        raise ValueError("an interval must not end before it begins")
    return CalibrationConstant(value, (low, high))


def _number(entry: Any) -> float:
    if isinstance(entry, bool) or not isinstance(entry, (int, float)) or not math.isfinite(entry):
        raise ValueError(f"{entry!r} is no finite number")
    return float(entry)


def _levels(entries: Dict[str, Optional[float]]) -> Dict[float, float]:
    return {float(level): math.inf if value is None else _number(value) for level, value in entries.items()}


def _energies(entry: Dict[str, Any]) -> EnergyCalibration:
    numbers = int(entry["frames"]), dict(entry["scores"])
    return EnergyCalibration(_constant(entry["factor"]), _levels(entry["radii"]), *numbers)


def _methods(entry: Any) -> Tuple[str, ...]:
    if not isinstance(entry, list):
        raise ValueError("methods must be a list")
    return tuple(entry)


#: How every field is read from JSON.
_FIELDS: Dict[str, Callable[[Any], Any]] = {
    "methods": _methods,
    "uq_family": str,
    "factor": lambda entries: {symbol: _constant(entry) for symbol, entry in entries.items()},
    "floor": _constant,
    "radii": _levels,
    "configurations": int,
    "atoms": int,
    "frames": lambda text: tuple(text.split()),
    "file": str,
    "scores": dict,
    "notes": list,
    "frame_maxima": lambda tables: {
        name: {group: _levels(levels) for group, levels in groups.items()} for name, groups in tables.items()
    },
    MODEL_KEY: lambda name: name,
}
