"""What a prediction costs: all methods of a set in turn, on the same frame, so that what the machine does hits all."""

import json
import statistics
import time
from importlib.metadata import entry_points
from pathlib import Path
from typing import Callable, Dict, List, Sequence, Set

import numpy as np

from e2ip_plugins.bench.catalogue import METHODS, framework
from e2ip_plugins.bench.commands import MODELS
from e2ip_plugins.bench.data import read_json
from e2ip_plugins.bench.plan import Run
from e2ip_plugins.files import replacing

#: Calls of every model: warm up first, then measured.
WARM_UP, ROUNDS = 5, 30


def path(dataset: str, host: str, out: Path) -> Path:
    """Where the figures of a set are kept."""
    return out / "cost" / f"{dataset}_{host}.json"


def measure(runs: Sequence[Run], out: Path, tell: Callable[[str], None] = print) -> None:
    """Time the models of the first seed and the members of ensembles, ASE calculators on one thread.

    Sets are skipped whose figures exist for all of these models. Models that do not exist are skipped, and ensembles
    that lack one. What was timed before, in a call for other methods, is timed again beside them.
    """
    for dataset, host in dict.fromkeys((run.dataset, run.host) for run in runs):
        chosen = [run for run in runs if (run.dataset, run.host) == (dataset, host)]
        chosen = [run for run in chosen if run.seed == 1 or METHODS[run.method].ensemble]
        chosen = [run for run in chosen if not METHODS[run.method].early]
        kept = path(dataset, host, out)
        before = read_json(kept) if kept.exists() else {"models": []}
        chosen = list(dict.fromkeys([*chosen, *(Run.of(name, dataset, host) for name in before["models"])]))
        models = {run: out / "runs" / run.name / MODELS[framework(host)] for run in chosen}
        models = {run: file for run, file in models.items() if file.exists()}
        if models and not {run.name for run in models} <= set(before["models"]):
            tell(f"{dataset}, {host}: timing {len(models)} models")
            kept.parent.mkdir(parents=True, exist_ok=True)
            lacking = {run.method for run in chosen if run not in models}
            measured = _measure(models, lacking, out / "data" / f"{dataset}_test.extxyz")
            with replacing(kept) as unfinished:
                unfinished.write_text(json.dumps(measured, indent=1) + "\n")


def _measure(models: Dict[Run, Path], lacking: Set[str], frames: Path) -> dict:
    """Milliseconds per atom of methods and of their ensembles, except of those ``lacking`` members."""
    import ase.io
    import torch

    host = framework(next(iter(models)).host)
    (calculator_of,) = entry_points(group="e2ip_plugins.calculator", name=host)
    open_model, atoms = calculator_of.load(), ase.io.read(frames, index=0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        calculators = {run: open_model(file) for run, file in models.items()}
        times: Dict[Run, List[float]] = {run: [] for run in models}
        rng = np.random.default_rng(0)
        for i in range(WARM_UP + ROUNDS):
            moved = atoms.copy()
            moved.positions += rng.normal(scale=0.01, size=moved.positions.shape)
            for run, calculator in calculators.items():
                started = time.perf_counter()
                calculator.calculate(moved, ["forces"])
                if i >= WARM_UP:
                    times[run].append(1000.0 * (time.perf_counter() - started) / len(atoms))
    finally:
        torch.set_num_threads(threads)
    figures = {METHODS[run.method].title: statistics.median(times[run]) for run in models if run.seed == 1}
    for method in dict.fromkeys(run.method for run in models if METHODS[run.method].ensemble):
        if method in lacking:
            continue
        members = [times[run] for run in models if run.method == method]
        figures[METHODS[method].ensemble] = statistics.median(map(sum, zip(*members, strict=True)))
    return {"models": [run.name for run in models], "atoms": len(atoms), "ms_per_atom": figures}
