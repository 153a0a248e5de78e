"""`Monitor`: watches the uncertainties of a run with ASE, and says, keeps or stops where they are too large."""

import math
import warnings
from collections import deque
from numbers import Integral
from pathlib import Path
from typing import Any, Callable, Deque, Dict, List, Mapping, Sequence, Tuple, Union

import numpy as np
from ase import Atoms

from e2ip_plugins.errors import InputError, UncertaintyWarning
from e2ip_plugins.keys import CONFORMAL_EXTENT, LEVERAGE, PRINCIPAL_STD
from e2ip_plugins.md.frames import with_results
from e2ip_plugins.md.heldout import HeldOut
from e2ip_plugins.md.thresholds import WATCHED, Threshold, parse
from e2ip_plugins.predictions.columns import without_labels
from e2ip_plugins.predictions.trajectories import append_frame, check_end
from e2ip_plugins.scores.frame_maxima import principal_std

ACTIONS = ("warn", "collect", "stop")

Action = Union[str, Callable[[Atoms], Any]]


class MonitorStop(Exception):
    """Ends a run: exceptions of observers pass through every dynamics and optimiser of ASE.

    Not a `RuntimeError` or `ValueError`: line searches of ASE take those for failures of their own.

    Attributes
    ----------
    reason : str
    frame : ase.Atoms
        The last one, as it has been written.
    """

    def __init__(self, reason: str, frame: Atoms, path: Path) -> None:
        super().__init__(f"{reason}; the frame is in {path}")
        self.reason, self.frame = reason, frame


class Monitor:
    """Attach it to any dynamics or optimiser of ASE: ``dyn.attach(monitor, interval=10)``.

    At every check the uncertainties of all atoms are compared with their thresholds. The first frame above them is a
    warning (`UncertaintyWarning`), and the next one only after a frame with no atom above; what else is done, and that
    at every check above, is chosen by ``action``. Positions, forces or uncertainties that are not numbers end the run,
    whatever the action: hosts leave an atom whose position is NaN out without a word.

    Parameters
    ----------
    atoms : ase.Atoms
        Of the run, with its calculator; evaluated here, which the first step of the run need not repeat.
    thresholds : dict
        By name of an uncertainty (`WATCHED`): a number in its unit or a `Quantile`, for all atoms; or such for every
        species of the structure by chemical symbol, infinity for a species that is not to be watched.
    action : str, callable or sequence of them
        ``"warn"``: no more than the warning; ``"collect"``: write the frame; ``"stop"``: write the frame and raise
        `MonitorStop`, without a warning; a function: called with the frame, a copy with what `with_results` adds.
    held_out : str or Path, optional
        Where quantiles and conformal radii come from and what numbers are compared with, see `HeldOut.read`.
    level : float
        Of the conformal region that ``forces_conformal_extent`` is of.
    window : int
        Checks over which the values of every atom are smoothed, by their median: a running mean would carry one very
        large value (leverages have no bound) through all checks of the window, a median ignores it. Nothing is above
        before there are as many checks: over fewer, one large value is half of a median.
    frames : str or Path
        extxyz file of collected frames, and of the last one of a run that was stopped. Where somebody else, such as
        another monitor, has written it by the time of the first one, a number is put behind its name.
    append : bool
        Whether that file may be there already, with whole frames.

    Attributes
    ----------
    thresholds : dict of (N,) arrays
        In force.
    values : dict of (N,) arrays
        Of the last check, smoothed.
    checks, excursions : int
        How often the monitor was called, and how often a frame above followed one that was not.

    Raises
    ------
    InputError
        Before the run: names, species, thresholds and files that do not go, a calculator without the uncertainties, a
        leverage that was not fitted, another calibration or family than that of the held-out frames. During it: other
        species than at the beginning.
    """

    def __init__(
        self,
        atoms: Atoms,
        thresholds: Mapping[str, Union[Threshold, Mapping[str, Threshold]]],
        *,
        action: Union[Action, Sequence[Action]] = "warn",
        held_out: Union[str, Path, None] = None,
        level: float = 0.9,
        window: int = 1,
        frames: Union[str, Path] = "monitor.xyz",
        append: bool = False,
    ) -> None:
        self.atoms, self.frames, self.append, self._written = atoms, Path(frames), append, False
        self.actions = _actions(action)
        self._check_file()
        if self.frames.exists():
            check_end(self.frames, "frames=")
        if not len(atoms):
            raise InputError("the structure has no atoms")
        whole: Any = window  # for type checkers, to which no int is an Integral
        if isinstance(whole, bool) or not isinstance(whole, Integral) or window < 1:
            raise InputError(f"window={window}: a number of checks, at least 1")
        limits = parse(thresholds, atoms.symbols)
        levels = [p for limit in limits.values() for p in limit.quantiles]
        held = None if held_out is None else HeldOut.read(held_out, levels)
        if held is None and (levels or CONFORMAL_EXTENT.name in limits):
            raise InputError(
                "quantiles and conformal regions come from held-out frames: give held_out, a file of e2ip calibrate or "
                "predictions for such frames"
            )
        self._radius = held.radius(level) if held and CONFORMAL_EXTENT.name in limits else math.nan
        self._names, self._numbers = tuple(limits), atoms.numbers.copy()
        first = self._first()
        if held is not None:
            held.check(atoms.calc.results, limits)
            if levels:
                held.check_species(atoms.symbols)
        self.thresholds: Dict[str, np.ndarray] = {}
        for name, limit in limits.items():
            self.thresholds[name] = limit.resolve(held, self._radius, first[name])
        self.values: Dict[str, np.ndarray] = {}
        self.checks = self.excursions = 0
        self._window: Deque[Dict[str, np.ndarray]] = deque(maxlen=int(window))
        self._above = False

    def __call__(self) -> None:
        """One check; ASE calls it."""
        if not np.array_equal(self.atoms.numbers, self._numbers):
            raise InputError("the number or the species of the atoms have changed: make a new Monitor")
        broken, values = self._read()
        if broken:
            self._stop(self._frame(broken))
        self._window.append(values)
        self.values = {name: np.median([past[name] for past in self._window], axis=0) for name in self._names}
        full = len(self._window) == self._window.maxlen
        reason = "; ".join(filter(None, map(self._excess, self._names))) if full else ""
        begins, self._above = bool(reason) and not self._above, bool(reason)
        self.excursions += begins
        if begins and "stop" not in self.actions:
            # Where ASE calls its observers.
            warnings.warn(f"check {self.checks}: {reason}", UncertaintyWarning, stacklevel=2)
        if reason and self.actions != ["warn"]:
            self._act(self._frame(reason))
        self.checks += 1

    def _act(self, frame: Atoms) -> None:
        for action in self.actions:
            if callable(action):
                action(frame)
        if "stop" in self.actions:
            self._stop(frame)
        if "collect" in self.actions:
            self._write(frame)

    def _stop(self, frame: Atoms) -> None:
        self._write(frame)
        text = f"check {self.checks}: {frame.info['monitor_reason']}"
        self.checks += 1
        raise MonitorStop(text, frame, self.frames)

    def _read(self) -> Tuple[str, Dict[str, np.ndarray]]:
        """What is broken, if anything, and the values of now."""
        atoms = self.atoms
        if not np.isfinite(atoms.cell[:]).all():
            return "the cell is not finite", {}
        if not np.isfinite(atoms.positions).all():
            return self._not_finite("positions", np.isfinite(atoms.positions)), {}
        forces = atoms.get_forces(apply_constraint=False)
        if not np.isfinite(forces).all():
            return self._not_finite("forces", np.isfinite(forces)), {}
        values = {name: self._value(name) for name in self._names}
        for name, numbers in values.items():
            # Infinity is a value, of a leverage for example.
            if np.isnan(numbers).any():
                return self._not_finite(name, ~np.isnan(numbers)), {}
        return "", values

    def _not_finite(self, what: str, fine: np.ndarray) -> str:
        bad = ~fine.reshape(len(self.atoms), -1).all(-1)
        at = int(np.argmax(bad))
        return f"{what} of {int(bad.sum())} atoms are not finite, first of atom {at} ({self.atoms.symbols[at]})"

    def _value(self, name: str) -> np.ndarray:
        source = "forces_cov" if name in (PRINCIPAL_STD.name, CONFORMAL_EXTENT.name) else name
        found = self.atoms.calc.results.get(source)
        if found is None:
            unfitted = ", whose leverage has been fitted" if name == LEVERAGE.name else ""
            raise InputError(
                f"the calculator gives no {source}: it needs a model with a readout of e2ip-plugins{unfitted}; e2ip "
                "fit gives a stock model one"
            )
        values = np.asarray(found, dtype=np.float64)
        if source == "forces_cov":
            return principal_std(values) * (self._radius if name == CONFORMAL_EXTENT.name else 1.0)
        return values

    def _excess(self, name: str) -> str:
        """What is above its threshold, in words; an empty string where nothing is."""
        values, limits = self.values[name], self.thresholds[name]
        above = values > limits
        if not above.any():
            return ""
        # Of several infinite ones, the first.
        worst = int(np.argmax(np.divide(values, limits, out=np.zeros(len(values)), where=above)))
        unit = "" if WATCHED[name].unit == "1" else f" {WATCHED[name].unit}"
        smoothed = f", median of {len(self._window)} checks" if len(self._window) > 1 else ""
        return (
            f"{name} of atom {worst} ({self.atoms.symbols[worst]}) is {values[worst]:.4g}{unit}, threshold "
            f"{limits[worst]:.4g} ({int(above.sum())} of {len(values)} atoms above{smoothed})"
        )

    def _frame(self, reason: str) -> Atoms:
        frame = without_labels(self.atoms)
        # The results are not of positions that are not finite.
        if np.isfinite(frame.positions).all() and np.isfinite(frame.cell[:]).all():
            frame.calc = self.atoms.calc
            frame = with_results(frame)
        frame.info["monitor_reason"], frame.info["monitor_check"] = reason, self.checks
        return frame

    def _first(self) -> Dict[str, np.ndarray]:
        """Values before the run, or the reason why there can be none."""
        if self.atoms.calc is None:
            raise InputError("the atoms have no calculator")
        broken, values = self._read()
        if broken:
            raise InputError(f"the first frame: {broken}")
        if (values.get(LEVERAGE.name, np.zeros(1)) < 0.0).any():
            raise InputError("the model's leverage has not been fitted (see e2ip fit): it cannot be watched")
        return values

    def _check_file(self) -> None:
        if self.frames.is_dir() or not self.frames.parent.is_dir():
            raise InputError(f"frames={self.frames}: is a folder, or its folder does not exist")
        if self.frames.suffix == ".traj":
            raise InputError(f"frames={self.frames}: what is written is extxyz; give it an ending such as .xyz")
        if self.frames.exists() and not (self.append or self._written):
            raise InputError(f"frames={self.frames}: is there already; choose another name, or append=True")

    def _write(self, frame: Atoms) -> None:
        if self.frames.exists() and not (self.append or self._written):
            # Another monitor's, perhaps: the run does not end for it, nor is what it is to end with lost.
            given, number = self.frames, 2
            while self.frames.exists():
                self.frames, number = given.with_name(f"{given.stem}-{number}{given.suffix}"), number + 1
            text = (
                f"frames={given}: somebody else has written it since the monitor was made; frames go into {self.frames}"
            )
            warnings.warn(text, UncertaintyWarning, stacklevel=2)
        self._check_file()
        append_frame(self.frames, frame)
        self._written = True


def _actions(given: Union[Action, Sequence[Action]]) -> List[Action]:
    actions: List[Action] = [given] if isinstance(given, str) or callable(given) else list(given)
    for action in actions:
        if not callable(action) and action not in ACTIONS:
            raise InputError(f"action={action!r}: choose from {', '.join(ACTIONS)}, or give a function of a frame")
    return actions or ["warn"]
