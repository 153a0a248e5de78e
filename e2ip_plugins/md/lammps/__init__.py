"""LAMMPS moves the atoms, a model gives uncertainties and, unless a pair style does (`LammpsObserver`), the forces:
on one process (`LammpsDriver`) or several (`LammpsClusterDriver`)."""

from e2ip_plugins.md.lammps.clusters import LammpsClusterDriver
from e2ip_plugins.md.lammps.driver import LammpsDriver
from e2ip_plugins.md.lammps.library import open_lammps
from e2ip_plugins.md.lammps.observer import LammpsObserver

__all__ = ["LammpsClusterDriver", "LammpsDriver", "LammpsObserver", "open_lammps"]
