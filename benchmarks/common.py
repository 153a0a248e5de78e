"""What the benchmark scripts share: options, commands that run once, timing in alternation, tables and results."""

import argparse
import gc
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from e2ip_plugins.files import replacing

ROOT = Path(__file__).resolve().parent.parent
DEMO_DATA = ROOT / "demo" / "data"
FIGURES = ROOT / "docs" / "figures"
RESULTS = ROOT / "benchmarks" / "results"
#: Labels of the demo's data, as options of `e2ip label`.
GFN2_XTB = ["--calculator=tblite.ase:TBLite", "--argument=method=GFN2-xTB"]
GFN2_XTB += ["--argument=accuracy=0.1", "--argument=verbosity=0"]

#: Rounds of `alternate` that always run.
LEAST_ROUNDS = 3


def parser_of(description: str, name: str = "", *standard: str) -> argparse.ArgumentParser:
    """Return a parser that shows the description as it is written and every default.

    Parameters
    ----------
    name : str
        Of the benchmark, for the defaults of the standard options.
    standard : str
        Which of ``work``, ``out``, ``figure`` and ``table`` the script has.
    """

    class Formatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
        pass

    parser = argparse.ArgumentParser(description=description, formatter_class=Formatter)
    paths = {
        "work": (ROOT / "runs" / name, "folder of models and runs"),
        "out": (RESULTS / f"{name}.json", "results"),
        "figure": (FIGURES / f"{name}.png", "figure of the results"),
    }
    for option in standard:
        if option == "table":
            parser.add_argument("--table", action="store_true", help="run nothing, print the results")
        else:
            default, text = paths[option]
            parser.add_argument(f"--{option}", type=Path, default=default, help=text)
    return parser


class Step(NamedTuple):
    """A command that counts as finished once its mark exists.

    Attributes
    ----------
    name : str
        Name of its log and its mark.
    command : list of str
    writes : tuple of str
        Files and folders that are removed before the command starts.
    passes : tuple of int
        Exit statuses that are no failure.
    """

    name: str
    command: list[str]
    writes: tuple[str, ...] = ()
    passes: tuple[int, ...] = (0,)


def environment() -> dict[str, str]:
    """Return environment variables that let a command find this environment's programs and use one thread."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    return os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def relative(folder: Path, path: Path) -> str:
    """Return a path as seen from a folder: finished steps stay finished where the clone is moved."""
    return os.path.relpath(path, folder)


def run(folder: Path, step: Step) -> None:
    """Run a command in a folder with one thread, unless it has finished there; a stopped one begins anew."""
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
    began, log = time.monotonic(), folder / f"{step.name}.log"
    with log.open("w") as file:
        done = subprocess.run(step.command, cwd=folder, stdout=file, stderr=file, env=environment())
    if done.returncode not in step.passes:
        sys.exit(f"{log}: status {done.returncode}")
    mark.write_text(text)
    print(f"[{folder.name}] {step.name}: {time.monotonic() - began:.0f} s", flush=True)


def mace_training(folder: Path, config: str, train: Path, seed: int, epochs: int, *options: str) -> Step:
    """Return the step that trains a small MACE model, ``model.model`` of a folder, on the demo's molecule."""
    command = ["mace_run_train", f"--config={relative(folder, ROOT / 'configs' / f'{config}.yaml')}", "--name=model"]
    command += [f"--seed={seed}", "--num_channels=16", "--max_ell=2", "--correlation=2", "--valid_batch_size=50"]
    command += [f"--max_num_epochs={epochs}", f"--lr_scheduler_gamma={0.05 ** (1 / epochs):.6g}", "--eval_interval=4"]
    command += [
        f"--train_file={relative(folder, train)}",
        f"--valid_file={relative(folder, DEMO_DATA / 'valid.extxyz')}",
    ]
    return Step("train", [*command, *options], ("checkpoints", "logs", "results", "model.model"))


def mace_predictions(folder: Path, name: str, model: Path, frames: Path) -> Step:
    """Return the step that predicts frames by a MACE model, into ``name.xyz`` of a folder."""
    command = ["mace_eval_configs", f"--configs={relative(folder, frames)}", f"--model={relative(folder, model)}"]
    command += [f"--output={name}.xyz", "--default_dtype=float32", "--batch_size=50"]
    return Step(f"predict_{name}", command, (f"{name}.xyz",))


def seconds_of(call: Callable[[], Any]) -> float:
    """Return the wall time of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def alternate(
    calls: dict[str, Callable[[], Any]],
    rounds: int,
    warm_up: int = 1,
    seconds: float = float("inf"),
    clock: Callable[[Callable[[], Any]], float] = seconds_of,
) -> dict[str, list[float]]:
    """Return what ``clock`` measures of every call, by name; ratios are to be taken within rounds.

    Every round makes every call once, in an order drawn anew: none always follows the same one, and a drift of the
    machine hits all alike. After ``seconds`` no further round starts.
    """
    for call in calls.values():
        for _ in range(warm_up):
            call()
    names, rng = list(calls), random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in names}
    began = time.perf_counter()
    gc.collect()
    gc.disable()  # a collection in the middle of one call would be counted as its cost
    try:
        for number in range(1, rounds + 1):
            rng.shuffle(names)
            for name in names:
                times[name].append(clock(calls[name]))
            slowest = max(values[-1] for values in times.values())
            # A collection leaves caches cold for the next call, so it is rare between short calls.
            if slowest > 1.0 or number % 16 == 0:
                gc.collect()
            if number >= LEAST_ROUNDS and time.perf_counter() - began > seconds:
                break
    finally:
        gc.enable()
    return times


def hardware(device: str = "cpu") -> str:
    """Return the name of the GPU or of the processor."""
    if device != "cpu":
        import torch

        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return os.uname().machine


def markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]], left: int | None = None) -> str:
    """Return a Markdown table; columns after the first ``left`` ones, if given, have their text on the right."""
    lines = ["| " + " | ".join(map(str, cells)) + " |" for cells in (columns, *rows)]
    marks = "|---" * len(columns[:left]) + "|--:" * (0 if left is None else len(columns) - left)
    return "\n".join([lines[0], f"{marks}|", *lines[1:]])


def rounded(data: Any, digits: int = 5) -> Any:
    """Return data for JSON with so many significant digits in its floats."""
    if isinstance(data, dict):
        return {key: rounded(value, digits) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [rounded(value, digits) for value in data]
    return float(f"{data:.{digits}g}") if isinstance(data, float) else data


def load(path: Path) -> dict[str, Any]:
    """Return the entries of a file of results, or end with a message."""
    if not path.exists():
        sys.exit(f"{path}: has no results")
    return json.loads(path.read_text(encoding="utf-8"))


def save(path: Path, entries: dict[str, Any], digits: int = 5) -> None:
    """Add entries to a file of results, one line each; others of the same name are replaced."""
    if not entries:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    merged = {**(load(path) if path.exists() else {}), **rounded(entries, digits)}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(merged[name], ensure_ascii=False)}" for name in sorted(merged))
    with replacing(path) as unfinished:
        unfinished.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
