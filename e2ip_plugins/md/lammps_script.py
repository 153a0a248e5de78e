"""An input file of LAMMPS with a driver in it: what ``e2ip lammps`` runs."""

import tempfile
from pathlib import Path
from typing import Any, Dict, Iterable, Optional, Sequence, Tuple, Union

from e2ip_plugins.errors import InputError
from e2ip_plugins.md.lammps import LammpsDriver, open_lammps
from e2ip_plugins.md.monitor import Monitor
from e2ip_plugins.md.thresholds import Quantile

#: The comment in whose place a driver comes.
MARK = "# e2ip"


def run_script(
    script: Path,
    calculator: Any,
    species: Sequence[str],
    *,
    keys: Optional[Sequence[str]] = None,
    thresholds: Optional[Dict[str, Union[float, Quantile]]] = None,
    interval: int = 10,
    arguments: Iterable[str] = (),
    **monitor: Any,
) -> LammpsDriver:
    """Run an input file in which the line `MARK` stands for a `LammpsDriver`.

    Parameters
    ----------
    script
        Its lines before the mark make box, atoms and masses; those after it dump and run. ``jump SELF`` stays within
        either part; a loop without an end does not end where a monitor stops a run.
    calculator, species, keys
        Of the driver.
    thresholds
        Of a `Monitor`; without any there is none.
    interval
        Of its checks, in steps.
    arguments
        Of LAMMPS's command line.
    **monitor
        Of the `Monitor`.

    Raises
    ------
    InputError
        Also what LAMMPS finds wrong with the file.
    """
    parts = split(script)
    lmp = open_lammps(cmdargs=list(arguments))
    try:
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / f"{name}.{script.name}" for name in ("before", "after")]
            for file, text in zip(files, parts, strict=True):
                file.write_text(text, encoding="utf-8")
            _file(lmp, files[0], script)
            driver = LammpsDriver(lmp, calculator, species, keys=keys)
            if thresholds:
                driver.attach(Monitor(driver.atoms, thresholds, **monitor), interval)
            _file(lmp, files[1], script)
        return driver
    finally:
        lmp.close()


def split(script: Path) -> Tuple[str, str]:
    """What stands before the mark, and what after it."""
    try:
        lines = script.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{script}: cannot be read ({error})") from error
    marks = [number for number, line in enumerate(lines) if line.strip() == MARK]
    if len(marks) != 1:
        like = [number for number, line in enumerate(lines, 1) if line.replace(" ", "").startswith("#e2ip")]
        raise InputError(
            f"{script}: has {len(marks) or 'no'} lines '{MARK}' with nothing else in them"
            + (f" (but line {like[0]} is like one)" if like and not marks else "")
            + "; one says where the model comes in: after units, atoms and masses, before dumps and runs"
        )
    return "".join(lines[: marks[0]]), "".join(lines[marks[0] + 1 :])


def _file(lmp: Any, file: Path, script: Path) -> None:
    try:
        lmp.file(str(file))
    except Exception as error:
        # LAMMPS's own errors are of no class of their own.
        if type(error) is Exception:
            raise InputError(f"{script}: {' '.join(str(error).split())}") from error
        raise
