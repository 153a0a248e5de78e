"""ASE's dynamics for ``e2ip md``: options of a run, velocities, thermostats and temperature ramps."""

import math
from dataclasses import dataclass
from typing import Optional, Tuple

import numpy as np
from ase import Atoms, units
from ase.md import velocitydistribution
from ase.md.bussi import Bussi
from ase.md.langevin import Langevin
from ase.md.md import MolecularDynamics
from ase.md.verlet import VelocityVerlet

from e2ip_plugins.errors import InputError

THERMOSTATS = ("nve", "langevin", "bussi")

#: A total momentum below this fraction of the sum of momenta is zero: files have eight decimals.
_AT_REST = 1e-4

# ASE 3.29 has this function under a new name, and warns of the old one.
_draw_momenta = (
    getattr(velocitydistribution, "thermalize_momenta", None) or velocitydistribution.MaxwellBoltzmannDistribution
)


@dataclass(frozen=True)
class RunOptions:
    """Options of ``e2ip md`` for the dynamics.

    Attributes
    ----------
    steps : int
        Number of time steps.
    temperature : float, optional
        Temperature of thermostat and drawn velocities at the start, in K. Default: 300.
    final_temperature : float, optional
        Temperature at the end, reached linearly. Default: that at the start.
    timestep : float
        Time step in fs.
    thermostat : str
        One of `THERMOSTATS`; ``nve`` keeps the energy.
    friction : float, optional
        Friction of ``langevin``, in 1/fs. Default: 0.01.
    time_constant : float, optional
        Time constant of ``bussi``, in fs. Default: 100.
    seed : int
        Seed of velocities and thermostat.
    interval : int
        Steps between frames that are written; the last one always is.
    keep_velocities : bool
        Whether the run begins with the velocities of the structure.

    Raises
    ------
    InputError
        Values that make no run, and those that would have no effect.
    """

    steps: int
    temperature: Optional[float] = None
    final_temperature: Optional[float] = None
    timestep: float = 0.5
    thermostat: str = "langevin"
    friction: Optional[float] = None
    time_constant: Optional[float] = None
    seed: int = 0
    interval: int = 10
    keep_velocities: bool = False

    def __post_init__(self) -> None:
        if self.thermostat not in THERMOSTATS:
            raise InputError(f"--thermostat {self.thermostat}: choose from {', '.join(THERMOSTATS)}")
        for name, thermostat in (("friction", "langevin"), ("time_constant", "bussi")):
            if getattr(self, name) is not None and self.thermostat != thermostat:
                raise InputError(f"{_option(name)} is for --thermostat {thermostat}, not {self.thermostat}")
        for name in ("steps", "timestep", "friction", "time_constant", "interval", "temperature", "final_temperature"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise InputError(f"{_option(name)} {value}: a number above 0")
        if self.seed < 0:
            raise InputError(f"--seed {self.seed}: 0 or more")
        if self.thermostat == "nve" and self.final_temperature is not None:
            raise InputError("--temperature: a ramp needs a thermostat, and nve has none")
        if self.without_temperature and self.temperature is not None:
            raise InputError("--temperature: nve with --keep-velocities has the temperature of those; leave it out")

    @property
    def without_temperature(self) -> bool:
        """Whether the run has the structure's velocities and no thermostat."""
        return self.thermostat == "nve" and self.keep_velocities

    def temperature_at(self, step: int) -> float:
        """Return the temperature of the thermostat in K."""
        start = 300.0 if self.temperature is None else self.temperature
        end = start if self.final_temperature is None else self.final_temperature
        return start + (end - start) * min(step, self.steps) / self.steps


def _option(name: str) -> str:
    return "--temperature (its end)" if name == "final_temperature" else f"--{name.replace('_', '-')}"


def parse_temperature(text: Optional[str]) -> Tuple[Optional[float], Optional[float]]:
    """Return the temperatures at start and end of ``300`` or ``300:1500``, in K."""
    if text is None:
        return None, None
    first, sign, last = text.partition(":")
    try:
        return float(first), float(last) if sign else None
    except ValueError as error:
        raise InputError(f"--temperature {text}: a number in K, or a ramp, for example 300:1500") from error


def draw_velocities(atoms: Atoms, options: RunOptions, rng: np.random.Generator) -> None:
    """Give a structure thermal velocities, without those of modes that would never exchange their energy."""
    _draw_momenta(atoms, temperature_K=options.temperature_at(0), rng=rng)
    if options.thermostat != "langevin" and len(atoms) > 1 and not atoms.constraints:
        # The energy that is taken away is not put into the other modes: they would be too hot.
        velocitydistribution.Stationary(atoms, preserve_temperature=False)
        if not atoms.pbc.any():
            velocitydistribution.ZeroRotation(atoms, preserve_temperature=False)


def moving_modes(atoms: Atoms) -> int:
    """Return the degrees of freedom that a thermostat which only rescales velocities heats.

    Momentum and, without periodicity, angular momentum are conserved. Where they are zero, as in a molecule at rest,
    five or six modes never move. ASE counts them.
    """
    modes = int(atoms.get_number_of_degrees_of_freedom())
    if atoms.constraints:
        return modes
    momenta = atoms.get_momenta()
    sizes = np.linalg.norm(momenta, axis=1)
    if np.linalg.norm(momenta.sum(0)) <= _AT_REST * sizes.sum():
        modes -= 3
    if not atoms.pbc.any():
        arms = atoms.positions - atoms.get_center_of_mass()
        largest = (np.linalg.norm(arms, axis=1) * sizes).sum()
        if np.linalg.norm(np.cross(arms, momenta).sum(0)) <= _AT_REST * largest:
            # Linear molecules do not turn about their axis, single atoms not at all.
            extents = np.linalg.svd(arms, compute_uv=False) > 1e-3
            modes -= min(3, 2 * int(extents.sum()))
    return modes


def make_dynamics(atoms: Atoms, options: RunOptions, rng: np.random.Generator) -> MolecularDynamics:
    """Return ASE's dynamics of a structure, with the ramp of its thermostat attached."""
    timestep, thermal = options.timestep * units.fs, {"temperature_K": options.temperature_at(0), "rng": rng}
    if options.thermostat == "nve":
        return VelocityVerlet(atoms, timestep)
    if options.thermostat == "langevin":
        # ASE's fixcm does not sample the canonical ensemble of a small molecule.
        dynamics = Langevin(atoms, timestep, friction=(options.friction or 0.01) / units.fs, fixcm=False, **thermal)
    else:
        dynamics = Bussi(atoms, timestep, taut=(options.time_constant or 100.0) * units.fs, **thermal)
        dynamics.ndof = max(1, moving_modes(atoms))
        dynamics.target_kinetic_energy = 0.5 * dynamics.temp * dynamics.ndof

    def heat() -> None:
        temperature = options.temperature_at(dynamics.nsteps)
        if options.thermostat == "langevin":
            dynamics.set_temperature(temperature_K=temperature)
        else:  # Bussi has no such method.
            dynamics.temp = temperature * units.kB
            dynamics.target_kinetic_energy = 0.5 * dynamics.temp * dynamics.ndof

    if options.final_temperature is not None:
        dynamics.attach(heat)
    return dynamics
