"""An input file of LAMMPS with a driver or an observer in it: what ``e2ip lammps`` runs."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Optional, Sequence, Tuple, Union

from e2ip_plugins.errors import InputError
from e2ip_plugins.md.lammps.clusters import LammpsClusterDriver
from e2ip_plugins.md.lammps.driver import LammpsDriver
from e2ip_plugins.md.lammps.library import open_lammps
from e2ip_plugins.md.lammps.observer import LammpsObserver, SilentMonitor, observed_keys
from e2ip_plugins.md.monitor import MonitorStop
from e2ip_plugins.md.watch import Watch
from e2ip_plugins.scores.calibration import Calibration

#: Comment that the driver or observer replaces.
MARK = "# e2ip"

#: Refusal of an interval between checks that is not that between evaluations.
NO_INTERVAL = "--interval: with --observe or several processes every evaluation is a check; give --uncertainty-interval"


@dataclass(frozen=True)
class ScriptOptions:
    """Options of ``e2ip lammps``.

    Attributes
    ----------
    species, keys, interval
        Arguments of the `LammpsDriver`.
    watch : Watch, optional
        Thresholds of a `Monitor`.
    watch_interval : bool
        Whether the user chose the steps between two of its checks, which only a `LammpsDriver` can follow.
    arguments : sequence of str
        Arguments of LAMMPS's command line.
    observe : bool
        Whether a `LammpsObserver` leaves the forces to the pair style of the file.
    calibration : Path, optional
        File for these; the calculator of a `LammpsDriver` has its own.
    """

    species: Sequence[str]
    keys: Optional[Sequence[str]] = None
    interval: Optional[int] = None
    watch: Optional[Watch] = None
    watch_interval: bool = False
    arguments: Sequence[str] = ()
    observe: bool = False
    calibration: Optional[Path] = None


def run_script(
    script: Path, open_model: Callable[[bool], Any], options: ScriptOptions
) -> Union[LammpsDriver, LammpsObserver]:
    """Run an input file in which the line `MARK` stands for a driver or observer of LAMMPS.

    Parameters
    ----------
    script : Path
        Input file. Its lines before the mark make box, atoms and masses; those after it dump and run. ``jump SELF``
        stays within either part. An endless loop does not end where a monitor stops a run.
    open_model : callable
        Returns the ASE calculator of a `LammpsDriver` or, if its argument is true, the `BatchModel` of a
        `LammpsObserver` or, on several processes, `LammpsClusterDriver`.
    options : ScriptOptions

    Raises
    ------
    InputError
        Errors of the options, and LAMMPS's errors in the file.
    """
    parts = split(script)
    lmp = open_lammps(cmdargs=list(options.arguments))
    together = False
    try:
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / f"{name}.{script.name}" for name in ("before", "after")]
            for file, text in zip(files, parts, strict=True):
                file.write_text(text, encoding="utf-8")
            _file(lmp, files[0], script)
            connected = _connect(lmp, open_model, options)
            _file(lmp, files[1], script)
        together = True
        return connected
    except MonitorStop:
        together = True
        raise
    finally:
        several = lmp.extract_setting("world_size") > 1
        lmp.close()
        if several and together:
            # mpiexec kills all others when a process leaves without this, which waits for them.
            lmp.lib.lammps_mpi_finalize()


def _connect(
    lmp: Any, open_model: Callable[[bool], Any], options: ScriptOptions
) -> Union[LammpsDriver, LammpsObserver]:
    """Return the driver or observer of LAMMPS with its monitor."""
    watch = options.watch
    if not options.observe and lmp.extract_setting("world_size") == 1:
        interval = options.interval or 1
        driver = LammpsDriver(lmp, open_model(False), options.species, keys=options.keys, interval=interval)
        if watch is not None:
            watch.attach(driver, driver.atoms)
        return driver
    if options.watch_interval:
        raise InputError(NO_INTERVAL)
    kind = LammpsObserver if options.observe else LammpsClusterDriver
    keys = options.keys if watch is None else observed_keys(watch.thresholds, options.keys)
    calibration = None if options.calibration is None else Calibration.read(options.calibration)
    observer = kind(
        lmp, open_model(True), options.species, keys=keys, interval=options.interval or 10, calibration=calibration
    )
    if watch is not None:
        first = lmp.extract_setting("world_rank") == 0
        observer.watch(lambda atoms: watch.monitor(atoms) if first else watch.monitor(atoms, SilentMonitor))
    return observer


def split(script: Path) -> Tuple[str, str]:
    """Return the text before the mark and the text after it."""
    try:
        lines = script.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise InputError(f"{script}: cannot be read ({reason}); give an input file of LAMMPS") from error
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
