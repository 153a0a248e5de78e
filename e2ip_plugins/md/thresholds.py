"""What a `Monitor` can watch, and thresholds: for all atoms or by species, numbers or quantiles of held-out frames."""

import math
import warnings
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Optional, Union

import numpy as np

from e2ip_plugins.errors import InputError, UncertaintyWarning
from e2ip_plugins.keys import CONFORMAL_EXTENT, FORCE_VIEWS, LEVERAGE, PRINCIPAL_STD, OutputKey
from e2ip_plugins.md.heldout import HeldOut
from e2ip_plugins.scores.frame_maxima import ALL_ATOMS

_EPISTEMIC_STD = next(key for key in FORCE_VIEWS if key.name == "forces_epistemic_std")

#: Scalars of an atom that do not change when a structure is turned.
WATCHED: Dict[str, OutputKey] = {key.name: key for key in (_EPISTEMIC_STD, LEVERAGE, PRINCIPAL_STD, CONFORMAL_EXTENT)}

#: Numbers that are by this factor above the largest value of held-out frames or below their median, or below or above
#: all values of the first frame: very likely in another unit.
FROM_HELD_OUT, BELOW_FIRST, ABOVE_FIRST = 10.0, 100.0, 300.0


@dataclass(frozen=True)
class Quantile:
    """A threshold that held-out frames set: a new frame of their kind is above with a probability of at most 1 - level.

    That is for the largest uncertainty over all atoms of a frame or, where thresholds are given by species, over those
    of the species; 1 is the largest that the held-out frames have. See `e2ip_plugins.scores.frame_maxima`.
    """

    level: float

    def __post_init__(self) -> None:
        if isinstance(self.level, bool) or not isinstance(self.level, Real) or not 0.0 < self.level <= 1.0:
            raise InputError(f"Quantile({self.level}): a level lies above 0 and is at most 1")


Threshold = Union[float, Quantile]


class Limits:
    """The thresholds of one uncertainty, checked as they were given; `resolve` makes numbers of them.

    Parameters
    ----------
    name : str
        Of `WATCHED`.
    given : number, Quantile, or dict of them by chemical symbol
    symbols : list of N str

    Raises
    ------
    InputError
        Unknown names, species that the structure has not or that are missing, numbers that are no thresholds.
    """

    def __init__(self, name: str, given: Any, symbols: List[str]) -> None:
        if name not in WATCHED:
            raise InputError(f"{name!r} cannot be watched; choose from {listed()}")
        self.name, by_species = name, isinstance(given, Mapping)
        self.values: Dict[str, Threshold] = dict(given) if by_species else {ALL_ATOMS: given}
        self.groups = symbols if by_species else [ALL_ATOMS] * len(symbols)
        there, have = set(self.groups), set(self.values)
        for wrong, text in ((have - there, "are not in the structure"), (there - have, "are missing")):
            if wrong:
                raise InputError(
                    f"thresholds of {name}: the species {', '.join(sorted(map(str, wrong)))} {text}; give one for each "
                    "species of the structure, infinity for those that are not to be watched"
                )
        for value in self.values.values():
            if not isinstance(value, Quantile) and not _number(value) > 0.0:
                raise InputError(f"threshold {value!r} of {name}: a number above 0 ({_unit(name)}), or a Quantile")
        if all(_number(value) == math.inf for value in self.values.values()):
            raise InputError(f"thresholds of {name}: all are infinite, nothing would be watched")

    @property
    def quantiles(self) -> List[float]:
        """Levels of those given as quantiles."""
        return [value.level for value in self.values.values() if isinstance(value, Quantile)]

    def resolve(self, held_out: Optional[HeldOut], radius: float, first: np.ndarray) -> np.ndarray:
        """Thresholds of the atoms (N,); an `UncertaintyWarning` for numbers that are hardly in the right unit.

        Parameters
        ----------
        held_out : HeldOut, optional
            Needed for quantiles.
        radius : float
            Conformal radius; for `CONFORMAL_EXTENT`.
        first : (N,)
            Values of the first frame.
        """
        factor = radius if self.name == CONFORMAL_EXTENT.name else 1.0
        numbers = {}
        for group, value in self.values.items():
            if not isinstance(value, Quantile):
                numbers[group] = float(value)
                found = held_out and (held_out.table(self.name, group) or held_out.table(self.name, ALL_ATOMS))
                if found:
                    self._compare(numbers[group], factor * found[0.5], factor * found[1.0])
                continue
            assert held_out is not None
            numbers[group] = factor * held_out.quantile(self.name, group, value.level)
        of_numbers = np.array([not isinstance(self.values[g], Quantile) and numbers[g] < math.inf for g in self.groups])
        limits = np.array([numbers[group] for group in self.groups])
        if not first.any():
            raise InputError(
                f"{self.name} is 0 for every atom: this model's readout has no such part, and no threshold on it is "
                f"ever exceeded; watch another one of {listed()}"
            )
        if of_numbers.any():
            self._compare_first(first[of_numbers] / limits[of_numbers])
        return limits

    def _compare(self, number: float, middle: float, largest: float) -> None:
        if number < math.inf and not middle / FROM_HELD_OUT <= number <= largest * FROM_HELD_OUT:
            self._doubt(
                f"{number:g} is far from the largest values of held-out frames, {middle:.3g} in the median and "
                f"{largest:.3g} at most"
            )

    def _compare_first(self, ratio: np.ndarray) -> None:
        low, high = float(ratio.min()), max(float(ratio.max()), 1e-300)
        if low > BELOW_FIRST:
            self._doubt(f"all values of the first frame are above it by a factor of {low:.2g} and more")
        if high < 1.0 / ABOVE_FIRST:
            self._doubt(f"all values of the first frame are below it by a factor of {1.0 / high:.2g} and more")

    def _doubt(self, text: str) -> None:
        # Where the Monitor is made.
        warnings.warn(f"threshold of {self.name} ({_unit(self.name)}): {text}", UncertaintyWarning, stacklevel=5)


def parse(thresholds: Any, symbols: Iterable[str]) -> Dict[str, Limits]:
    """`Limits` by name, from what a `Monitor` is given."""
    if not isinstance(thresholds, Mapping) or not thresholds:
        raise InputError(f"thresholds: a dictionary from what is watched to its threshold; choose from {listed()}")
    return {name: Limits(name, given, list(map(str, symbols))) for name, given in thresholds.items()}


def listed() -> str:
    """What can be watched, for messages."""
    return ", ".join(f"{name} ({_unit(name)})" for name in WATCHED)


def _unit(name: str) -> str:
    return "no unit" if WATCHED[name].unit == "1" else WATCHED[name].unit


def _number(value: Any) -> float:
    """NaN for what is none."""
    try:
        return math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError):
        return math.nan


def parse_watch(given: Iterable[str], held_out: Optional[Path]) -> Dict[str, Union[float, Quantile]]:
    """Thresholds of ``--watch``: ``NAME=NUMBER`` or, a quantile of the held-out frames, ``NAME=q0.99``."""
    found: Dict[str, Union[float, Quantile]] = {}
    for text in given:
        name, _, value = text.partition("=")
        if name.strip() in found:
            raise InputError(f"--watch {text}: {name.strip()} has a threshold already; give one for each")
        if value and name.strip() not in WATCHED:
            raise InputError(f"--watch {text}: {name.strip()!r} cannot be watched; choose from {listed()}")
        try:
            found[name.strip()] = Quantile(float(value[1:])) if value.startswith("q") else float(value)
        except ValueError as error:
            if isinstance(error, InputError):
                raise InputError(f"--watch {text}: {error}") from error
            raise InputError(
                f"--watch {text}: a name and a number or quantile, for example e2ip_leverage=q0.99 or "
                "forces_epistemic_std=0.5"
            ) from error
    if held_out is None and any(isinstance(t, Quantile) or n == CONFORMAL_EXTENT.name for n, t in found.items()):
        raise InputError("--watch: quantiles and conformal regions come from held-out frames; give --held-out")
    return found
