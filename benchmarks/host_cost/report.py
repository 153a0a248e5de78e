"""Results of ``benchmarks/hosts.py`` as Markdown tables, and the plot of cost against atoms."""

import json
import math
import statistics
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from host_cost.settings import COMMITTEE_SIZE, TASKS, VARIANTS

_RESAMPLES = 2000
_COLUMNS = (
    "system",
    "rounds",
    *(f"{variant}, ms" for variant in VARIANTS),
    *(f"{variant}, ms/atom" for variant in VARIANTS),
    "e2ip / baseline",
    "committee / e2ip",
    "memory e2ip / baseline",
)
_CAPTION = (
    f"Times of one step: median (quartiles). Ratios are taken within rounds: median (95 % interval of the median, "
    f"by bootstrap). A committee is {COMMITTEE_SIZE} stock models, one after the other. Neighbour lists are made "
    "beforehand and not counted. Memory: growth during a step, median of its repeats."
)


def load(paths: list[Path]) -> list[dict]:
    return [json.loads(path.read_text()) for path in paths]


def tables(reports: list[dict], clock: str = "wall") -> str:
    """Markdown: for every file, mode and task one table, the exponent of the overhead and what is missing."""
    blocks = []
    for report in reports:
        blocks.append(_heading(report, clock))
        modes = list(dict.fromkeys(result["mode"] for result in report["results"]))
        for mode in modes:
            for task in TASKS:
                results = [r for r in report["results"] if (r["mode"], r["task"]) == (mode, task)]
                done = [r for r in results if "times" in r]
                if done:
                    blocks.append(f"### {report['host']}, {mode}, {task}")
                    blocks.append(_table(done, clock))
                    blocks.append(exponent(done, clock)["text"])
                    if all("inside" in r for r in done):
                        blocks.append(_inside(done))
                blocks += [f"- {r['system']}, {mode}, {task}: {r['failed']}" for r in results if "failed" in r]
                blocks += [_profile(r) for r in done if "profile" in r]
    return "\n\n".join([*blocks, _CAPTION]) + "\n"


def _heading(report: dict, clock: str) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    done = [r for r in report["results"] if "times" in r]
    spent = {c: sum(sum(times[c]) for r in done for times in r["times"].values()) for c in ("wall", "cpu")}
    machine = f"{report['hardware']}, {report['threads']} thread(s), {report['dtype']}"
    machine += f", cutoff {report['cutoff']} Å" if report.get("cutoff") else ""
    line = f"{versions}; {machine}; e2ip kernel {report['kernel']}; {clock} time."
    if report["device"] == "cpu" and spent["wall"] > 0:
        share = spent["cpu"] / spent["wall"] / report["threads"]
        line += f" The measured process had {share:.0%} of its cores" + ("." if share > 0.9 else ": a busy machine.")
    network = report.get("size", "full")
    title = report["host"] if network in ("full", "tiny") else f"{report['host']}, {network}"
    return f"## {title}\n\n{line}"


def _table(results: list[dict], clock: str) -> str:
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|---" * len(_COLUMNS) + "|"]
    for r in results:
        times = {variant: np.array(timed[clock]) for variant, timed in r["times"].items()}
        cells = [r["system"], str(len(times["e2ip"]))]
        cells += [_quartiles(1e3 * times[v]) if v in times else "" for v in VARIANTS]
        cells += [_digits(1e3 * np.median(times[v]) / r["atoms"]) if v in times else "" for v in VARIANTS]
        processes = r.get("by_process", ())
        range_ = f"; processes {min(processes):.3f}–{max(processes):.3f}" if processes else ""
        cells += [_ratio(times["e2ip"] / times["baseline"]) + range_]
        cells += [_ratio(times["committee"] / times["e2ip"]) if "committee" in times else ""]
        lines.append("| " + " | ".join([*cells, _memory_ratio(r.get("memory", {}))]) + " |")
    return "\n".join(lines)


def _digits(value: float, significant: int = 3) -> str:
    """A positive number with so many significant digits and without exponent."""
    decimals = significant - 1 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:.{max(0, decimals)}f}"


def _quartiles(values: np.ndarray) -> str:
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    return f"{_digits(middle)} ({_digits(low)}–{_digits(high)})"


def _ratio(values: np.ndarray) -> str:
    low, high = np.quantile(_resampled_medians(values), [0.025, 0.975])
    return f"{np.median(values):.3f} ({low:.3f}–{high:.3f})"


def _memory_ratio(memory: dict) -> str:
    if not memory.get("baseline") or not memory.get("e2ip"):
        return ""
    return f"{statistics.median(memory['e2ip']) / statistics.median(memory['baseline']):.3f}"


def _resampled_medians(values: np.ndarray) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.median(rng.choice(values, (_RESAMPLES, len(values))), axis=1)


def exponent(results: list[dict], clock: str) -> dict:
    """Exponent b of the overhead e2ip - baseline ∝ atoms^b over boxes of water, with its 95 % interval.

    The overhead of a system is the median over rounds; systems where it cannot be told from zero (95 % interval
    by bootstrap) are left out and named, because a fit to positive noise alone would look fine. Launch costs
    that do not grow with the system pull the exponent below one.
    """
    used, unclear = [], []
    for r in results:
        if not r["periodic"]:
            continue
        difference = np.array(r["times"]["e2ip"][clock]) - np.array(r["times"]["baseline"][clock])
        medians = _resampled_medians(difference)
        if np.quantile(medians, 0.025) > 0:
            used.append((r["atoms"], np.median(difference), medians))
        else:
            unclear.append(r["atoms"])
    noise = f" Within noise: {', '.join(map(str, unclear))} atoms." if unclear else ""
    if len(used) < 2:
        return {"text": f"Exponent of the overhead: needs two sizes of water whose overhead is above noise.{noise}"}
    atoms = np.log([n for n, _, _ in used])
    best = np.polyfit(atoms, np.log([d for _, d, _ in used]), 1)
    resampled = np.log(np.maximum(np.stack([m for *_, m in used]), 1e-12))
    low, high = np.quantile(np.polyfit(atoms, resampled, 1)[0], [0.025, 0.975])
    sizes = ", ".join(str(n) for n, _, _ in used)
    text = f"Exponent of the overhead in atoms: {best[0]:.2f} ({low:.2f}–{high:.2f}), from {sizes} atoms.{noise}"
    return {"text": text, "exponent": best[0], "interval": (low, high), "prefactor": math.exp(best[1])}


def _inside(results: list[dict]) -> str:
    """Time inside the readout, its share of the baseline, and how it grows with the number of atoms."""
    lines = ["| atoms | in the readout, ms | µs/atom | per baseline |", "|---|---|---|---|"]
    for r in results:
        inside, baseline = np.array(r["inside"]), np.median(r["times"]["baseline"]["wall"])
        middle = np.median(inside)
        cells = (_quartiles(1e3 * inside), _digits(1e6 * middle / r["atoms"]), f"{middle / baseline:.2%}")
        lines.append(f"| {r['atoms']} | " + " | ".join(cells) + " |")
    boxes = [(r["atoms"], np.median(r["inside"])) for r in results if r["periodic"]]
    text = "Time inside the readout during a prediction."
    if len(boxes) > 1:
        atoms, seconds = np.log(np.array(boxes)).T
        steps = np.diff(seconds) / np.diff(atoms)
        text += f" Exponent in atoms over boxes of water: {np.polyfit(atoms, seconds, 1)[0]:.2f}; from one box to the "
        text += "next " + ", ".join(f"{step:.2f}" for step in steps) + "."
    return "\n".join([text, "", *lines])


def _profile(result: dict) -> str:
    profile = result["profile"]
    lines = [
        f"Profile, {result['system']}, {result['mode']}, {result['task']}: {profile['note']}",
        "",
        "| part | forward ops | forward, ms | backward ops | backward, ms |",
        "|---|---|---|---|---|",
    ]
    for part, row in profile["parts"].items():
        forward, backward = row["forward_ms"], row["backward_ms"]
        counts = [f"{row[key]:.0f}" for key in ("forward_ops", "backward_ops")]
        lines.append(f"| {part} | {counts[0]} | {forward:.2f} | {counts[1]} | {backward:.2f} |")
    return "\n".join(lines)


def plot(reports: list[dict], target: Path, clock: str = "wall") -> None:
    """Milliseconds per step against atoms, one panel per host and task; one line style per mode."""
    colours = {"baseline": "0.45", "e2ip": "#0072B2", "committee": "#D55E00"}
    styles = {"eager": "-", "compile": "--", "aoti": "--", "script": ":"}
    tasks = [task for task in TASKS if any(r["task"] == task and "times" in r for x in reports for r in x["results"])]
    with matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}):
        figure = Figure(figsize=(4.5 * max(1, len(tasks)), 3.6 * len(reports)), layout="constrained")
        panels = figure.subplots(len(reports), max(1, len(tasks)), squeeze=False)
        for row, report in zip(panels, reports, strict=True):
            for axes, task in zip(row, tasks, strict=False):
                done = [r for r in report["results"] if r["task"] == task and "times" in r]
                for mode in dict.fromkeys(r["mode"] for r in done):
                    for variant in VARIANTS:
                        of_mode = [r for r in done if r["mode"] == mode and variant in r["times"]]
                        of_mode.sort(key=lambda r: r["atoms"])
                        if not of_mode:
                            continue
                        quartiles = [1e3 * np.quantile(r["times"][variant][clock], [0.25, 0.5, 0.75]) for r in of_mode]
                        low, middle, high = np.array(quartiles).T
                        axes.errorbar(
                            [r["atoms"] for r in of_mode],
                            middle,
                            yerr=[middle - low, high - middle],
                            color=colours[variant],
                            linestyle=styles[mode],
                            marker="o",
                            markersize=3,
                            label=variant if mode == "eager" else f"{variant}, {mode}",
                        )
                inside = sorted((r["atoms"], 1e3 * np.median(r["inside"])) for r in done if "inside" in r)
                if inside:
                    axes.plot(*np.array(inside).T, color=colours["e2ip"], linestyle=":", marker="o", markersize=3)
                    axes.lines[-1].set_label("inside the readout")
                axes.set(xscale="log", yscale="log", xlabel="atoms", ylabel=f"ms per step ({clock})")
                axes.set_title(f"{report['host']}, {task}, {report['device']}", loc="left")
                if done:
                    axes.legend()
        figure.savefig(target, dpi=150)
