"""`LammpsClusterDriver`: a model's forces in LAMMPS on several processes, each from a cluster around its own atoms."""

from typing import Any, List

import numpy as np
from ase import Atoms

from e2ip_plugins.errors import InputError
from e2ip_plugins.evaluation.options import BatchModel
from e2ip_plugins.md.lammps.library import FORCES_FIX, communication_cutoff, sum_over_processes
from e2ip_plugins.md.lammps.observer import LammpsObserver

#: Largest error of a force in eV/Å from a communication cutoff that does not hold all of a force's reach.
_TOLERANCE = 1e-5

#: Atoms of which it is measured.
_PROBES = 4

#: Places in a matrix of LAMMPS's virial (xx, yy, zz, xy, xz, yz).
_VIRIAL = ([0, 1, 2, 0, 0, 1], [0, 1, 2, 1, 2, 2])


class LammpsClusterDriver(LammpsObserver):
    """Give LAMMPS a model's forces, energy and virial on several processes, and its uncertainties at every n-th step.

    Each process evaluates the cluster of its own atoms and of the ghosts around them. The energy is the sum over all
    processes' own atoms. A force also depends on the energies of atoms around, so that it needs a communication cutoff
    of twice the reach of an energy. A shorter one may be good enough, depending on the model: its error is measured on
    some atoms of the first configuration, and the run refused where it is above 1e-5 eV/Å.

    Parameters are those of a `LammpsObserver`. The ``results`` of ``atoms`` hold all forces of LAMMPS.

    Raises
    ------
    InputError
        As a `LammpsObserver`, and for a communication cutoff that is too short for forces, before the first step.
    """

    _gives = "the model's forces"
    #: Energy and virial.
    _further = 7

    def _set_up(self) -> None:
        self._calls_every, self._measured = 1, False
        super()._set_up()
        self.lmp.command(f"fix_modify {FORCES_FIX} energy yes virial yes")

    def _check_cutoff(self) -> float:
        super()._check_cutoff()
        return min(communication_cutoff(self.lmp) - self._skin, self._reach.forces)

    def _called(self, step: int, count: int, forces: np.ndarray) -> None:
        if not self._measured:
            self._measure(step)
            self._measured = True
        super()._called(step, count, forces)

    def _evaluate(self, step: int, cluster: Atoms, count: int, forces: np.ndarray) -> None:
        graph = self.model.graph(cluster)[0]
        result = self.model.cluster(graph, count)
        if not (np.isfinite(result.energy) and np.isfinite(result.forces).all()):
            raise InputError(f"step {step}: energy or forces are not finite")
        forces[:] = self._energy * result.forces
        self._part = np.array([result.energy, *result.virial[_VIRIAL]])
        if step % self._interval == 0:
            self._put(step, graph, list(cluster.symbols), count)

    def _share(self, step: int) -> None:
        sums = sum_over_processes(self.lmp, self._part)
        energy, *virial = self._energy * sums[: self._further]
        self.lmp.fix_external_set_energy_global(FORCES_FIX, float(energy))
        self.lmp.fix_external_set_virial_global(FORCES_FIX, [float(value) for value in virial])
        if self.model.vector_length and step % self._interval == 0:
            self._show_energy(step, sums[self._further :])

    def _all_forces(self) -> np.ndarray:
        # LAMMPS adds those of the fix after the call.
        return self._vectors("f") + self._vectors(f"f_{FORCES_FIX}")

    def _measure(self, step: int) -> None:
        """Raise `InputError` where forces need more ghosts than there are: the same in every process."""
        if self._shell >= self._reach.forces - 1e-9:
            return
        self._gather(step)
        error = force_error(self.model, self.atoms, self._shell, self._reach.forces)
        if error > _TOLERANCE:
            exact = self._reach.forces + self._skin
            raise InputError(
                f"the communication cutoff is {self._shell + self._skin:g} Å, with which forces are off by up to "
                f"{error:.1g} eV/Å: put 'comm_modify cutoff {exact:g}', which is exact, or one between the two, before "
                "the line '# e2ip' or the driver"
            )


def force_error(model: BatchModel, atoms: Atoms, radius: float, exact: float) -> float:
    """Return the largest error in eV/Å of some atoms' forces from a ball of a radius, beside an exact one."""
    errors: List[float] = []
    for index in np.unique(np.linspace(0, len(atoms) - 1, _PROBES).astype(int)):
        graphs = [model.graph(ball(atoms, int(index), r))[0] for r in (radius, exact)]
        short, right = (model.cluster(graph, 1).forces[0] for graph in graphs)
        errors.append(float(np.abs(short - right).max()))
    return max(errors)


def ball(atoms: Atoms, index: int, radius: float) -> Atoms:
    """Return an atom and all others within a radius in Å, images included, as a frame that is not periodic."""
    cell, away = atoms.cell.complete(), atoms.positions - atoms.positions[index]
    heights = 1.0 / np.linalg.norm(np.linalg.inv(cell[:]), axis=0)
    # Fractional coordinates may differ by more than 1: LAMMPS wraps when it renews neighbours only.
    span = np.ptp(atoms.get_scaled_positions(wrap=False), axis=0) if atoms.pbc.any() else np.zeros(3)
    counts: Any = np.where(atoms.pbc, np.ceil(radius / heights + span).astype(int), 0)
    grid = np.stack(np.meshgrid(*(np.arange(-n, n + 1) for n in counts), indexing="ij"), -1).reshape(-1, 3)
    images = away[None] + (grid @ cell[:])[:, None]
    which = np.linalg.norm(images, axis=-1) <= radius
    which[len(grid) // 2, index] = False
    numbers = np.broadcast_to(atoms.numbers, which.shape)[which]
    return Atoms([atoms.numbers[index], *numbers], [np.zeros(3), *images[which]])
