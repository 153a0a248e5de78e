"""A post-hoc calibration: constants that put a model's covariances right afterwards, in a small JSON file.

``e2ip calibrate`` fits them (`e2ip_plugins.scores.calibration_fit`); ``e2ip compare``, the calculators and the
evaluation tools of MACE and NequIP apply them. The covariance of an atom becomes factor · covariance + floor · I, with
a factor for its species; the rest of its distribution stays. There may also be conformal radii: q of a level p, so that
(y - γ)ᵀ covariance⁻¹ (y - γ) ≤ q² holds for a random atom of a new configuration with a probability of at least p.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple, Type, Union

import numpy as np
import torch
from torch import Tensor

from e2ip_plugins import __version__
from e2ip_plugins.errors import InputError
from e2ip_plugins.families.interface import Family
from e2ip_plugins.files import replacing
from e2ip_plugins.keys import MODEL_KEY
from e2ip_plugins.scores.frame_maxima import Tables

#: Of the file; a reader knows one.
FORMAT, VERSION = "e2ip calibration", 1

#: All constants belong to forces in this unit.
UNIT = "eV/Å"


@dataclass(frozen=True)
class Constant:
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
class Calibration:
    """What was fitted to a validation file.

    Attributes
    ----------
    methods : tuple of str
    uq_family : str
        Of the predictions that it is for.
    uq_model : str or None
        Of these, too; None where they had none, as those of earlier versions.
    factor : dict
        `Constant` by species: what the covariance is multiplied by.
    floor : Constant
        Variance that is added on the diagonal, in eV²/Å².
    radii : dict
        Conformal radius by level, dimensionless; infinite where the configurations were too few. May be empty.
    configurations, atoms : int
        With finite reference forces.
    frames : tuple of str
        `fingerprint` of every frame of the validation file but isolated atoms.
    file : str
        Its name, for people.
    scores : dict
        Figures of the validation file ``before`` and ``after``.
    notes : list of str
        What the user should know about the fit.
    path : str
        Where it was read from, for messages.
    frame_maxima : dict
        Quantiles of the largest calibrated uncertainty in a frame of the validation file, of
        `e2ip_plugins.scores.frame_maxima.of_predictions`. Empty in files from before there were any, and other versions
        of this class read a file with or without them.
    """

    methods: Tuple[str, ...]
    uq_family: str
    factor: Dict[str, Constant]
    floor: Constant
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

    @property
    def species(self) -> Tuple[str, ...]:
        """Chemical symbols that there are constants for."""
        return tuple(self.factor)

    def lines(self) -> List[str]:
        """What was fitted, in words, and what it does to the frames that it was fitted to."""
        lines = [f"{self.file}: {self.configurations} configurations, {self.atoms} atoms, family {self.uq_family}"]
        by_species = {"factor on the covariance": next(iter(self.factor.values()))}
        if "species-scale" in self.methods:
            by_species = {f"factor on the covariance, {symbol}": constant for symbol, constant in self.factor.items()}
        if "scale" in self.methods or "species-scale" in self.methods:
            lines += [
                f"{name}: {c.value:.4g} ({c.interval[0]:.4g} to {c.interval[1]:.4g})" for name, c in by_species.items()
            ]
        if "floor" in self.methods:
            sigma, low, high = (1000.0 * math.sqrt(v) for v in (self.floor.value, *self.floor.interval))
            lines.append(f"floor: {sigma:.2f} meV/Å ({low:.2f} to {high:.2f})")
        for level, radius in self.radii.items():
            if math.isfinite(radius):
                lines.append(f"conformal radius for {level:g}: {radius:.3f}")
        for name, title in (("nll", "NLL"), ("calibration_error", "CE"), ("coverage90", "coverage at 90 %")):
            before, after = (self.scores[when][name] for when in ("before", "after"))
            lines.append(f"{title} of these frames: {before:.4f} -> {after:.4f}")
        return lines

    def check(
        self, family: Optional[Type[Family]], species: Iterable[str], where: str, uq_model: Optional[str] = None
    ) -> None:
        """Raise `InputError` unless it is for predictions of this family, these species and this model.

        Parameters
        ----------
        family
            None for predictions without a distribution.
        species
            Chemical symbols.
        where : str
            Whose predictions, for the message.
        uq_model : str, optional
            Where it is known.
        """
        if family is None:
            raise InputError(f"{where}: has no predicted distribution that {self.path} could calibrate")
        if family.uq_family != self.uq_family:
            raise InputError(
                f"{self.path}: is for predictions of family '{self.uq_family}', but {where} has family "
                f"'{family.uq_family}'; fit one with e2ip calibrate to this model's predictions for validation frames"
            )
        self.check_model(uq_model, where)
        self.check_species(species, where)

    def check_model(self, uq_model: Optional[str], where: str) -> None:
        """Raise `InputError` for another model than it was fitted to, where both are known."""
        if None not in (uq_model, self.uq_model) and uq_model != self.uq_model:
            raise InputError(
                f"{self.path}: was fitted to predictions of another model ({self.uq_model}) than {where} has "
                f"({uq_model}); fit one with e2ip calibrate to this model's predictions for validation frames"
            )

    def doubt(self, uq_model: Optional[str], where: str) -> str:
        """What to say where predictions name their model and it does not know its own; empty otherwise."""
        if uq_model is None or self.uq_model is not None:
            return ""
        return (
            f"{self.path}: was fitted to predictions without {MODEL_KEY}, as those of an ensemble of stock models are, "
            f"and {where} has one ({uq_model}): is it for this model?"
        )

    def check_species(self, species: Iterable[str], where: str) -> None:
        """Raise `InputError` for species that it has no constants for."""
        unknown = sorted(set(map(str, species)) - set(self.species))
        if unknown:
            raise InputError(
                f"{self.path}: was fitted to {', '.join(self.species)} and knows nothing of {', '.join(unknown)}, "
                f"which {where} has; fit one with e2ip calibrate to validation frames that hold these species"
            )

    def check_frames(self, frames: Sequence[str], where: str) -> None:
        """Raise `InputError` if one of the ``frames`` (fingerprints) was fitted to."""
        shared = set(self.frames) & set(frames)
        if shared:
            raise InputError(
                f"{where}: {sum(frame in shared for frame in frames)} of its {len(frames)} frames are among those that "
                f"{self.path} was fitted to ({self.file}); judge a calibration on other frames"
            )

    def apply(self, family: Type[Family], parameters: Dict[str, Tensor], species: Iterable[str]) -> Dict[str, Tensor]:
        """The calibrated parameters of N atoms, in eV and Å; see `check` for what they may be of."""
        like = next(iter(parameters.values()))
        values = [self.factor[str(symbol)].value for symbol in species]
        factor = torch.tensor(values, dtype=like.dtype, device=like.device)
        return family.widen(parameters, factor, torch.full_like(factor, self.floor.value))

    def in_units(
        self, family: Type[Family], parameters: Dict[str, Tensor], force_factor: float, species: Iterable[str]
    ) -> Dict[str, Tensor]:
        """`Family.in_units` with this calibration: every output key, after forces became eV/Å by a unit factor."""
        own = {key.name: parameters[key.name] for key in family.parameter_keys}
        calibrated = self.apply(family, family.convert(own, force_factor), species)
        return {**calibrated, **family.derive(calibrated)}

    def apply_numpy(
        self, family: Type[Family], parameters: Dict[str, np.ndarray], species: Iterable[str]
    ) -> Dict[str, np.ndarray]:
        """`apply` of NumPy arrays, in float64."""
        tensors = {name: torch.as_tensor(values, dtype=torch.float64) for name, values in parameters.items()}
        return {name: values.numpy() for name, values in self.apply(family, tensors, species).items()}

    def write(self, path: Union[str, Path]) -> None:
        """As JSON; infinite radii and maxima become null."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "e2ip_version": __version__,
            "methods": list(self.methods),
            "uq_family": self.uq_family,
            MODEL_KEY: self.uq_model,
            "unit": UNIT,
            "factor": {symbol: _as_json(constant) for symbol, constant in self.factor.items()},
            "floor": _as_json(self.floor),
            "radii": _levels_as_json(self.radii),
            "configurations": self.configurations,
            "atoms": self.atoms,
            "scores": self.scores,
            "notes": self.notes,
            "frame_maxima": {
                key: {group: _levels_as_json(values) for group, values in groups.items()}
                for key, groups in self.frame_maxima.items()
            },
            "file": self.file,
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
            Missing and broken files, those of another version or unit, constants that mean nothing.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
            raise InputError(f"{path}: cannot be read as a calibration ({reason})") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise InputError(f"{path}: is no calibration; e2ip calibrate writes one")
        if content.get("version") != VERSION:
            raise InputError(
                f"{path}: is a calibration of version {content.get('version')}, this e2ip-plugins reads version "
                f"{VERSION}; fit it anew with e2ip calibrate"
            )
        if content.get("unit") != UNIT:
            raise InputError(f"{path}: is for forces in {content.get('unit')}, not in {UNIT}")
        try:
            found = cls._of(content, str(path))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise InputError(f"{path}: is damaged ({reason}); fit it anew with e2ip calibrate") from error
        return found

    @classmethod
    def _of(cls, content: Dict[str, Any], path: str) -> "Calibration":
        factor = {symbol: _of_json(given) for symbol, given in content["factor"].items()}
        floor = _of_json(content["floor"])
        if not factor or any(constant.value <= 0.0 for constant in factor.values()) or floor.value < 0.0:
            raise ValueError("factors must be positive, the floor not negative")
        radii = _levels_of_json(content["radii"])
        if not all(0.0 < level < 1.0 and radius >= 0.0 for level, radius in radii.items()):
            raise ValueError("conformal radii must not be negative, and their levels between 0 and 1")
        if [radii[level] for level in sorted(radii)] != sorted(radii.values()):
            raise ValueError("conformal radii must grow with their levels")
        if not isinstance(content["methods"], list):
            raise ValueError("methods must be a list")
        return cls(
            methods=tuple(content["methods"]),
            uq_family=str(content["uq_family"]),
            uq_model=content.get(MODEL_KEY),
            factor=factor,
            floor=floor,
            radii=radii,
            configurations=int(content["configurations"]),
            atoms=int(content["atoms"]),
            frames=tuple(content["frames"].split()),
            file=str(content["file"]),
            scores=content["scores"],
            notes=content["notes"],
            path=path,
            frame_maxima={
                str(key): {str(group): _levels_of_json(values) for group, values in groups.items()}
                for key, groups in content.get("frame_maxima", {}).items()
            },
        )


def _levels_as_json(values: Dict[float, float]) -> Dict[str, Optional[float]]:
    """By level; infinite values, of levels that the configurations are too few for, become null."""
    return {f"{level:.12g}": value if math.isfinite(value) else None for level, value in values.items()}


def _levels_of_json(given: Dict[str, Optional[float]]) -> Dict[float, float]:
    return {float(level): math.inf if value is None else _number(value) for level, value in given.items()}


def _as_json(constant: Constant) -> Dict[str, Any]:
    return {"value": constant.value, "interval95": list(constant.interval)}


def _of_json(given: Dict[str, Any]) -> Constant:
    value, (low, high) = _number(given["value"]), map(_number, given["interval95"])
    if low > high:
        raise ValueError("an interval must not end before it begins")
    return Constant(value, (low, high))


def _number(given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not math.isfinite(given):
        raise ValueError(f"{given!r} is no finite number")
    return float(given)
