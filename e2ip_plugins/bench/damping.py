"""Condition numbers at the beginning of trainings, with and without dampers, in the published numerics and in ours."""

from pathlib import Path
from typing import Any, Dict, List, Sequence

import numpy as np
from matplotlib.figure import Figure

from e2ip_plugins.bench.catalogue import EARLY
from e2ip_plugins.bench.commands import FAILED, TRACE
from e2ip_plugins.bench.plan import Plan, Run


def read(path: Path) -> np.ndarray:
    """Return the figures (steps,) of a trace by name; `e2ip_plugins.families.condition_trace` writes it."""
    return np.atleast_1d(np.genfromtxt(path, delimiter=",", names=True))


def summarise(run: Run, out: Path) -> Dict[str, Any]:
    """What a training's beginning shows, for JSON: how far it came and how ill-conditioned it was on the way.

    ``largest`` is the largest ratio of the extreme eigenvalues of an atom whose least one is positive, ``indefinite``
    the number of predictions of an atom where it is not, ``first_indefinite`` the first step with one, from 1.
    """
    folder = out / "runs" / run.name
    trace, options = read(folder / TRACE), EARLY[run.method].options
    lost = np.flatnonzero(trace["indefinite"] > 0)
    return {
        "dataset": run.dataset,
        "host": run.host,
        "seed": run.seed,
        "numerics": options["numerics"],
        "damper": options["damper"],
        "learning_rate": EARLY[run.method].learning_rate,
        "steps": len(trace["mean"]),
        "failed": (folder / FAILED).exists(),
        "largest": float(np.nanmax(trace["largest"])),
        "indefinite": int(trace["indefinite"].sum()),
        "first_indefinite": int(lost[0]) + 1 if len(lost) else None,
        "not_finite": int(trace["not_finite"].sum()),
    }


def table(rows: Sequence[Dict[str, Any]]) -> List[str]:
    """Markdown of `summarise`, a line for every host, numerics, damper and learning rate."""
    lines = [
        "| host | numerics | damper | learning rate | trainings ended by Cholesky | after steps | largest λmax/λmin | "
        "predictions with λmin ≤ 0 |",
        "|---" * 8 + "|",
    ]
    groups: Dict[Any, List[Dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[k] for k in ("host", "numerics", "damper", "learning_rate")), []).append(row)
    for (host, numerics, damper, rate), of_group in groups.items():
        steps = ", ".join(str(row["steps"]) for row in of_group if row["failed"])
        ended = f"{sum(row['failed'] for row in of_group)} of {len(of_group)}"
        largest, lost = max(row["largest"] for row in of_group), sum(row["indefinite"] for row in of_group)
        lines.append(f"| {host} | {numerics} | {damper} | {rate:g} | {ended} | {steps} | {largest:.2g} | {lost} |")
    return lines


def figure(runs: Sequence[Run], out: Path) -> Figure:
    """Mean and range of the ratio of eigenvalues over the atoms of every batch, step by step, as the paper draws it."""
    panels = [(numerics, damper) for numerics in ("published", "closed") for damper in ("on", "off")]
    rates = sorted({method.learning_rate for method in EARLY.values()})
    drawn = Figure(figsize=(11, 7), layout="constrained")
    for axes, (numerics, damper) in zip(drawn.subplots(2, 2, sharex=True, sharey=True).ravel(), panels, strict=True):
        for i, rate in enumerate(rates):
            for run in (run for run in runs if run.method == f"{numerics}-{damper}-{rate:g}"):
                trace = read(out / "runs" / run.name / TRACE)
                steps = np.arange(1, len(trace["mean"]) + 1)
                axes.fill_between(steps, trace["least"], trace["largest"], color=f"C{i}", alpha=0.25, linewidth=0)
                axes.plot(steps, trace["mean"], color=f"C{i}", label=f"learning rate {rate:g}")
                if (out / "runs" / run.name / FAILED).exists():
                    axes.axvline(steps[-1], color=f"C{i}", linestyle="--")
        axes.set(title=f"{numerics}, damper {damper}", xscale="log", yscale="symlog")
        if axes.lines:
            axes.legend()
    drawn.supxlabel("training step")
    drawn.supylabel("λmax/λmin of the covariance: mean and range over atoms")
    return drawn


def beginnings(runs: Sequence[Run], plan: Plan) -> List[Dict[str, Any]]:
    """Rows of finished runs of this kind; writes a figure for every set and host into the folder of tables."""
    for name, host in dict.fromkeys((run.dataset, run.host) for run in runs):
        first = [run for run in runs if (run.dataset, run.host, run.seed) == (name, host, 1)]
        path = plan.out / f"{plan.name}_{plan.options.preset}_{name}_{host}.png"
        figure(first, plan.out).savefig(path, dpi=110)
    return [summarise(run, plan.out) for run in runs]
