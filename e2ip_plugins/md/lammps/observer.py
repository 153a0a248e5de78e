"""`LammpsObserver`: uncertainties beside whatever gives LAMMPS its forces, on any number of processes.

Every process of LAMMPS has its own atoms and, within the communication cutoff, copies of those around them (ghosts).
An atom's uncertainty depends on its surroundings alone and needs no forces: each process evaluates the readout for its
own atoms, on the cluster of both, and nothing is communicated for it. The uncertainty of the energy is the norm of a
sum over all atoms, for which the processes' sums are added.
"""

import warnings
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Union

import numpy as np
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from scipy.spatial import cKDTree

from e2ip_plugins.errors import InputError, UncertaintyWarning
from e2ip_plugins.evaluation.batches import columns_of
from e2ip_plugins.evaluation.options import BatchModel
from e2ip_plugins.evaluation.reach import reach
from e2ip_plugins.keys import ENERGY_ERROR_VECTOR, ENERGY_UNCERTAINTY, LEVERAGE, OutputKey
from e2ip_plugins.md.lammps import library
from e2ip_plugins.md.lammps.guard import RunGuard
from e2ip_plugins.md.lammps.library import DEFAULT_KEYS, FORCES_FIX, STEP_NAME, of_atoms
from e2ip_plugins.md.monitor import SOURCES, Monitor
from e2ip_plugins.predictions.columns import uncertainties
from e2ip_plugins.scores.calibration import Calibration
from e2ip_plugins.scores.results import origin

#: Step of an atom whose process failed.
_FAILED = -2


class LammpsObserver:
    """Evaluate the uncertainties of LAMMPS's atoms at every n-th step; forces come from the input's own pair style.

    Make the observer after box, atoms, masses and ``comm_modify cutoff``, before dumps and computes that show
    uncertainties. These are per-atom properties, ``d_<key>`` or ``d2_<key>[1]`` and so on, as of a `LammpsDriver`, and
    hold the values of the step ``i_e2ip_step`` (-1 before the first). ``compute reduce`` gives extremes over all
    processes, and ``fix halt`` ends the run by them. Where the model has error bars of energies, ``f_e2ip[1]`` is the
    standard deviation of the energy of all atoms, in LAMMPS's unit, and ``f_e2ip[2]`` its step.

    The pair style may be another model's: the uncertainties are those of the observer's model for its own forces.

    Parameters
    ----------
    lmp : lammps.lammps
        LAMMPS with units ``metal`` or ``real``, in one or several MPI processes.
    model : BatchModel
        Eager model with a readout, of a family that does not take forces.
    species : sequence of str
        Chemical symbol of every atom type of LAMMPS, in order.
    keys : sequence of str, optional
        Uncertainties that LAMMPS gets. Default: ``forces_epistemic_std`` and a fitted ``e2ip_leverage``.
    interval : int
        Steps between two evaluations.
    calibration : Calibration, optional
    skin : float
        Skin of LAMMPS's neighbour lists in Å, by which atoms may move before ghosts are renewed. It is LAMMPS's default
        for these units; an input with a larger ``neighbor`` must give that.

    Attributes
    ----------
    atoms : ase.Atoms
        All atoms of the last observed step, ordered by LAMMPS's ids, the same in every process; read where functions
        are attached. The results of its calculator are LAMMPS's forces, the uncertainties of ``keys`` and those of the
        energy, in eV and Å.
    keys : list of str

    Raises
    ------
    InputError
        Unsuitable units, species, models and a communication cutoff that is too short, before the run.
    """

    _gives = "the uncertainties"
    #: Numbers that processes share beside the error vector of the energy.
    _further = 0

    def __init__(
        self,
        lmp: Any,
        model: BatchModel,
        species: Union[str, Sequence[str]],
        *,
        keys: Optional[Sequence[str]] = None,
        interval: int = 10,
        calibration: Optional[Calibration] = None,
        skin: float = 2.0,
    ) -> None:
        self.lmp, self.model, self.calibration = lmp, model, calibration
        self._interval = self._calls_every = library.positive_steps(interval, "interval")
        self._energy = library.check_lammps(lmp, processes=True)
        self._numbers = library.check_species(lmp, species)
        symbols = species.split() if isinstance(species, str) else list(species)
        missing = sorted(set(symbols) - set(model.species))
        if missing:
            raise InputError(f"species: the model does not know {', '.join(missing)}")
        self._columns = _check_keys(lmp, model, keys)
        if calibration is not None:
            calibration.check(model.family, set(symbols), "the model", model.uq_model)
        self.keys = [key.name for key in self._columns]
        self._reach, self._skin = reach(model, symbols), skin
        self._shell = self._check_cutoff()
        self._vector = np.zeros(0)
        self._watchers: List[Callable[[Atoms], Callable[[], Any]]] = []
        self._observers: List[Callable[[], Any]] = []
        self.atoms = Atoms()
        self._set_up()

    def attach(self, function: Callable[[], Any]) -> None:
        """Call a function after every evaluation, in every process, with ``atoms`` of the step."""
        self._observers.append(function)

    def watch(self, make: Callable[[Atoms], Callable[[], Any]]) -> None:
        """Make a function, such as a `Monitor`, from ``atoms`` at the first evaluation, and call it at every one."""
        self._watchers.append(make)

    def _set_up(self) -> None:
        lmp = self.lmp
        library.make_columns(lmp, self._columns)
        if self._further or self.model.vector_length:
            shared = f"{library.SHARED} {library.SHARED_WIDTH}"
            lmp.command(f"fix {library.SHARED_FIX} all property/atom {shared} writedata no")
        self._guard = RunGuard(lmp, FORCES_FIX, self._gives)
        lmp.command(f"fix {FORCES_FIX} all external pf/callback {self._calls_every} {self._calls_every}")
        if self.model.vector_length:
            library.make_energy(lmp)
        lmp.set_fix_external_callback(FORCES_FIX, self._step, lmp)

    def _check_cutoff(self) -> float:
        """Return the distance from its own atoms in Å to which a process has all ghosts; at least what is needed."""
        cutoff, needed = library.communication_cutoff(self.lmp), self._reach.uncertainties + self._skin
        if cutoff < needed - 1e-9:
            problem = f"the communication cutoff is {cutoff:g} Å" if cutoff else "comm_modify mode multi has no cutoff"
            raise InputError(
                f"{problem}, and the model needs {needed:g} Å (its reach of {self._reach.uncertainties:g} Å and the "
                f"skin): put 'comm_modify cutoff {needed:g}' before the line '# e2ip' or the observer"
            )
        return self._reach.uncertainties

    def _step(self, _: Any, step: int, count: int, ids: np.ndarray, positions: np.ndarray, forces: np.ndarray) -> None:
        """Callback of ``fix external``."""
        forces[:] = 0.0
        self._guard.call(lambda: self._called(step, count, forces))

    def _called(self, step: int, count: int, forces: np.ndarray) -> None:
        problem, self._part = None, np.zeros(0)
        try:
            if count:
                self._evaluate(step, self._cluster(count), count, forces)
        except Exception as error:
            # The other processes wait below, and must know.
            problem, of_atoms(self.lmp, STEP_NAME)[:] = error, _FAILED
        failed = np.min(self.lmp.gather_concat(STEP_NAME, 0, 1)) == _FAILED
        if problem is not None:
            raise problem
        if failed:
            raise InputError(f"step {step}: the model has failed in another process")
        self._share(step)
        if step % self._interval == 0 and (self._watchers or self._observers):
            self._gather(step)
            self._observers.extend(make(self.atoms) for make in self._watchers)
            self._watchers.clear()
            for function in self._observers:
                function()

    def _share(self, step: int) -> None:
        """Share what all processes need of a step: the error vector of the energy."""
        if self.model.vector_length:
            self._show_energy(step, library.sum_over_processes(self.lmp, self._part))

    def _show_energy(self, step: int, sums: np.ndarray) -> None:
        """Give LAMMPS the uncertainty of the energy, for sums over all processes in eV."""
        factor = 1.0 if self.calibration is None else self.calibration.energy_factor
        self._vector = factor * sums[: self.model.vector_length]
        library.show_energy(self.lmp, self._energy * float(np.linalg.norm(self._vector)), step)

    def _cluster(self, count: int) -> Atoms:
        """Return this process's own atoms, which come first, and all ghosts within the shell."""
        total = count + self.lmp.extract_setting("nghost")
        positions = self.lmp.numpy.extract_atom("x", nelem=total)
        types = self.lmp.numpy.extract_atom("type", nelem=total)
        if not np.isfinite(positions).all():
            raise InputError("positions are not finite")
        distances, _ = cKDTree(positions[:count]).query(positions, distance_upper_bound=self._shell + 1e-6)
        near = np.flatnonzero(np.isfinite(distances))
        return Atoms(self._numbers[types[near] - 1], positions[near])

    def _evaluate(self, step: int, cluster: Atoms, count: int, forces: np.ndarray) -> None:
        """Put the uncertainties of this process's atoms into LAMMPS's properties."""
        self._put(step, self.model.graph(cluster)[0], list(cluster.symbols), count)

    def _put(self, step: int, graph: Any, symbols: List[str], count: int) -> None:
        outputs = self.model.uncertainties([graph], count if self.model.vector_length else None)
        if self.model.vector_length:
            vector = outputs[ENERGY_ERROR_VECTOR.name][0].cpu().numpy().astype(np.float64)
            self._part = np.append(self._part, vector)
        columns = columns_of(self.model, outputs, symbols, self.calibration)
        # Ghosts come last.
        of_this_process = {name: values[:count] for name, values in columns.items()}
        library.put_columns(self.lmp, self._columns, of_this_process, self._energy, step)

    def _gather(self, step: int) -> None:
        """Put all processes' atoms into ``self.atoms``."""
        lmp = self.lmp
        order = np.argsort(np.asarray(lmp.gather_concat("id", 0, 1)))
        numbers = self._numbers[np.asarray(lmp.gather_concat("type", 0, 1))[order] - 1]
        positions, forces = self._vectors("x")[order], self._all_forces()[order]
        atoms = self.atoms
        library.move(lmp, atoms, numbers, positions)
        atoms.info["lammps_step"] = step
        assert self.model.family is not None
        results: Dict[str, Any] = origin(self.model.family, self.model.uq_model, self.calibration)
        for key in self._columns:
            size = int(np.prod(key.shape))
            values = np.asarray(lmp.gather_concat(library.column_name(key), 1, size)).reshape(-1, *key.shape)[order]
            results[key.name] = values / self._energy ** library.FORCE_POWERS.get(key.unit, 0)
        if len(self._vector):
            results[ENERGY_ERROR_VECTOR.name] = self._vector
            results[ENERGY_UNCERTAINTY.name] = float(np.linalg.norm(self._vector))
        atoms.calc = SinglePointCalculator(atoms, forces=forces / self._energy)
        atoms.calc.results.update(results)

    def _vectors(self, name: str) -> np.ndarray:
        """Return vectors of all processes' atoms (N, 3)."""
        return np.asarray(self.lmp.gather_concat(name, 1, 3)).reshape(-1, 3)

    def _all_forces(self) -> np.ndarray:
        return self._vectors("f")


class SilentMonitor(Monitor):
    """Monitor that decides as another process's does, and leaves files and warnings to that."""

    def __call__(self) -> None:
        """Check the atoms."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UncertaintyWarning)
            super().__call__()

    def _check_file(self) -> None:
        """Leave the file alone: the other process may have written to it already."""

    def _write(self, frame: Atoms) -> None:
        pass


def observed_keys(thresholds: Iterable[str], keys: Optional[Sequence[str]]) -> List[str]:
    """Return ``keys``, or those by default, and what a monitor with these thresholds reads of atoms."""
    sources = [SOURCES.get(name, name) for name in thresholds]
    names = [name for name in sources if name != ENERGY_UNCERTAINTY.name]
    return list(dict.fromkeys([*(DEFAULT_KEYS if keys is None else keys), *names]))


def _check_keys(lmp: Any, model: BatchModel, keys: Optional[Sequence[str]]) -> List[OutputKey]:
    """Return the keys that LAMMPS gets; `InputError` for those that the model does not give without forces."""
    if model.family is None:
        raise InputError("the model has no readout of e2ip-plugins: e2ip fit gives a stock model one")
    if model.family.takes_forces:
        raise InputError(f"a readout {model.family.name} needs forces, which an observer does not compute")
    known = {key.name: key for key in model.family.output_keys()}
    if not model.warning:
        known[LEVERAGE.name] = LEVERAGE
    names = [name for name in DEFAULT_KEYS if name in known] if keys is None else list(dict.fromkeys(keys))
    for name in names:
        if name not in known:
            kind = "is no uncertainty" if name not in uncertainties() else "is not given by this model"
            raise InputError(f"keys: {name!r} {kind}; choose from {', '.join(known)}")
    return library.with_units(lmp, [known[name] for name in names])
