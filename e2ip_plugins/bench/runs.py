"""Trainings that can be stopped at any moment: what is finished is skipped, what was killed goes on."""

import fcntl
import json
import os
import shlex
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence

from e2ip_plugins.bench import commands, data
from e2ip_plugins.bench.catalogue import METHODS, non_defaults
from e2ip_plugins.bench.plan import Plan, Run
from e2ip_plugins.errors import InputError
from e2ip_plugins.families.condition_trace import VARIABLE
from e2ip_plugins.families.e2ip_ablation import FACTORISATION_FAILED
from e2ip_plugins.files import replacing

#: Version of what `settings` means.
VERSION = 3

#: What runs a stage: marks it as finished even where this program has been killed meanwhile. A status of 0 alone does
#: not say so: Lightning ends with it when a training is terminated, without the files that were to come.
_SHELL = '"$@" && ls {writes} > /dev/null && touch "$0"'

#: Processor time of every stage in seconds, in a run's folder.
SECONDS = "seconds.json"

Tell = Callable[[str], None]


def settings(run: Run, plan: Plan, with_data: bool = True) -> Dict[str, Any]:
    """All that a run's result depends on, for JSON; without data for tables alone."""
    dataset = plan.sets[run.dataset]
    described = {name: value for name, value in non_defaults(dataset).items() if name not in ("methods", "about")}
    method = {k: v for k, v in non_defaults(METHODS[run.method]).items() if k not in ("title", "ensemble", "members")}
    return json.loads(
        json.dumps(
            {
                "version": VERSION,
                "run": run._asdict(),
                "method": method,
                "dataset": described,
                "epochs": commands.epochs(run, dataset, plan.preset),
                "frames": plan.preset.frames,
                "arguments": plan.preset.arguments.get(run.host, ()),
                **({"data": data.fingerprints(run.dataset, dataset, plan.roots)} if with_data else {}),
            }
        )
    )


def _differences(before: object, now: object, name: str) -> List[str]:
    """Return what differs between two settings, each with its key and both values."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = dict.fromkeys((*before, *now))
        return [text for key in keys for text in _differences(before.get(key), now.get(key), f"{name}.{key}")]
    return [] if before == now else [f"{name}: {before}, now {now}"]


def check_settings(runs: Sequence[Run], plan: Plan, with_data: bool = True) -> None:
    """`InputError` for a folder that holds something which was made with other settings, or of other data."""
    for run in runs:
        note = plan.out / "runs" / run.name / "run.json"
        if not note.exists() or not any(note.parent.glob("*.done")):
            continue
        try:
            before = json.loads(note.read_text())
        except ValueError as error:
            raise InputError(f"{note} is no JSON ({error}): remove the folder {note.parent}") from error
        now = settings(run, plan, with_data)
        differing = [text for key in now for text in _differences(before.get(key), now[key], key)]
        if differing:
            raise InputError(
                f"{note.parent} was made with other settings ({'; '.join(differing)}): give another --out, or "
                "remove that folder to train it anew"
            )


def finished(run: Run, out: Path) -> bool:
    """Whether every prediction exists."""
    return (out / "runs" / run.name / "finished").exists()


def execute(run: Run, plan: Plan, tell: Tell = print) -> bool:
    """Train and predict what is missing; return whether nothing is missing any more.

    A folder is locked by whoever works in it, its commands included: those of a program that was killed are waited
    for, and nothing is trained twice.
    """
    if finished(run, plan.out):
        return True
    if METHODS[run.method].base:
        base = run._replace(method=METHODS[run.method].base)
        check_settings([base], plan)
        if not execute(base, plan, tell):
            return False
    folder = plan.out.resolve() / "runs" / run.name
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell(f"{run.name}: somebody works in {folder}; waiting")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if finished(run, plan.out):
            return True
        with replacing(folder / "run.json") as unfinished:
            unfinished.write_text(json.dumps(settings(run, plan), indent=1) + "\n")
        return _work(run, plan, folder, lock.fileno(), tell)


def _work(run: Run, plan: Plan, folder: Path, lock: int, tell: Tell) -> bool:
    dataset = plan.sets[run.dataset]
    files = prepare(run.dataset, plan)
    trace = {VARIABLE: str(folder / commands.TRACE)} if METHODS[run.method].readout else {}
    environment = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **os.environ, **trace}
    started = time.time()
    tell(f"{run.name}: training; see {folder / 'log.txt'}")
    for stage in commands.stages(run, dataset, plan.preset, files, folder):
        done = folder / f"{stage.name}.done"
        if done.exists():
            continue
        for name in stage.writes:  # of a stage that was killed: NequIP's writer appends
            (folder / name).unlink(missing_ok=True)
        code = _run(stage, done, environment, lock)
        if code and METHODS[run.method].early and FACTORISATION_FAILED in (folder / "log.txt").read_text():
            (folder / commands.FAILED).touch()
            break
        if code:
            tell(f"{run.name}: {stage.name} failed with status {code}; see {folder / 'log.txt'}")
            return False
    (folder / "finished").touch()
    tell(f"{run.name}: finished, {(time.time() - started) / 60:.1f} min")
    return True


def _run(stage: commands.Stage, done: Path, environment: Dict[str, str], lock: int) -> int:
    """Run one command in the folder of ``done``, add its processor time to `SECONDS`, return its status."""
    folder = done.parent
    with open(folder / "log.txt", "a") as log:
        log.write(f"\n$ {' '.join(stage.command)}\n")
        log.flush()
        process = subprocess.Popen(
            ["/bin/sh", "-c", _SHELL.format(writes=shlex.join(stage.writes)), str(done), *stage.command],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=log,
            # Its copy of the lock outlives this program.
            pass_fds=(lock,),
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    kept = folder / SECONDS
    seconds = data.read_json(kept) if kept.exists() else {}
    seconds[stage.name] = seconds.get(stage.name, 0.0) + round(usage.ru_utime + usage.ru_stime, 1)
    kept.write_text(json.dumps(seconds) + "\n")
    return process.returncode


def prepare(name: str, plan: Plan) -> Dict[str, Path]:
    """Files of a data set of the plan, by label; see `data.prepare`."""
    return data.prepare(name, plan.sets[name], plan.roots, plan.out.resolve() / "data", plan.preset.frames)


def check_cluster(cluster: str) -> None:
    """`InputError` where `execute_all` cannot start jobs on a cluster."""
    if cluster and find_spec("submitit") is None:
        raise InputError("--cluster needs submitit: install e2ip-plugins[cluster], too")


def execute_all(plan: Plan, tell: Tell = print) -> List[Run]:
    """Execute the runs of a plan, as many at a time as its options say; return those that failed."""
    todo = [run for run in plan.runs if not finished(run, plan.out)]
    for name in {run.dataset for run in todo}:  # once, before any run needs them, and before anything is started
        prepare(name, plan)
    tell(f"{len(plan.runs) - len(todo)} of {len(plan.runs)} runs are finished; {len(todo)} to go")
    for run in todo:
        base = METHODS[run.method].base
        if base and finished(run._replace(method=base), plan.out):
            commands.base(run, plan.out / "runs" / run.name)
    jobs, cluster = plan.options.jobs, plan.options.cluster
    if cluster:
        import submitit

        executor = submitit.AutoExecutor(folder=plan.out / "submitit", cluster=cluster)
        executor.update_parameters(name="e2ip-bench", slurm_array_parallelism=jobs, timeout_min=24 * 60)
        started = executor.map_array(execute, todo, [plan] * len(todo))
        return [run for run, job in zip(todo, started, strict=True) if not job.result()]
    speaking = threading.Lock()

    def tell_one_by_one(text: str) -> None:
        with speaking:
            tell(text)

    with ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(partial(execute, plan=plan, tell=tell_one_by_one), todo))
    return [run for run, good in zip(todo, results, strict=True) if not good]
