"""Thresholds of a `Monitor`: for all atoms or by species, as numbers or as quantiles of held-out frames."""

import math
import warnings
from dataclasses import dataclass
from numbers import Real
from typing import Any, Dict, Iterable, List, Mapping, Optional, Union

import numpy as np

from e2ip_plugins.errors import InputError, UncertaintyWarning
from e2ip_plugins.keys import CONFORMAL_EXTENT, ENERGY_PER_ATOM, FORCE_VIEWS, LEVERAGE, PRINCIPAL_STD, OutputKey
from e2ip_plugins.md.heldout import HeldOut
from e2ip_plugins.scores.frame_maxima import ALL_ATOMS

_EPISTEMIC_STD = next(key for key in FORCE_VIEWS if key.name == "forces_epistemic_std")

#: Uncertainties that a monitor can watch: scalars of an atom, and one of the frame, that do not change when a structure
#: is turned.
WATCHED: Dict[str, OutputKey] = {
    key.name: key for key in (_EPISTEMIC_STD, LEVERAGE, PRINCIPAL_STD, CONFORMAL_EXTENT, ENERGY_PER_ATOM)
}

#: A number is very likely in another unit if it is above the largest value of held-out frames or below their median by
#: the first factor, below all values of the first frame by the second, or above all of them by the third.
_FROM_HELD_OUT, _BELOW_FIRST, _ABOVE_FIRST = 10.0, 100.0, 300.0


#: Levels that are taken without a choice, and the least number of held-out frames for each, as docs/howto/thresholds.md
#: advises: 0.98 where the threshold is the tenth largest value or a lower one, else what the frames can tell at all.
ADVISED = {0.98: 499, 0.95: 19, 0.9: 9}


@dataclass(frozen=True)
class Quantile:
    """A threshold from held-out frames: a new frame of their kind exceeds it with a probability of at most 1 - level.

    It is a quantile of the largest uncertainty over all atoms of a frame or, where thresholds differ by species, over
    the atoms of the species; level 1 is the largest value of the held-out frames. See
    `e2ip_plugins.scores.frame_maxima`. ``Quantile()`` takes the level that is advised for the number of held-out
    frames: 0.98 from 499 on, 0.95 from 19 on, 0.9 from 9 on.
    """

    level: Optional[float] = None

    def __post_init__(self) -> None:
        if self.level is None:
            return
        if isinstance(self.level, bool) or not isinstance(self.level, Real) or not 0.0 < self.level <= 1.0:
            raise InputError(f"Quantile({self.level}): a level lies above 0 and is at most 1")


Threshold = Union[float, Quantile]


class Limits:
    """The thresholds of one uncertainty, checked; `resolve` makes numbers of them, and notes on those nobody chose.

    Parameters
    ----------
    name : str
        Key of `WATCHED`.
    thresholds : number, Quantile, or dict of them by chemical symbol
    symbols : list of N str

    Raises
    ------
    InputError
        Unknown names, species that are missing or that the structure lacks, numbers that are no thresholds.
    """

    def __init__(self, name: str, thresholds: Any, symbols: List[str]) -> None:
        if name not in WATCHED:
            raise InputError(f"{name!r} cannot be watched; choose from {watchable()}")
        self.name, by_species = name, isinstance(thresholds, Mapping)
        self.notes: List[str] = []
        self.values: Dict[str, Threshold] = dict(thresholds) if by_species else {ALL_ATOMS: thresholds}
        of_frame = name == ENERGY_PER_ATOM.name
        if of_frame and by_species:
            raise InputError(f"thresholds of {name}: it is a number of the whole frame; give one threshold for it")
        self.groups = symbols if by_species else [ALL_ATOMS] * (1 if of_frame else len(symbols))
        needed, known = set(self.groups), set(self.values)
        for species, text in ((known - needed, "are not in the structure"), (needed - known, "are missing")):
            if species:
                problem = f"the species {', '.join(sorted(map(str, species)))} {text}"
                raise InputError(f"thresholds of {name}: {problem}; give each a threshold, infinity for no watch")
        for value in self.values.values():
            if not isinstance(value, Quantile) and not _number(value) > 0.0:
                raise InputError(f"threshold {value!r} of {name}: a number above 0 ({_unit(name)}), or a Quantile")
        if all(_number(value) == math.inf for value in self.values.values()):
            raise InputError(f"thresholds of {name}: all are infinite, nothing would be watched")

    @property
    def levels(self) -> List[float]:
        """Levels that the thresholds which are quantiles may take."""
        levels: List[float] = []
        for value in self.values.values():
            if isinstance(value, Quantile):
                levels += ADVISED if value.level is None else [value.level]
        return levels

    def resolve(self, held_out: Optional[HeldOut], radius: float, first: np.ndarray, window: int = 1) -> np.ndarray:
        """Return the thresholds of the atoms (N,); warn of numbers that are hardly in the right unit.

        There is one (1,) for a number of the frame.

        Parameters
        ----------
        held_out : HeldOut, optional
            Needed for quantiles.
        radius : float
            Conformal radius, by which quantiles of `CONFORMAL_EXTENT` are multiplied.
        first : (N,) or (1,)
            Values of the first frame.
        window : int
            Checks over which values are smoothed, for the notes.

        Raises
        ------
        InputError
            Quantiles that the held-out frames cannot tell; values that are 0 for every atom.
        """
        factor = radius if self.name == CONFORMAL_EXTENT.name else 1.0
        numbers = {}
        for group, value in self.values.items():
            if isinstance(value, Quantile):
                assert held_out is not None
                level = self._advised(group, held_out) if value.level is None else value.level
                numbers[group] = factor * held_out.quantile(self.name, group, level)
                if value.level is None:
                    self._note(group, numbers[group], level, held_out, window)
                continue
            numbers[group] = float(value)
            table = held_out and (held_out.table(self.name, group) or held_out.table(self.name, ALL_ATOMS))
            if table and value < math.inf:
                self._compare_held_out(numbers[group], factor * table[0.5], factor * table[1.0])
        limits = np.array([numbers[group] for group in self.groups])
        if not first.any():
            problem = f"{self.name} is 0 for every atom: this model's readout has no such part"
            raise InputError(f"{problem}; watch another one of {watchable()}")
        by_user = np.array([not isinstance(self.values[group], Quantile) for group in self.groups])
        if (compared := by_user & np.isfinite(limits)).any():
            self._compare_first(first[compared] / limits[compared])
        return limits

    def _advised(self, group: str, held_out: HeldOut) -> float:
        """Return the level of a quantile that nobody chose."""
        table = held_out.table(self.name, group) or {}
        for level, needed in ADVISED.items():
            # Some frames may lack the species, or an uncertainty of their energy.
            if held_out.frames >= needed and math.isfinite(table.get(level, 0.0)):
                return level
        if held_out.frames >= min(ADVISED.values()):
            return min(ADVISED)  # the table says what is wrong
        raise InputError(
            f"{held_out.path}: has {held_out.frames} frames, and a threshold that nobody chose for {self.name} needs "
            f"{min(ADVISED.values())}: give more held-out frames, or a number"
        )

    def _note(self, group: str, number: float, level: float, held_out: HeldOut, window: int) -> None:
        of_group = "" if group == ALL_ATOMS else f" of {group}"
        unit = "" if WATCHED[self.name].unit == "1" else f" {WATCHED[self.name].unit}"
        smoothing = f"the window of {window} checks" if window > 1 else "a window"
        self.notes.append(
            f"{self.name}{of_group}: threshold {number:.4g}{unit}, the quantile {level:g} of {held_out.frames} "
            f"held-out frames; expect {100 * (1 - level):.3g} false alarms in 100 checks of frames like these, fewer "
            f"with {smoothing}"
        )

    def _compare_held_out(self, number: float, middle: float, largest: float) -> None:
        if not middle / _FROM_HELD_OUT <= number <= largest * _FROM_HELD_OUT:
            usual = f"the largest values of held-out frames, {middle:.3g} in the median and {largest:.3g} at most"
            self._doubt(f"{number:g} is far from {usual}")

    def _compare_first(self, ratio: np.ndarray) -> None:
        low, high = float(ratio.min()), max(float(ratio.max()), 1e-300)
        if low > _BELOW_FIRST:
            self._doubt(f"all values of the first frame are above it by a factor of {low:.2g} and more")
        if high < 1.0 / _ABOVE_FIRST:
            self._doubt(f"all values of the first frame are below it by a factor of {1.0 / high:.2g} and more")

    def _doubt(self, text: str) -> None:
        # The warning points to the line that makes the Monitor.
        warnings.warn(f"threshold of {self.name} ({_unit(self.name)}): {text}", UncertaintyWarning, stacklevel=5)


def check_thresholds(thresholds: Any, symbols: Iterable[str]) -> Dict[str, Limits]:
    """Return `Limits` by name of the thresholds of a `Monitor`; `InputError` for those that mean nothing."""
    if not isinstance(thresholds, Mapping) or not thresholds:
        raise InputError(f"thresholds: a dictionary from what is watched to its threshold; choose from {watchable()}")
    return {name: Limits(name, value, list(map(str, symbols))) for name, value in thresholds.items()}


def watchable() -> str:
    """Return the names and units of all that can be watched, for messages."""
    return ", ".join(f"{name} ({_unit(name)})" for name in WATCHED)


def _unit(name: str) -> str:
    return "no unit" if WATCHED[name].unit == "1" else WATCHED[name].unit


def _number(value: Any) -> float:
    """Return a threshold as a number, NaN if it is none."""
    try:
        return math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError):
        return math.nan
