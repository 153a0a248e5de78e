"""``e2ip md``: a run with ASE's dynamics, watched by a `Monitor`, whose frames keep their uncertainties."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, List, Optional, Tuple

import numpy as np
from ase import Atoms

from e2ip_plugins.errors import InputError, UncertaintyWarning, plural
from e2ip_plugins.md.dynamics import RunOptions, draw_velocities, make_dynamics
from e2ip_plugins.md.frames import evaluate_first, non_finite, with_results
from e2ip_plugins.md.mixtures import results_of
from e2ip_plugins.md.monitor import MonitorStop
from e2ip_plugins.md.watch import Watch
from e2ip_plugins.predictions.checks import check_structure
from e2ip_plugins.predictions.trajectories import append_frame, check_output

#: Info that this package's tools write into frames. It is not true of the frames of a run that begins with one.
_OF_ANOTHER = ("md_step", "md_temperature", "lammps_step", "input_frame", "label_method")
_PREFIXES = ("monitor_", "select_")


@dataclass(frozen=True)
class Outcome:
    """Result of a run.

    Attributes
    ----------
    steps : int
        Steps that were run.
    frames : int
        Frames that were written.
    checks, alarms : int
        Checks of the monitor, and checks above a threshold after one that was not.
    stopped : str
        Why the run ended early; empty if it did not.
    interrupted : bool
        Whether the run was stopped from the keyboard.
    watched : tuple of str
        The largest value of everything that the monitor watches, with its threshold.
    """

    steps: int
    frames: int
    checks: int
    alarms: int
    stopped: str
    interrupted: bool = False
    watched: Tuple[str, ...] = ()

    def lines(self) -> List[str]:
        """Return the result in words."""
        lines = [f"{plural(self.steps, 'step')}, {plural(self.frames, 'frame')} written"]
        if self.checks:
            lines.append(f"monitor: {plural(self.alarms, 'alarm')} in {plural(self.checks, 'check')}")
            lines += [f"monitor: {text}" for text in self.watched]
        if self.stopped:
            lines.append(f"stopped: {self.stopped}")
        return lines


class _NotFinite(Exception):
    """Ends a run that no monitor watches."""


class _Frames:
    """Observer of a run: marks the atoms with the step, and writes frames."""

    def __init__(self, dynamics: Any, options: RunOptions, output: Path) -> None:
        self.dynamics, self.options, self.output = dynamics, options, output
        self.steps: List[int] = []
        dynamics.attach(self.mark)
        dynamics.attach(self.write, interval=options.interval)

    def mark(self) -> None:
        info, step = self.dynamics.atoms.info, self.dynamics.nsteps
        info["md_step"] = step
        if not self.options.without_temperature:
            info["md_temperature"] = self.options.temperature_at(step)

    def write(self) -> None:
        atoms, step = self.dynamics.atoms, self.dynamics.nsteps
        problem = non_finite(atoms, "positions", atoms.positions)
        problem = problem or non_finite(atoms, "forces", atoms.get_forces(apply_constraint=False))
        if problem:
            # A monitor says the same, but may look at fewer steps.
            raise _NotFinite(f"{problem}, at step {step}")
        append_frame(self.output, with_results(atoms))
        self.steps.append(step)


def run(
    atoms: Atoms, options: RunOptions, output: Path, watch: Optional[Watch] = None, where: str = "the structure"
) -> Outcome:
    """Run a structure and write its frames, with all uncertainties that its calculator has.

    Parameters
    ----------
    atoms : ase.Atoms
        Structure with its calculator; its atoms are moved.
    options : RunOptions
    output : Path
        New extxyz file. Its frames, and those that the monitor writes, have ``md_step`` and ``md_temperature``, the
        temperature in K of the thermostat or, with ``nve``, of the velocities drawn. The file has whole frames only,
        also where Ctrl-C ends the run.
    watch : Watch, optional
        Thresholds. Without it, only positions and forces that are not finite end the run.
    where : str
        File and frame that the structure comes from, for messages.

    Raises
    ------
    InputError
        Before the run: what `e2ip_plugins.predictions.checks.check_structure` and `Monitor` refuse. During it: a full
        disk.
    """
    check_structure(atoms, where)
    check_output(output)
    if options.keep_velocities and not atoms.has("momenta"):
        raise InputError(f"--keep-velocities: {where} has none (momenta)")
    for name in [name for name in atoms.info if name in _OF_ANOTHER or str(name).startswith(_PREFIXES)]:
        del atoms.info[name]
    evaluate_first(atoms, where)
    if "forces_cov" not in results_of(atoms):
        text = "the model has no readout: frames are written without uncertainties (e2ip fit gives it one)"
        warnings.warn(text, UncertaintyWarning, stacklevel=2)
    rng = np.random.default_rng(options.seed)
    if not options.keep_velocities:
        draw_velocities(atoms, options, rng)
    dynamics = make_dynamics(atoms, options, rng)
    frames = _Frames(dynamics, options, output)
    monitor = None if watch is None else watch.attach(dynamics, atoms)
    stopped, interrupted = _run(dynamics, options.steps, frames)
    checks, alarms = (0, 0) if monitor is None else (monitor.checks, monitor.excursions)
    watched = () if monitor is None else tuple(monitor.summary())
    return Outcome(dynamics.nsteps, len(frames.steps), checks, alarms, stopped, interrupted, watched)


def _run(dynamics: Any, steps: int, frames: _Frames) -> Tuple[str, bool]:
    """Run the steps; return why the run ended early, if it did, and whether the user ended it."""
    try:
        dynamics.run(steps)
        if frames.steps[-1] != dynamics.nsteps:
            frames.write()  # another run may begin there
    except KeyboardInterrupt:
        return f"interrupted at step {dynamics.nsteps}", True
    except (MonitorStop, _NotFinite) as end:
        return str(end), False
    except OSError as error:
        if error.filename is None:  # no full disk
            raise
        problem = f"cannot be written at step {dynamics.nsteps} ({error.strerror})"
        kept = f"{plural(len(frames.steps), 'whole frame')} of the run: {frames.output}"
        raise InputError(f"{error.filename}: {problem}; {kept}") from error
    except InputError:
        # The calculators of MACE and NequIP refuse positions that are not finite.
        if np.isfinite(dynamics.atoms.positions).all():
            raise
        return f"positions are not finite at step {dynamics.nsteps}", False
    return "", False
