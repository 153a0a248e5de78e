"""``e2ip md``: a run with ASE's own dynamics, watched by a `Monitor`, whose frames keep their uncertainties."""

import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Union

import numpy as np
from ase import Atoms, units

from e2ip_plugins.errors import InputError, UncertaintyWarning
from e2ip_plugins.md.frames import evaluate_first, with_results
from e2ip_plugins.md.monitor import Monitor, MonitorStop
from e2ip_plugins.predictions.checks import check_structure
from e2ip_plugins.predictions.trajectories import append_frame, check_is_new

THERMOSTATS = ("nve", "langevin", "bussi")

#: What this package's tools write into the info of a frame that a run may begin with, and is not true of others.
_OF_ANOTHER = ("md_step", "md_temperature", "lammps_step", "input_frame", "label_method")
_PREFIXES = ("monitor_", "select_")

#: Momenta that cancel to this fraction are zero: files have eight decimals.
_AT_REST = 1e-4


@dataclass(frozen=True)
class Settings:
    """Of a run.

    Attributes
    ----------
    steps : int
    temperature : float
        At the start, in K; of velocities, too.
    final_temperature : float, optional
        At the end, reached linearly; default: that at the start.
    timestep : float
        In fs.
    thermostat : str
        Of `THERMOSTATS`; ``nve`` keeps the energy.
    friction : float
        Of ``langevin``, in 1/fs.
    time_constant : float
        Of ``bussi``, in fs.
    seed : int
        Of velocities and thermostat.
    interval : int
        Steps between frames that are written; the last one always is.
    check_interval : int
        Steps between two checks of the monitor.
    keep_velocities : bool
        Whether the run begins with those of the structure.
    """

    steps: int
    temperature: float = 300.0
    final_temperature: Optional[float] = None
    timestep: float = 0.5
    thermostat: str = "langevin"
    friction: float = 0.01
    time_constant: float = 100.0
    seed: int = 0
    interval: int = 10
    check_interval: int = 10
    keep_velocities: bool = False

    def __post_init__(self) -> None:
        if self.thermostat not in THERMOSTATS:
            raise InputError(f"--thermostat {self.thermostat}: choose from {', '.join(THERMOSTATS)}")
        positive: Dict[str, Any] = {
            "--steps": self.steps,
            "--timestep": self.timestep,
            "--friction": self.friction,
            "--time-constant": self.time_constant,
            "--interval": self.interval,
            "--check-interval": self.check_interval,
            "--temperature": self.temperature,
        }
        if self.final_temperature is not None:
            positive["--temperature (its end)"] = self.final_temperature
        for name, value in positive.items():
            if not (math.isfinite(value) and value > 0):
                raise InputError(f"{name} {value}: a number above 0")
        if self.seed < 0:
            raise InputError(f"--seed {self.seed}: 0 or more")
        if self.thermostat == "nve" and self.final_temperature is not None:
            raise InputError("--temperature: a ramp needs a thermostat, and nve has none")

    @property
    def without_temperature(self) -> bool:
        """Whether the run has the structure's own velocities and no thermostat."""
        return self.thermostat == "nve" and self.keep_velocities

    def temperature_at(self, step: int) -> float:
        """Of the thermostat, in K."""
        end = self.temperature if self.final_temperature is None else self.final_temperature
        return self.temperature + (end - self.temperature) * min(step, self.steps) / self.steps


@dataclass(frozen=True)
class Watch:
    """What a monitor is to do; see `Monitor`."""

    thresholds: Dict[str, Any]
    action: Union[str, Sequence[str]] = "stop"
    held_out: Optional[Path] = None
    level: float = 0.9
    window: int = 1
    frames: Path = Path("monitor.xyz")


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Attributes
    ----------
    steps : int
        That were run.
    frames : int
        That were written.
    checks, alarms : int
        Of the monitor: alarms are checks above after one that was not.
    stopped : str
        Why the run ended early; empty if it did not.
    interrupted : bool
        Whether it was stopped from the keyboard.
    """

    steps: int
    frames: int
    checks: int
    alarms: int
    stopped: str
    interrupted: bool = False

    def lines(self) -> List[str]:
        """In words."""
        lines = [f"{_counted(self.steps, 'step')}, {_counted(self.frames, 'frame')} written"]
        if self.checks:
            lines.append(f"monitor: {_counted(self.alarms, 'alarm')} in {_counted(self.checks, 'check')}")
        if self.stopped:
            lines.append(f"stopped: {self.stopped}")
        return lines


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


class _Broken(Exception):
    """Ends a run that no monitor watches."""


def run(
    atoms: Atoms, settings: Settings, output: Path, watch: Optional[Watch] = None, where: str = "the structure"
) -> Outcome:
    """Run a structure and write its frames, with all uncertainties that its calculator has.

    Parameters
    ----------
    atoms : ase.Atoms
        With its calculator; moved.
    settings : Settings
    output : Path
        extxyz file, which must not be there. Frames, and those that the monitor writes, have ``md_step`` and
        ``md_temperature``, that of the thermostat, or of the velocities drawn for ``nve``, in K. Whole frames alone,
        also where Ctrl-C ends the run.
    watch : Watch, optional
        Without it, only positions and forces that are no numbers end the run.
    where : str
        Where the structure comes from, for messages.

    Raises
    ------
    InputError
        Before the run, what `e2ip_plugins.predictions.checks.check_structure` and `Monitor` refuse; during it, a full
        disk.
    """
    check_structure(atoms, where)
    check_is_new(output)
    if settings.keep_velocities and not atoms.has("momenta"):
        raise InputError(f"--keep-velocities: {where} has none (momenta)")
    for name in [name for name in atoms.info if name in _OF_ANOTHER or str(name).startswith(_PREFIXES)]:
        del atoms.info[name]
    _try(atoms, where)
    rng = np.random.default_rng(settings.seed)
    if not settings.keep_velocities:
        _draw_velocities(atoms, settings, rng)
    dynamics = _dynamics(atoms, settings, rng)
    written: List[int] = []  # steps

    def mark() -> None:
        atoms.info["md_step"] = dynamics.nsteps
        if not settings.without_temperature:
            atoms.info["md_temperature"] = settings.temperature_at(dynamics.nsteps)

    def write() -> None:
        if not (np.isfinite(atoms.positions).all() and np.isfinite(atoms.get_forces(apply_constraint=False)).all()):
            # A monitor says more; it may look at fewer steps.
            raise _Broken(f"positions or forces are not finite at step {dynamics.nsteps}")
        append_frame(output, with_results(atoms))
        written.append(dynamics.nsteps)

    if settings.final_temperature is not None:
        dynamics.attach(lambda: _heat(dynamics, settings))
    dynamics.attach(mark)
    dynamics.attach(write, interval=settings.interval)
    monitor = None
    if watch is not None:
        monitor = Monitor(
            atoms,
            watch.thresholds,
            action=watch.action,
            held_out=watch.held_out,
            level=watch.level,
            window=watch.window,
            frames=watch.frames,
        )
        dynamics.attach(monitor, interval=settings.check_interval)
    stopped, interrupted = "", False
    try:
        dynamics.run(settings.steps)
        if written[-1] != dynamics.nsteps:
            write()  # another run may begin there
    except KeyboardInterrupt:
        stopped, interrupted = f"interrupted at step {dynamics.nsteps}", True
    except (MonitorStop, _Broken) as end:
        stopped = str(end)
    except OSError as error:
        # Of a file: a full disk.
        if error.filename is None:
            raise
        raise InputError(
            f"{error.filename}: cannot be written at step {dynamics.nsteps} ({error.strerror}); "
            f"{_counted(len(written), 'whole frame')} of the run: {output}"
        ) from error
    except InputError:
        # Calculators refuse positions that are no numbers.
        if np.isfinite(atoms.positions).all():
            raise
        stopped = f"positions are not finite at step {dynamics.nsteps}"
    checks, alarms = (0, 0) if monitor is None else (monitor.checks, monitor.excursions)
    return Outcome(dynamics.nsteps, len(written), checks, alarms, stopped, interrupted)


def parse_temperature(text: str) -> "tuple[float, Optional[float]]":
    """Start and end of ``300`` or ``300:1500``, in K."""
    first, sign, last = text.partition(":")
    try:
        return float(first), float(last) if sign else None
    except ValueError as error:
        raise InputError(f"--temperature {text}: a number in K, or a ramp, for example 300:1500") from error


def _try(atoms: Atoms, where: str) -> None:
    """Evaluate the first frame; the run's first step shares it."""
    evaluate_first(atoms, where)
    if "forces_cov" not in atoms.calc.results:
        text = "the model has no readout: frames are written without uncertainties (e2ip fit gives it one)"
        warnings.warn(text, UncertaintyWarning, stacklevel=3)


def _draw_velocities(atoms: Atoms, settings: Settings, rng: np.random.Generator) -> None:
    from ase.md import velocitydistribution as of

    # ASE 3.29 has it under a new name, and warns of the old one.
    draw = getattr(of, "thermalize_momenta", None) or of.MaxwellBoltzmannDistribution
    draw(atoms, temperature_K=settings.temperature, rng=rng)
    if settings.thermostat != "langevin" and len(atoms) > 1 and not atoms.constraints:
        # What is taken away is not put into the other modes: they would be hotter than they are to be.
        of.Stationary(atoms, preserve_temperature=False)
        if not atoms.pbc.any():
            of.ZeroRotation(atoms, preserve_temperature=False)


def moving_modes(atoms: Atoms) -> int:
    """Degrees of freedom that a thermostat which only rescales velocities heats.

    Momentum and, without periodicity, angular momentum are conserved: where they are zero, as in a molecule at rest,
    five or six modes never move. ASE counts them.
    """
    modes = int(atoms.get_number_of_degrees_of_freedom())
    if atoms.constraints:
        return modes
    momenta = atoms.get_momenta()
    if np.linalg.norm(momenta.sum(0)) <= _AT_REST * np.linalg.norm(momenta, axis=1).sum():
        modes -= 3
    if not atoms.pbc.any():
        arms = atoms.positions - atoms.get_center_of_mass()
        largest = (np.linalg.norm(arms, axis=1) * np.linalg.norm(momenta, axis=1)).sum()
        if np.linalg.norm(np.cross(arms, momenta).sum(0)) <= _AT_REST * largest:
            # Linear molecules do not turn about their axis, single atoms not at all.
            extents = np.linalg.svd(arms, compute_uv=False) > 1e-3
            modes -= min(3, 2 * int(extents.sum()))
    return modes


def _dynamics(atoms: Atoms, settings: Settings, rng: np.random.Generator) -> Any:
    timestep = settings.timestep * units.fs
    if settings.thermostat == "nve":
        from ase.md.verlet import VelocityVerlet

        return VelocityVerlet(atoms, timestep)
    if settings.thermostat == "bussi":
        from ase.md.bussi import Bussi

        taut = settings.time_constant * units.fs
        dynamics = Bussi(atoms, timestep, temperature_K=settings.temperature, taut=taut, rng=rng)
        dynamics.ndof = max(1, moving_modes(atoms))
        dynamics.target_kinetic_energy = 0.5 * dynamics.temp * dynamics.ndof
        return dynamics
    from ase.md.langevin import Langevin

    # ASE's fixcm does not sample the canonical ensemble of a small molecule.
    return Langevin(
        atoms,
        timestep,
        temperature_K=settings.temperature,
        friction=settings.friction / units.fs,
        fixcm=False,
        rng=rng,
    )


def _heat(dynamics: Any, settings: Settings) -> None:
    temperature = settings.temperature_at(dynamics.nsteps)
    if settings.thermostat == "langevin":
        dynamics.set_temperature(temperature_K=temperature)
    else:  # Bussi, which has no such method
        dynamics.temp = temperature * units.kB
        dynamics.target_kinetic_energy = 0.5 * dynamics.temp * dynamics.ndof
