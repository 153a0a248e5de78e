"""Trainings that can be stopped at any moment: what is finished is skipped, what was killed goes on."""

import fcntl
import json
import os
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence

from e2ip_plugins.bench import commands, data
from e2ip_plugins.bench.plan import EARLY_EPOCHS, METHODS, Method, Preset, Run, dataset
from e2ip_plugins.errors import InputError
from e2ip_plugins.families.condition_trace import VARIABLE
from e2ip_plugins.families.e2ip_ablation import FACTORISATION_FAILED
from e2ip_plugins.files import replacing

#: Of what `settings` means.
VERSION = 1

#: What runs a stage: marks it as finished even where this program has been killed meanwhile.
_SHELL = ("/bin/sh", "-c", '"$@" && touch "$0"')


def settings(run: Run, preset: Preset, roots: Sequence[Path]) -> Dict[str, Any]:
    """All that a run's result depends on, for JSON; without ``roots`` all but the data."""
    method = METHODS[run.method]
    return {
        "version": VERSION,
        "run": run._asdict(),
        "method": _without_defaults(method._asdict()),
        "dataset": _plain(dataset(run.dataset)._asdict()),
        "epochs": EARLY_EPOCHS if method.early else commands.epochs(run, dataset(run.dataset), preset),
        "frames": preset.frames,
        "arguments": list(preset.arguments(run.host)),
        **({"data": data.fingerprints(dataset(run.dataset), roots)} if roots else {}),
    }


def _without_defaults(method: Dict[str, Any]) -> Dict[str, Any]:
    """Fields that differ from their defaults: a further field of `Method` leaves the runs of before as they are."""
    defaults = _plain(Method._field_defaults)
    return {name: value for name, value in _plain(method).items() if name not in defaults or value != defaults[name]}


def _plain(value: Dict[str, Any]) -> Dict[str, Any]:
    return json.loads(json.dumps(value))


def check_settings(found: Sequence[Run], preset: Preset, roots: Sequence[Path], out: Path) -> None:
    """`InputError` for a folder that holds something which was made with other settings, or of other data."""
    for run in found:
        note = out / "runs" / run.name / "run.json"
        if not note.exists() or not any(note.parent.glob("*.done")):
            continue
        try:
            before = json.loads(note.read_text())
        except ValueError as error:
            raise InputError(f"{note} is no JSON ({error}): remove the folder {note.parent}") from error
        before["method"] = _without_defaults(before.get("method", {}))
        now = settings(run, preset, roots)
        differing = [f"{k}: {before.get(k)}, now {now[k]}" for k in now if before.get(k) != now[k]]
        if differing:
            raise InputError(
                f"{note.parent} was made with other settings ({'; '.join(differing)[:200]}): give another --out, or "
                "remove that folder to train it anew"
            )


def finished(run: Run, out: Path) -> bool:
    """Whether every prediction is there."""
    return (out / "runs" / run.name / "finished").exists()


def execute(run: Run, preset: Preset, roots: Sequence[Path], out: Path, tell: Callable[[str], None] = print) -> bool:
    """Train and predict what is not there yet; whether all is there now.

    A folder is locked by whoever works in it, its commands included: those of a program that was killed are waited
    for, and nothing is trained twice.
    """
    if finished(run, out):
        return True
    if METHODS[run.method].base:
        base = run._replace(method=METHODS[run.method].base)
        check_settings([base], preset, roots, out)
        if not execute(base, preset, roots, out, tell):
            return False
    folder = out.resolve() / "runs" / run.name
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell(f"{run.name}: somebody works in {folder}; waiting")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if finished(run, out):
            return True
        with replacing(folder / "run.json") as unfinished:
            unfinished.write_text(json.dumps(settings(run, preset, roots), indent=1) + "\n")
        return _work(run, preset, roots, out, folder, lock.fileno(), tell)


def _work(
    run: Run, preset: Preset, roots: Sequence[Path], out: Path, folder: Path, lock: int, tell: Callable[[str], None]
) -> bool:
    files = data.prepare(run.dataset, dataset(run.dataset), roots, out.resolve() / "data", preset.frames)
    trace = {VARIABLE: str(folder / commands.TRACE)} if METHODS[run.method].readout else {}
    environment = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **os.environ, **trace}
    started = time.time()
    tell(f"{run.name}: training; see {folder / 'log.txt'}")
    for stage in commands.stages(run, dataset(run.dataset), preset, files, folder):
        done = folder / f"{stage.name}.done"
        if done.exists():
            continue
        for name in stage.writes:  # of a stage that was killed: NequIP's writer appends
            (folder / name).unlink(missing_ok=True)
        with open(folder / "log.txt", "a") as log:
            log.write(f"\n$ {' '.join(stage.command)}\n")
            log.flush()
            code = subprocess.run(
                [*_SHELL, str(done), *stage.command],
                cwd=folder,
                env=environment,
                stdout=log,
                stderr=log,
                # Its copy of the lock outlives this program.
                pass_fds=(lock,),
            ).returncode
        if code and METHODS[run.method].early and FACTORISATION_FAILED in (folder / "log.txt").read_text():
            (folder / commands.FAILED).touch()
            break
        if code:
            tell(f"{run.name}: {stage.name} failed with status {code}; see {folder / 'log.txt'}")
            return False
    (folder / "finished").touch()
    tell(f"{run.name}: finished, {(time.time() - started) / 60:.1f} min")
    return True


def check_cluster(cluster: str) -> None:
    """`InputError` where `execute_all` cannot start jobs on a cluster."""
    if cluster and find_spec("submitit") is None:
        raise InputError("--cluster needs submitit: install e2ip-plugins[cluster], too")


def execute_all(
    found: List[Run],
    preset: Preset,
    roots: Sequence[Path],
    out: Path,
    jobs: int = 1,
    cluster: str = "",
    tell: Callable[[str], None] = print,
) -> List[Run]:
    """Execute runs, ``jobs`` at a time; the runs that failed.

    Parameters
    ----------
    cluster : str
        Of submitit: ``slurm``, or ``local`` for its own processes; empty: processes of this program.
    """
    todo = [run for run in found if not finished(run, out)]
    tell(f"{len(found) - len(todo)} of {len(found)} runs are finished; {len(todo)} to go")
    for name in {run.dataset for run in todo}:  # once, before anybody needs them, and before anything is started
        data.prepare(name, dataset(name), roots, out.resolve() / "data", preset.frames)
    for run in todo:
        base = METHODS[run.method].base
        if base and finished(run._replace(method=base), out):
            commands.base(run, out / "runs" / run.name)
    if cluster:
        import submitit

        executor = submitit.AutoExecutor(folder=out / "submitit", cluster=cluster)
        executor.update_parameters(name="e2ip-bench", slurm_array_parallelism=jobs, timeout_min=24 * 60)
        started = executor.map_array(execute, todo, *([x] * len(todo) for x in (preset, roots, out)))
        return [run for run, job in zip(todo, started, strict=True) if not job.result()]
    speaking = threading.Lock()

    def tell_one_by_one(text: str) -> None:
        with speaking:
            tell(text)

    with ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(partial(execute, preset=preset, roots=roots, out=out, tell=tell_one_by_one), todo))
    return [run for run, good in zip(todo, results, strict=True) if not good]
