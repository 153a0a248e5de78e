"""LAMMPS moves the atoms, a calculator of ASE gives the forces: `LammpsDriver`, and scripts for ``e2ip lammps``."""

from e2ip_plugins.md.lammps.driver import LammpsDriver
from e2ip_plugins.md.lammps.library import open_lammps

__all__ = ["LammpsDriver", "open_lammps"]
