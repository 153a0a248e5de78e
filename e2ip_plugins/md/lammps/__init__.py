"""LAMMPS moves the atoms. A calculator of ASE gives the forces (`LammpsDriver`), or a pair style does
(`LammpsObserver`, on many processes); scripts of ``e2ip lammps`` have either in them."""

from e2ip_plugins.md.lammps.driver import LammpsDriver
from e2ip_plugins.md.lammps.library import open_lammps
from e2ip_plugins.md.lammps.observer import LammpsObserver

__all__ = ["LammpsDriver", "LammpsObserver", "open_lammps"]
