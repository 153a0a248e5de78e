"""What a monitor is worth: alarms of runs where nothing is wrong, and stops of runs that are heated until all is.

    python benchmarks/monitor.py --jobs 2   # runs what is missing, an hour or two on two cores; then the tables
    python benchmarks/monitor.py --table    # tables and figure of the results

Needs an environment with e2ip-plugins[mace] and tblite. Models of the demo's 300 K training frames and 1000 of two
further trajectories: one with evidence mode leverage, one coupled, a committee of five stock ones. The first runs
2-methoxyacetamide (``e2ip md``), at 300 K and with ramps to 1500 K, and nothing stops it; every tenth step is labelled
with GFN2-xTB (``e2ip label``) and predicted by all models. Thresholds are quantiles of 1500 held-out frames of three
more trajectories, by the rule of `Monitor`: a check is above where an atom is, and a run is stopped where the median
over the window's checks is. Every detector is judged by the error of its own model, or of the mean of the committee.
The first table counts stops by each threshold, the second says when runs are stopped by one of them. The third says
how well a detector can tell the runs apart at all: it counts ramps whose value, before their error is too large,
exceeds every value of the 300 K runs before theirs is.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import ase.io
import numpy as np
from common import (
    DEMO_DATA,
    GFN2_XTB,
    ROOT,
    Step,
    load,
    mace_predictions,
    mace_training,
    markdown,
    parser_of,
    relative,
    run,
    save,
)
from matplotlib.figure import Figure

from e2ip_plugins.scores.frame_maxima import quantile

COMMITTEE = tuple(f"stock{seed}" for seed in range(1, 6))
READOUTS = {"leverage": ["--readout=e2ip"], "coupled": ["--readout=e2ip", "--e2ip_evidence=coupled"]}
#: Quantiles of held-out frames; checks over which the median is taken before a run is stopped.
LEVELS, WINDOWS = ("0.95", "0.97", "0.98", "0.99"), ("5", "21")
#: Error of an atom beyond which a run has gone on for too long, in 99th percentiles of the held-out frames' errors.
TOO_LARGE = 5.0
#: Steps between two checks.
INTERVAL = 10
#: First seed of the runs. Lower ones showed what to train on and which windows to try: no table has them.
FIRST_SEED = 10
#: Seeds of further trajectories like the demo's, which have the seeds 11 to 13.
TRAINING_SEEDS, HELD_OUT_SEEDS = (21, 22), (23, 24, 25)
#: Level and window of the rule in the figure and the second table.
DRAWN = "0.98", "21"
#: Detector -> file of the predictions and per-atom column; the committee has its spread.
DETECTORS = {
    "leverage": ("leverage", "MACE_e2ip_leverage"),
    "epistemic std": ("leverage", "MACE_forces_epistemic_std"),
    "coupled, epistemic std": ("coupled", "MACE_forces_epistemic_std"),
    "committee of five": ("committee", ""),
}


class Runs(NamedTuple):
    """Runs of one kind: temperature in K as `e2ip md` takes it, their steps and their number."""

    temperature: str
    steps: int
    number: int


#: Temperatures of a ramp in K.
COLD, HOT = 300.0, 1500.0
RUNS = {
    "cold": Runs(f"{COLD:g}", 10_000, 2),
    "ramp": Runs(f"{COLD:g}:{HOT:g}", 4_000, 20),
    "slow": Runs(f"{COLD:g}:{HOT:g}", 10_000, 10),
}
NAMES = [f"{kind}_{FIRST_SEED + i}" for kind, runs in RUNS.items() for i in range(runs.number)]
#: Further frames to train on, held-out ones, and epochs of a training.
TRAINING, HELD_OUT, EPOCHS = 1000, 1500, 40


class Checks(NamedTuple):
    """A detector over the checks of a run: values (T, N), errors (T, N) in eV/Å, steps (T,)."""

    values: np.ndarray
    errors: np.ndarray
    steps: np.ndarray


def prepare(work: Path, jobs: int) -> None:
    """Make frames, models, runs, labels and predictions."""
    train, held_out = work / "train.extxyz", work / "held_out" / "frames.extxyz"
    held_out.parent.mkdir(parents=True, exist_ok=True)
    if not train.exists():
        frames = ase.io.read(DEMO_DATA / "train.extxyz", ":") + at_300_kelvin(TRAINING, TRAINING_SEEDS)
        ase.io.write(train, frames, format="extxyz")
    if not held_out.exists():
        ase.io.write(held_out, at_300_kelvin(HELD_OUT, HELD_OUT_SEEDS), format="extxyz")

    def train_model(name: str) -> None:
        seed = int(name.removeprefix("stock")) if name in COMMITTEE else 1
        options = READOUTS.get(name, [])
        run(work / name, mace_training(work / name, "mace_baseline", train, seed, EPOCHS, *options))

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(train_model, (*READOUTS, *COMMITTEE)))
        predicted = pool.submit(predict, work, work / "held_out", held_out)
        list(pool.map(lambda name: watch(work, name), NAMES))
        predicted.result()


def watch(work: Path, name: str) -> None:
    """Make a run, its labels, and the predictions of all models."""
    kind, seed = name.split("_")
    folder = work / name
    command = ["e2ip", "md", relative(folder, work / "leverage" / "model.model")]
    command += [relative(folder, DEMO_DATA / "train.extxyz"), "run.extxyz", f"--frame={seed}", f"--seed={seed}"]
    temperature, steps, _ = RUNS[kind]
    command += [f"--steps={steps}", f"--temperature={temperature}", f"--interval={INTERVAL}"]
    run(folder, Step("md", command, ("run.extxyz",)))
    # Frames of which GFN2-xTB finds no solution are left out, with status 1.
    run(folder, Step("label", ["e2ip", "label", "run.extxyz", "labelled.extxyz", *GFN2_XTB], passes=(0, 1)))
    predict(work, folder, folder / "labelled.extxyz")


def at_300_kelvin(frames: int, seeds: tuple[int, ...]) -> list[ase.Atoms]:
    """Return frames like the demo's, of as many further trajectories as there are seeds."""
    sys.path.insert(0, str(ROOT / "demo"))
    import make_data

    start, each = make_data.relaxed_molecule(), frames // len(seeds)
    return [f for seed in seeds for f in make_data.trajectory(f"seed {seed}", start, COLD, each, seed=seed)]


def predict(work: Path, folder: Path, frames: Path) -> None:
    """Predict frames by all models, into a folder."""
    for name in (*READOUTS, *COMMITTEE):
        run(folder, mace_predictions(folder, name, work / name / "model.model", frames))


def read(folder: Path) -> dict[str, Checks]:
    """Return the checks of every detector on the frames in a folder."""
    frames = {name: ase.io.read(folder / f"{name}.xyz", ":") for name in (*READOUTS, *COMMITTEE)}
    steps = np.array([atoms.info.get("md_step", i) for i, atoms in enumerate(frames["leverage"])])
    reference = stacked(frames["leverage"], "REF_forces")
    members = np.stack([stacked(frames[name], "MACE_forces") for name in COMMITTEE])
    forces = {name: stacked(frames[name], "MACE_forces") for name in READOUTS} | {"committee": members.mean(0)}
    checks = {}
    for detector, (model, column) in DETECTORS.items():
        values = stacked(frames[model], column) if column else np.sqrt(members.var(0, ddof=1).mean(-1))
        checks[detector] = Checks(values, np.linalg.norm(forces[model] - reference, axis=-1), steps)
    return checks


def stacked(frames: list[ase.Atoms], name: str) -> np.ndarray:
    """Return a column of all frames, which ASE may have taken for a result (T, N, …)."""
    return np.stack([a.arrays[name] if name in a.arrays else a.calc.results[name] for a in frames])


def smoothed(values: np.ndarray, window: int) -> np.ndarray:
    """Return medians of every atom over the last checks (T, N), as `Monitor` takes them; 0 before there are enough."""
    medians = np.zeros_like(values)
    for end in range(window, len(values) + 1):
        medians[end - 1] = np.median(values[end - window : end], axis=0)
    return medians


def judge(checks: Checks, held_out: Checks) -> dict:
    """Return what one detector makes of a run, at every threshold."""
    limit = TOO_LARGE * float(np.quantile(held_out.errors, 0.99))
    largest, error = checks.values.max(1), checks.errors.max(1)
    medians = {window: smoothed(checks.values, int(window)).max(1) for window in WINDOWS}
    bad = np.flatnonzero(error > limit)
    end = int(bad[0]) if len(bad) else len(error)
    levels = {}
    for level in LEVELS:
        threshold = quantile(held_out.values.max(1), float(level))
        stops = {window: checks.steps[values > threshold].tolist() for window, values in medians.items()}
        stop = {window: steps[0] if steps else None for window, steps in stops.items()}
        levels[level] = {"threshold": threshold, "above": int((largest > threshold).sum()), "stop": stop}
    return {
        "limit": limit,
        "checks": len(largest),
        "too_large": int(checks.steps[end]) if len(bad) else None,
        "largest_error": float(error.max()),
        "median_until_too_large": {w: float(values[:end].max(initial=0.0)) for w, values in medians.items()},
        "levels": levels,
        "steps": checks.steps.tolist(),
        "value": largest.tolist(),
        "error": error.tolist(),
    }


def collect(work: Path) -> dict[str, dict]:
    """Return what every detector makes of the finished runs; only the figure's kind of run keeps its curves."""
    held_out, results = read(work / "held_out"), {}
    for name in NAMES:
        results[name] = {key: judge(checks, held_out[key]) for key, checks in read(work / name).items()}
        for result in () if name.startswith("ramp") else results[name].values():
            del result["steps"], result["value"], result["error"]
    return results


def in_time(result: dict, level: str, window: str) -> bool:
    """Return whether a run is stopped before its error is too large; a run whose error never is needs no stop."""
    stop, end = result["levels"][level]["stop"][window], result["too_large"]
    return end is None or (stop is not None and stop < end)


def tables(results: dict[str, dict]) -> str:
    """Return the three Markdown tables."""
    kinds = {kind: [runs for name, runs in results.items() if name.startswith(kind)] for kind in RUNS}
    cold, ramps = kinds.pop("cold"), kinds
    titles = [f"ramps of {RUNS[kind].steps} steps" for kind in ramps]
    thresholds = ["detector", "quantile", "above at 300 K", "largest error there / limit"]
    for window in WINDOWS:
        thresholds += [f"window {window}: stopped at 300 K, step", *(f"{title}: in time" for title in titles)]
    apart = ["detector", *(f"window {window}: {title}" for window in WINDOWS for title in titles)]
    drawn = ["detector", "steps of a ramp", "stopped at, median", "first", "error too large at, median"]
    drawn.append("stops that are late: by steps")
    of_thresholds, of_drawn, of_any = [], [], []
    for detector in DETECTORS:
        quiet = [runs[detector] for runs in cold]
        hot = [[runs[detector] for runs in kind] for kind in ramps.values()]
        worst = max((r["largest_error"] / r["limit"] for r in quiet), default=0.0)
        for level in LEVELS:
            share = sum(r["levels"][level]["above"] for r in quiet) / max(1, sum(r["checks"] for r in quiet))
            cells = [detector, level, f"{share:.1%}", f"{worst:.2f}"]
            for window in WINDOWS:
                stops = [r["levels"][level]["stop"][window] for r in quiet]
                cells.append(", ".join(str(stop) for stop in stops if stop is not None) or "no")
                cells += [f"{sum(in_time(r, level, window) for r in kind)} of {len(kind)}" for kind in hot]
            of_thresholds.append(cells)
        of_drawn += [[detector, *when(runs, of)] for runs, of in zip(hot, ramps, strict=True) if runs]
        cells = [detector]
        for window in WINDOWS:
            highest = max((r["median_until_too_large"][window] for r in quiet), default=0.0)
            higher = [[r["median_until_too_large"][window] > highest for r in kind] for kind in hot]
            cells += [f"{sum(each)} of {len(each)}" for each in higher]
        of_any.append(cells)
    return "\n\n".join([markdown(thresholds, of_thresholds), markdown(drawn, of_drawn), markdown(apart, of_any)])


def when(runs: list[dict], kind: str) -> list[str]:
    """Return thermostat temperatures at which the drawn rule stops ramps, and by how many steps late stops are late."""
    steps, (level, window) = RUNS[kind].steps, DRAWN
    ends = [(r["levels"][level]["stop"][window], r["too_large"]) for r in runs]
    stops, bad = (
        [COLD + (HOT - COLD) * end / steps for end in of if end is not None] for of in zip(*ends, strict=True)
    )
    cells = [f"{f(of):.0f} K" if of else "never" for f, of in ((np.median, stops), (min, stops), (np.median, bad))]
    late = [stop - end for stop, end in ends if None not in (stop, end) and stop >= end]
    unstopped = sum(stop is None and end is not None for stop, end in ends)
    texts = [*map(str, sorted(late)), *([f"{unstopped} not stopped"] if unstopped else [])]
    return [str(steps), *cells, ", ".join(texts) or "none"]


def draw(results: dict[str, dict], path: Path) -> None:
    """Draw the ramps: values over their threshold, errors over their limit, stops."""
    level, window = DRAWN
    figure = Figure(figsize=(13.0, 3.6), layout="constrained")
    panels = figure.subplots(1, len(DETECTORS), sharey=True)
    for panel, detector in zip(panels, DETECTORS, strict=True):
        for result in (runs[detector] for name, runs in results.items() if name.startswith("ramp")):
            rule = result["levels"][level]
            for values, unit, color in (("error", result["limit"], "#d55e00"), ("value", rule["threshold"], "#0072b2")):
                panel.plot(result["steps"], np.divide(result[values], unit), color=color, alpha=0.25, lw=0.8)
            if rule["stop"][window] is not None:
                panel.axvline(rule["stop"][window], color="black", alpha=0.4, lw=0.8)
        panel.axhline(1.0, color="black", lw=0.8, ls=":")
        # In mode coupled values have no bound once the molecule is in pieces.
        panel.set(ylim=(0.1, 100.0), yscale="log", xlabel="step of the ramp, 300 to 1500 K", title=detector)
    panels[0].set_ylabel(f"blue: largest value / quantile {level}\nred: largest error / limit")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = parser_of(__doc__, "monitor", "work", "out", "figure", "table")
    parser.add_argument("--jobs", type=int, default=1, help="trainings or runs at a time, one thread each")
    options = parser.parse_args()
    if not options.table:
        work = options.work.resolve()
        prepare(work, options.jobs)
        save(options.out, collect(work), digits=4)
    results = load(options.out)
    print(tables(results))
    draw(results, options.figure)


if __name__ == "__main__":
    main()
