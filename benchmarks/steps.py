"""Commands that are run once: what is finished is skipped, what was stopped begins anew."""

import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple


class Step(NamedTuple):
    """A command, done once its mark is there.

    Attributes
    ----------
    name : str
        Of its log and mark.
    command : list of str
    writes : tuple of str
        What is removed before it starts.
    passes : tuple of int
        Exit statuses that are no failure.
    """

    name: str
    command: list[str]
    writes: tuple[str, ...] = ()
    passes: tuple[int, ...] = (0,)


def seen_from(folder: Path, path: Path) -> str:
    """Relative: what has been done stays done where the clone is moved."""
    return os.path.relpath(path, folder)


def run(folder: Path, step: Step) -> None:
    """A command in a folder, with one thread, unless it has finished there."""
    folder.mkdir(parents=True, exist_ok=True)
    mark, text = folder / f"{step.name}.done", shlex.join(step.command)
    if mark.exists():
        if mark.read_text() != text:
            sys.exit(f"{mark}: was made with other settings; remove {folder} or choose another --work")
        return
    for name in step.writes:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    print(f"[{folder.name}] $ {text}", flush=True)
    began = time.monotonic()
    own = {"PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))}
    own |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with (folder / f"{step.name}.log").open("w") as log:
        done = subprocess.run(step.command, cwd=folder, stdout=log, stderr=log, env={**os.environ, **own})
    if done.returncode not in step.passes:
        sys.exit(f"{folder / f'{step.name}.log'}: status {done.returncode}")
    mark.write_text(text)
    print(f"[{folder.name}] {step.name}: {time.monotonic() - began:.0f} s", flush=True)
