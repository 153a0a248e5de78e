"""Results of `hosts.py` as Markdown tables, and the plot of cost against atoms."""

import math
import statistics
from pathlib import Path

import numpy as np
from common import markdown
from hosts_models import COMMITTEE_SIZE
from matplotlib.figure import Figure

VARIANTS = {"baseline": "0.45", "e2ip": "#0072B2", "committee": "#D55E00"}
_COLUMNS = ("system", "rounds", *(f"{v}, ms" for v in VARIANTS), *(f"{v}, ms/atom" for v in VARIANTS))
_COLUMNS += ("e2ip / baseline", "committee / e2ip", "memory e2ip / baseline")
_CAPTION = (
    f"Times of one step: median (quartiles). Ratios are taken within rounds: median (95 % interval of the median, "
    f"by bootstrap). A committee is {COMMITTEE_SIZE} stock models, one after the other. Neighbour lists are made "
    "beforehand and not counted. Memory: growth during a step, median of its repeats.\n"
)


def tables(reports: list[dict]) -> str:
    """Return Markdown: for every report, mode and task one table, and what is missing."""
    blocks = []
    for report in reports:
        versions = ", ".join(f"{name} {version}" for name, version in report.get("versions", {}).items())
        machine = f"{report.get('hardware')}, one thread, cutoff {report['cutoff'] or 5.0} Å"
        blocks.append(f"## {report['host']}, {report['size']}\n\n{versions}; {machine}; kernel {report['kernel']}")
        for mode, task in dict.fromkeys((r["mode"], r["task"]) for r in report["results"]):
            results = [r for r in report["results"] if (r["mode"], r["task"]) == (mode, task)]
            done = [r for r in results if "failed" not in r]
            if done:
                blocks += [f"### {report['host']}, {mode}, {task}", markdown(_COLUMNS, [_row(r) for r in done])]
                blocks += [_inside(done)] if all("inside" in r for r in done) else []
            blocks += [f"- {r['system']}, {mode}, {task}: {r['failed']}" for r in results if "failed" in r]
    return "\n\n".join([*blocks, _CAPTION])


def _row(result: dict) -> list[str]:
    times = {variant: np.array(seconds) for variant, seconds in result["times"].items()}
    cells = [result["system"], str(len(times["e2ip"]))]
    cells += [_quartiles(1e3 * times[v]) if v in times else "" for v in VARIANTS]
    cells += [_digits(1e3 * np.median(times[v]) / result["atoms"]) if v in times else "" for v in VARIANTS]
    processes = result.get("by_process", ())
    limits = f"; processes {min(processes):.3f}–{max(processes):.3f}" if processes else ""
    cells += [_ratio(times["e2ip"] / times["baseline"]) + limits]
    cells += [_ratio(times["committee"] / times["e2ip"]) if "committee" in times else ""]
    peaks = {variant: statistics.median(values) for variant, values in result.get("memory", {}).items() if values}
    return [*cells, f"{peaks['e2ip'] / peaks['baseline']:.3f}" if peaks.get("baseline") else ""]


def _digits(value: float) -> str:
    """Return a positive number with three significant digits and without exponent."""
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def _quartiles(values: np.ndarray) -> str:
    low, middle, high = map(_digits, np.quantile(values, [0.25, 0.5, 0.75]))
    return f"{middle} ({low}–{high})"


def _ratio(values: np.ndarray) -> str:
    medians = np.median(np.random.default_rng(0).choice(values, (2000, len(values))), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return f"{np.median(values):.3f} ({low:.3f}–{high:.3f})"


def _inside(results: list[dict]) -> str:
    """Return the time inside the readout, its share of the baseline, and how it grows with the number of atoms."""
    rows, boxes = [], []
    for r in results:
        inside, middle = np.array(r["inside"]), np.median(r["inside"])
        share = f"{middle / np.median(r['times']['baseline']):.2%}"
        rows.append([r["atoms"], _quartiles(1e3 * inside), _digits(1e6 * middle / r["atoms"]), share])
        boxes += [(r["atoms"], middle)] if r["periodic"] else []
    text = "Time inside the readout during a prediction."
    if len(boxes) > 1:
        atoms, seconds = np.log(np.array(boxes)).T
        steps = ", ".join(f"{step:.2f}" for step in np.diff(seconds) / np.diff(atoms))
        text += f" Exponent in atoms over boxes of water: {np.polyfit(atoms, seconds, 1)[0]:.2f}; from one box to the "
        text += f"next {steps}."
    return f"{text}\n\n{markdown(['atoms', 'in the readout, ms', 'µs/atom', 'per baseline'], rows)}"


def draw(reports: list[dict], target: Path) -> None:
    """Draw milliseconds per eager prediction against atoms, one panel for each report."""
    reports = [report for report in reports if any("inside" in r for r in report["results"])]
    figure = Figure(figsize=(4.5, 3.6 * len(reports)), layout="constrained")
    for axes, report in zip(figure.subplots(len(reports), squeeze=False).flat, reports, strict=True):
        done = [r for r in report["results"] if "inside" in r]
        for variant, color in VARIANTS.items():
            points = [(r["atoms"], 1e3 * np.median(r["times"][variant])) for r in done if variant in r["times"]]
            if points:
                axes.plot(*zip(*points, strict=True), "o-", color=color, markersize=3, label=variant)
        inside = [(r["atoms"], 1e3 * np.median(r["inside"])) for r in done]
        axes.plot(*zip(*inside, strict=True), "o:", color=VARIANTS["e2ip"], markersize=3, label="inside the readout")
        axes.set(xscale="log", yscale="log", xlabel="atoms", ylabel="ms per prediction")
        axes.set_title(f"{report['host']}, {report['device']}", loc="left")
        axes.legend(frameon=False)
    figure.savefig(target, dpi=150)
