"""What a prediction costs: methods in turn on the same frame, so that other work of the machine slows all alike."""

import json
import statistics
import time
from contextlib import redirect_stderr, redirect_stdout
from importlib.metadata import entry_points
from pathlib import Path
from typing import Callable, Dict, List, Set

import numpy as np

from e2ip_plugins.bench.catalogue import METHODS, framework
from e2ip_plugins.bench.commands import MODELS
from e2ip_plugins.bench.data import read_json
from e2ip_plugins.bench.plan import Plan, Run, ensemble_size, runs
from e2ip_plugins.files import replacing

#: Calls of every model: warm up first, then measured.
WARM_UP, ROUNDS = 5, 30


def path(dataset: str, host: str, out: Path) -> Path:
    """Where the figures of a set are kept."""
    return out / "cost" / f"{dataset}_{host}.json"


def measure(plan: Plan, tell: Callable[[str], None] = print) -> None:
    """Time the models of the first seed and the members of ensembles, ASE calculators on one thread.

    All finished models of a set and host are timed in one go, also those of earlier calls for other methods. Sets are
    skipped where figures of all of them exist.
    """
    for name, host in dict.fromkeys((run.dataset, run.host) for run in plan.runs):
        wanted = [run for run in runs(host, plan.preset, (name,), list(METHODS)) if not METHODS[run.method].early]
        wanted = [run for run in wanted if run.seed <= max(1, ensemble_size(run.method, plan.preset))]
        models = {run: plan.out / "runs" / run.name / MODELS[framework(host)] for run in wanted}
        models = {run: file for run, file in models.items() if file.exists()}
        kept = path(name, host, plan.out)
        if models and not {run.name for run in models} <= set(read_json(kept)["models"] if kept.exists() else ()):
            tell(f"{name}, {host}: timing {len(models)} models")
            kept.parent.mkdir(parents=True, exist_ok=True)
            lacking = {run.method for run in wanted if run not in models}
            frames = plan.out / "data" / f"{name}_{next(iter(plan.sets[name].tests))}.extxyz"
            # MACE and e3nn warn when they open a model.
            with open(kept.with_suffix(".log"), "a") as log, redirect_stdout(log), redirect_stderr(log):
                measured = _measure(models, lacking, frames)
            with replacing(kept) as unfinished:
                unfinished.write_text(json.dumps(measured, indent=1) + "\n")


def _measure(models: Dict[Run, Path], lacking: Set[str], frames: Path) -> dict:
    """Milliseconds per atom of methods and of their ensembles, except of those ``lacking`` members."""
    import ase.io
    import torch

    (calculator_of,) = entry_points(group="e2ip_plugins.calculator", name=framework(next(iter(models)).host))
    open_model, atoms = calculator_of.load(), ase.io.read(frames, index=0)
    calculators = {run: open_model(file) for run, file in models.items()}
    times: Dict[Run, List[float]] = {run: [] for run in models}
    rng, threads = np.random.default_rng(0), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
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
    for method in {run.method for run in models if METHODS[run.method].ensemble} - lacking:
        members = [times[run] for run in models if run.method == method]
        figures[METHODS[method].ensemble] = statistics.median(map(sum, zip(*members, strict=True)))
    return {"models": [run.name for run in models], "atoms": len(atoms), "ms_per_atom": figures}
