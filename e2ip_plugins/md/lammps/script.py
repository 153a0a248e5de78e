"""An input file of LAMMPS with a driver in it: what ``e2ip lammps`` runs."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Sequence, Tuple

from e2ip_plugins.errors import InputError
from e2ip_plugins.md.lammps.driver import LammpsDriver
from e2ip_plugins.md.lammps.library import open_lammps
from e2ip_plugins.md.watch import Watch

#: Comment that a driver replaces.
MARK = "# e2ip"


@dataclass(frozen=True)
class ScriptOptions:
    """Options of ``e2ip lammps``.

    Attributes
    ----------
    species, keys, interval
        Arguments of the `LammpsDriver`.
    watch : Watch, optional
        Thresholds of a `Monitor`.
    arguments : sequence of str
        Arguments of LAMMPS's command line.
    """

    species: Sequence[str]
    keys: Optional[Sequence[str]] = None
    interval: int = 1
    watch: Optional[Watch] = None
    arguments: Sequence[str] = ()


def run_script(script: Path, calculator: Any, options: ScriptOptions) -> LammpsDriver:
    """Run an input file in which the line `MARK` stands for a `LammpsDriver`.

    Parameters
    ----------
    script : Path
        Input file. Its lines before the mark make box, atoms and masses; those after it dump and run. ``jump SELF``
        stays within either part. An endless loop does not end where a monitor stops a run.
    calculator : ase.calculators.calculator.Calculator
        Calculator of the driver.
    options : ScriptOptions

    Raises
    ------
    InputError
        Errors of the options, and LAMMPS's errors in the file.
    """
    parts = split(script)
    lmp = open_lammps(cmdargs=list(options.arguments))
    try:
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / f"{name}.{script.name}" for name in ("before", "after")]
            for file, text in zip(files, parts, strict=True):
                file.write_text(text, encoding="utf-8")
            _file(lmp, files[0], script)
            driver = LammpsDriver(lmp, calculator, options.species, keys=options.keys, interval=options.interval)
            if options.watch is not None:
                options.watch.attach(driver, driver.atoms)
            _file(lmp, files[1], script)
        return driver
    finally:
        lmp.close()


def split(script: Path) -> Tuple[str, str]:
    """Return the text before the mark and the text after it."""
    try:
        lines = script.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{script}: cannot be read ({error})") from error
    marks = [number for number, line in enumerate(lines) if line.strip() == MARK]
    if len(marks) != 1:
        similar = [number for number, line in enumerate(lines, 1) if line.replace(" ", "").startswith("#e2ip")]
        raise InputError(
            f"{script}: has {len(marks) or 'no'} lines '{MARK}' with nothing else in them"
            + (f" (but line {similar[0]} is like one)" if similar and not marks else "")
            + "; one must stand in place of the model: after units, atoms and masses, before dumps and runs"
        )
    return "".join(lines[: marks[0]]), "".join(lines[marks[0] + 1 :])


def _file(lmp: Any, file: Path, script: Path) -> None:
    try:
        lmp.file(str(file))
    except Exception as error:
        # LAMMPS's errors have no class of their own.
        if type(error) is Exception:
            raise InputError(f"{script}: {' '.join(str(error).split())}") from error
        raise
