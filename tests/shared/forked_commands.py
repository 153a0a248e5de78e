"""Commands of an environment in processes that have imported torch and the framework already.

An import takes longer than most commands that tests start. Python's forkserver imports once for a worker of pytest, and
every command runs in a fork of it, which is as separate from tests and other commands as a process of its own.
"""

import functools
import importlib.util
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Dict, List, Mapping, Optional, Sequence, Set

#: What the commands import, by framework.
IMPORTS = {"nequip": ["nequip.scripts.train", "nequip_ext"], "mace": ["mace.cli.run_train"]}
#: Variables that are read while modules are imported: with another value a command gets a process of its own.
READ_BY_IMPORTS = ("PYTHONPATH", "E2IP_DISABLE", "OMP_NUM_THREADS")
#: Commands with processes and caches of their own, or that are no Python.
APART = ("nequip-compile", "mpiexec")


@functools.lru_cache(maxsize=1)
def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    modules = [name for host, names in IMPORTS.items() if importlib.util.find_spec(host) for name in names]
    context.set_forkserver_preload(modules)
    return context


def _run(command: List[str], env: Dict[str, str], missing: Set[str], folder: str, outputs: Sequence[str]) -> None:
    # What imports have set stays.
    for name in missing & os.environ.keys():
        del os.environ[name]
    os.environ.update(env)
    os.chdir(folder)
    for stream, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY), stream)
    if command[0] == sys.executable:
        sys.argv = command[1:2] + command[3:]
        exec(compile(command[2], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")


def run_command(
    command: Sequence[object], env: Optional[Mapping[str, str]] = None, cwd: Optional[Path] = None
) -> "subprocess.CompletedProcess[str]":
    """Run a command in a process of its own, and return status and output.

    Parameters
    ----------
    command
        Path of a console script and its arguments, or this Python, ``-c`` and code with its arguments.
    env
        Environment variables, by default those of this process; with ``OMP_NUM_THREADS=1`` unless they have it.
    cwd
        Folder to run in, by default the present one.
    """
    words = [str(word) for word in command]
    env = {"OMP_NUM_THREADS": "1", **(os.environ if env is None else env)}
    apart = Path(words[0]).name in APART or any(env.get(name) != os.environ.get(name) for name in READ_BY_IMPORTS)
    if apart or (words[0] == sys.executable and words[1] != "-c"):
        return subprocess.run(words, env=env, cwd=cwd, capture_output=True, text=True)
    with tempfile.NamedTemporaryFile("r") as output, tempfile.NamedTemporaryFile("r") as errors:
        missing = os.environ.keys() - env.keys()
        arguments = (words, env, missing, str(cwd or Path.cwd()), (output.name, errors.name))
        process = _context().Process(target=_run, args=arguments)
        process.start()
        process.join()
        assert process.exitcode is not None
        return subprocess.CompletedProcess(words, process.exitcode, output.read(), errors.read())
