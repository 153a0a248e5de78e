"""`Monitor`: watches the uncertainties of a run, and warns, collects frames or stops where they are too large."""

import math
import warnings
from collections import deque
from itertools import count
from pathlib import Path
from typing import Any, Callable, Deque, Dict, List, Mapping, Sequence, Tuple, Union

import numpy as np
from ase import Atoms

from e2ip_plugins.errors import InputError, UncertaintyWarning, plural
from e2ip_plugins.keys import CONFORMAL_EXTENT, ENERGY_PER_ATOM, ENERGY_UNCERTAINTY, LEVERAGE, PRINCIPAL_STD
from e2ip_plugins.md.frames import non_finite, with_results
from e2ip_plugins.md.heldout import HeldOut
from e2ip_plugins.md.mixtures import results_of
from e2ip_plugins.md.thresholds import WATCHED, Threshold, check_thresholds
from e2ip_plugins.predictions.columns import without_labels
from e2ip_plugins.predictions.trajectories import append_frame, check_end, check_output
from e2ip_plugins.scores.frame_maxima import principal_std

ACTIONS = ("warn", "collect", "stop")

#: Results from which what is watched follows, where these have another name.
SOURCES = {
    PRINCIPAL_STD.name: "forces_cov",
    CONFORMAL_EXTENT.name: "forces_cov",
    ENERGY_PER_ATOM.name: ENERGY_UNCERTAINTY.name,
}

#: What a model needs beside a readout.
_FITTED = {
    LEVERAGE.name: ", whose leverage has been fitted",
    ENERGY_PER_ATOM.name: ", whose uncertainties of energies have been fitted to validation energies",
}

Action = Union[str, Callable[[Atoms], Any]]


class MonitorStop(Exception):
    """Ends a run: exceptions of observers pass through every dynamics and optimiser of ASE.

    It is no `RuntimeError` or `ValueError`, which line searches of ASE take for failures of their own.

    Attributes
    ----------
    reason : str
        What is above its threshold or not finite.
    frame : ase.Atoms
        Last frame of the run, as it has been written.
    """

    def __init__(self, reason: str, frame: Atoms, path: Path) -> None:
        super().__init__(f"{reason}; the frame is in {path}")
        self.reason, self.frame = reason, frame


class Monitor:
    """Watch the uncertainties of a run: ``dyn.attach(monitor, interval=10)`` with any dynamics or optimiser of ASE.

    At every check the uncertainties of all atoms are compared with their thresholds. The first frame above them causes
    an `UncertaintyWarning`, and the next warning comes only after a frame without an atom above. ``action`` chooses
    what else is done at every check above. Positions, forces or uncertainties that are not finite numbers end the run,
    whatever the action: MACE and NequIP silently leave out an atom whose position is NaN.

    Parameters
    ----------
    atoms : ase.Atoms
        Atoms of the run, with their calculator. It is evaluated here; the first step of the run uses the results.
    thresholds : dict
        By name of an uncertainty (`WATCHED`): a number in its unit or a `Quantile`, for all atoms; or a dict of these
        by chemical symbol, with infinity for a species that is not to be watched.
    action : str, callable or sequence of them
        ``"warn"``: nothing but the warning. ``"collect"``: write the frame. ``"stop"``: write the frame and raise
        `MonitorStop`, without a warning. A function is called with the frame, a copy with what `with_results` adds.
    held_out : str or Path, optional
        File of quantiles and conformal radii, with which numbers are compared too; see `HeldOut.read`.
    level : float
        Level of the conformal region whose ``forces_conformal_extent`` is watched.
    window : int
        Checks over which the values of every atom are smoothed, by their median: it ignores one very large value
        (leverages have no bound), which a running mean would carry through all checks of the window. Nothing is above
        before there are as many checks: over fewer, one large value is half of a median.
    frames : str or Path
        extxyz file of collected frames, and of the last one of a run that was stopped. If another program or monitor
        has made the file before the first frame is written, a number is appended to its name.
    append : bool
        Whether the file may exist already, with complete frames.

    Attributes
    ----------
    thresholds : dict of (N,) arrays
        Thresholds in force; (1,) of ``energy_uncertainty_per_atom``, a number of the whole frame.
    values : dict of (N,) arrays
        Values of the last check, smoothed; (1,) likewise.
    notes : list of str
        Thresholds of ``Quantile()``, which nobody chose, and how many false alarms to expect.
    checks, excursions : int
        Number of checks, and of frames above a threshold that followed one that was not.

    Raises
    ------
    InputError
        Before the run: invalid names, species, thresholds and files; a calculator without the uncertainties; a
        leverage that was not fitted; another calibration or family than that of the held-out frames. During it: other
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
        if self.frames.suffix == ".traj":
            raise InputError(f"frames={self.frames}: what is written is extxyz; give it an ending such as .xyz")
        self._check_file()
        if not len(atoms):
            raise InputError("the structure has no atoms")
        if isinstance(window, bool) or not isinstance(window, (int, np.integer)) or window < 1:
            raise InputError(f"window={window}: a number of checks, at least 1")
        limits = check_thresholds(thresholds, atoms.symbols)
        levels = [level for limit in limits.values() for level in limit.levels]
        held = None if held_out is None else HeldOut.read(held_out, levels)
        if held is None and (levels or CONFORMAL_EXTENT.name in limits):
            raise InputError("quantiles and conformal regions come from held-out frames: give held_out, their file")
        self._radius = held.radius(level) if held and CONFORMAL_EXTENT.name in limits else math.nan
        self._names, self._numbers = tuple(limits), atoms.numbers.copy()
        first = self._first()
        if held is not None:
            held.check(results_of(atoms), limits)
            if levels:
                held.check_species(atoms.symbols)
        self.thresholds: Dict[str, np.ndarray] = {}
        for name, limit in limits.items():
            self.thresholds[name] = limit.resolve(held, self._radius, first[name], int(window))
        self.notes = [note for limit in limits.values() for note in limit.notes]
        self.values: Dict[str, np.ndarray] = {}
        self.checks = self.excursions = 0
        self._highest: Dict[str, Tuple[float, float]] = {}
        self._window: Deque[Dict[str, np.ndarray]] = deque(maxlen=int(window))
        self._above = False

    def __repr__(self) -> str:
        """Return thresholds, window and actions in a line."""
        texts = []
        for name, limits in self.thresholds.items():
            ends = dict.fromkeys((f"{limits.min():.4g}", f"{limits.max():.4g}"))
            texts.append(f"{name} > {' to '.join(ends)}{_unit(name)}")
        actions = ", ".join(action if isinstance(action, str) else "a function" for action in self.actions)
        return f"<Monitor: {'; '.join(texts)}; median of {plural(self._window.maxlen or 1, 'check')}; {actions}>"

    def __call__(self) -> None:
        """Check the atoms; ASE calls this."""
        if not np.array_equal(self.atoms.numbers, self._numbers):
            raise InputError("the number or the species of the atoms have changed: make a new Monitor")
        broken, values = self._read()
        if broken:
            self._stop(self._frame(broken))
        self._window.append(values)
        self.values = values if self._window.maxlen == 1 else self._medians()
        full = len(self._window) == self._window.maxlen
        if full:
            self._note_highest()
        reason = "; ".join(filter(None, map(self._excess, self._names))) if full else ""
        begins, self._above = bool(reason) and not self._above, bool(reason)
        self.excursions += begins
        if begins and "stop" not in self.actions:
            # The warning points to the line of ASE that calls its observers.
            warnings.warn(f"check {self.checks}: {reason}", UncertaintyWarning, stacklevel=2)
        if reason and self.actions != ["warn"]:
            self._act(self._frame(reason))
        self.checks += 1

    def summary(self) -> List[str]:
        """Return, for everything that is watched, the value that came closest to its threshold in the run so far."""
        filled = len(self._window) == self._window.maxlen
        lines = [] if filled else [f"no check was judged: the window takes {self._window.maxlen} checks"]
        for name, (value, limit) in self._highest.items():
            lines.append(f"{name}: at most {value:.4g}{_unit(name)}, threshold {limit:.4g}")
        return lines

    def _medians(self) -> Dict[str, np.ndarray]:
        return {name: np.median([past[name] for past in self._window], axis=0) for name in self._names}

    def _note_highest(self) -> None:
        for name in self._names:
            values, limits = self.values[name], self.thresholds[name]
            shares = np.divide(values, limits, out=np.zeros(len(values)), where=np.isfinite(limits) & (limits > 0.0))
            closest, former = int(np.argmax(shares)), self._highest.get(name)
            if former is None or shares[closest] > former[0] / former[1]:
                self._highest[name] = (float(values[closest]), float(limits[closest]))

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
        """Return what is not finite, if anything, and the present values by name."""
        atoms = self.atoms
        if not np.isfinite(atoms.cell[:]).all():
            return "the cell is not finite", {}
        problem = non_finite(atoms, "positions", atoms.positions)
        problem = problem or non_finite(atoms, "forces", atoms.get_forces(apply_constraint=False))
        values = {} if problem else {name: self._value(name) for name in self._names}
        problems = (problem, *(self._problem(name, numbers) for name, numbers in values.items()))
        return next(filter(None, problems), ""), values

    def _problem(self, name: str, values: np.ndarray) -> str:
        """Return a sentence on values that are NaN; infinity is a value, of a leverage for example."""
        if name == ENERGY_PER_ATOM.name:
            return f"{name} is not a number" if np.isnan(values).any() else ""
        return non_finite(self.atoms, name, values, infinite=True)

    def _value(self, name: str) -> np.ndarray:
        source = SOURCES.get(name, name)
        result = results_of(self.atoms).get(source)
        if result is None:
            fitted = _FITTED.get(name, "")
            needed = f"it needs a model with a readout of e2ip-plugins{fitted}; e2ip fit gives a stock model one"
            raise InputError(f"the calculator gives no {source}: {needed}")
        # A copy: the results are the calculator's.
        values = np.array(result, dtype=np.float64)
        if source == "forces_cov":
            return principal_std(values) * (self._radius if name == CONFORMAL_EXTENT.name else 1.0)
        if source == ENERGY_UNCERTAINTY.name:
            return values.reshape(1) / len(self.atoms)
        return values

    def _excess(self, name: str) -> str:
        """Return in words what is above its threshold; an empty string where nothing is."""
        values, limits = self.values[name], self.thresholds[name]
        above = values > limits
        if not above.any():
            return ""
        # argmax gives the first of several infinite values.
        worst = int(np.argmax(np.divide(values, limits, out=np.zeros(len(values)), where=above)))
        unit = _unit(name)
        smoothed = f", median of {len(self._window)} checks" if len(self._window) > 1 else ""
        if name == ENERGY_PER_ATOM.name:
            remark = f" ({smoothed[2:]})" if smoothed else ""
            return f"{name} is {values[0]:.4g}{unit}, threshold {limits[0]:.4g}{remark}"
        return (
            f"{name} of atom {worst} ({self.atoms.symbols[worst]}) is {values[worst]:.4g}{unit}, threshold "
            f"{limits[worst]:.4g} ({int(above.sum())} of {len(values)} atoms above{smoothed})"
        )

    def _frame(self, reason: str) -> Atoms:
        frame = without_labels(self.atoms)
        # Results do not belong to positions that are not finite.
        if np.isfinite(frame.positions).all() and np.isfinite(frame.cell[:]).all():
            frame.calc = self.atoms.calc
            frame = with_results(frame)
        frame.info["monitor_reason"], frame.info["monitor_check"] = reason, self.checks
        return frame

    def _first(self) -> Dict[str, np.ndarray]:
        """Return the values before the run; `InputError` where there are none."""
        if self.atoms.calc is None:
            raise InputError("the atoms have no calculator")
        broken, values = self._read()
        if broken:
            raise InputError(f"the first frame: {broken}")
        if (values.get(LEVERAGE.name, np.zeros(1)) < 0.0).any():
            raise InputError("the model's leverage has not been fitted (see e2ip fit): it cannot be watched")
        return values

    def _check_file(self) -> None:
        """Raise `InputError` for a file that no frames can be written to."""
        check_output(self.frames, "frames=", replace=self.append, permission="append=True")
        if self.frames.exists():
            check_end(self.frames, "frames=")

    def _write(self, frame: Atoms) -> None:
        if self.frames.exists() and not (self.append or self._written):
            # It may be another monitor's: neither does the run end for that, nor is its last frame lost.
            name = self.frames
            names = (name.with_name(f"{name.stem}-{number}{name.suffix}") for number in count(2))
            self.frames = next(path for path in names if not path.exists())
            text = f"frames={name}: another program has written it since; frames go into {self.frames}"
            warnings.warn(text, UncertaintyWarning, stacklevel=2)
        append_frame(self.frames, frame)
        self._written = True


def _unit(name: str) -> str:
    """Return the unit of something watched after a blank; empty for numbers without one."""
    return "" if WATCHED[name].unit == "1" else f" {WATCHED[name].unit}"


def _actions(action: Union[Action, Sequence[Action]]) -> List[Action]:
    actions: List[Action] = [action] if isinstance(action, str) or callable(action) else list(action)
    for name in actions:
        if not callable(name) and name not in ACTIONS:
            raise InputError(f"action={name!r}: choose from {', '.join(ACTIONS)}, or give a function of a frame")
    return actions or ["warn"]
