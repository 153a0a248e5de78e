"""What a monitor is worth: alarms of runs where nothing is wrong, and stops of runs that are heated until all is.

    python benchmarks/monitor.py --jobs 2   # what is not there yet, an hour or two on two cores; then the tables
    python benchmarks/monitor.py --table    # tables, raw results and figure of what is there
    python benchmarks/monitor.py --quick    # a few minutes: does everything run?

Needs an environment with e2ip-plugins[mace] and tblite. Models of the demo's 300 K training frames and 1000 of two
further trajectories: one with evidence mode leverage, one coupled, a committee of five stock ones. The first runs
2-methoxyacetamide (``e2ip md``), at 300 K and with ramps to 1500 K, and nothing stops it; every tenth step is labelled
with GFN2-xTB (``e2ip label``) and predicted by all models. Thresholds are quantiles of 1500 held-out frames of three
more trajectories, by the rule of `Monitor`: a check is above where an atom is, and a run is stopped where the median
over the window's checks is. Every detector is judged by the error of its own model, or of the mean of the committee.
When runs are stopped by one of the thresholds is in the second table. How well a detector can tell the runs apart at
all, whatever the threshold, is in the third: ramps that get higher before their error is too large than the 300 K runs
do, or do before their own is.
"""

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import ase.io
import numpy as np
from steps import Step, run, seen_from

from e2ip_plugins.scores.frame_maxima import quantile

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "demo" / "data"
COMMITTEE = tuple(f"stock{seed}" for seed in range(1, 6))
READOUTS = {"leverage": ["--readout=e2ip"], "coupled": ["--readout=e2ip", "--e2ip_evidence=coupled"]}
#: Quantiles of held-out frames; checks over which the median is taken before a run is stopped.
LEVELS, WINDOWS = (0.95, 0.97, 0.98, 0.99), (5, 21)
#: Error of an atom beyond which a run has gone on for too long, in 99th percentiles of the held-out frames' errors.
TOO_LARGE = 5.0
INTERVAL = 10
#: Of the runs. Those with seeds below it have shown what to train on and which windows to try: no table has them.
FIRST_SEED = 10
#: Of further trajectories, like the demo's, whose own have 11 to 13.
TRAINING_SEEDS, HELD_OUT_SEEDS = (21, 22), (23, 24, 25)
#: Of `LEVELS` and `WINDOWS`, in the figure.
DRAWN = "0.98", "21"
#: Name, file of the predictions, and per-atom column; the committee has its spread.
DETECTORS = {
    "leverage": ("leverage", "MACE_e2ip_leverage"),
    "epistemic std": ("leverage", "MACE_forces_epistemic_std"),
    "coupled, epistemic std": ("coupled", "MACE_forces_epistemic_std"),
    "committee of five": ("committee", ""),
}


class Runs(NamedTuple):
    """Of one kind: temperature in K as `e2ip md` takes it, steps, how many."""

    temperature: str
    steps: int
    number: int


class Amount(NamedTuple):
    """How much is done: further frames to train on, held-out ones, epochs, runs of every kind."""

    training: int
    held_out: int
    epochs: int
    runs: dict[str, Runs]

    def names(self) -> list[str]:
        return [f"{kind}_{FIRST_SEED + i}" for kind, runs in self.runs.items() for i in range(runs.number)]


RAMP = "300:1500"
FULL = Amount(
    1000, 1500, 40, {"cold": Runs("300", 10_000, 2), "ramp": Runs(RAMP, 4_000, 20), "slow": Runs(RAMP, 10_000, 10)}
)
QUICK = Amount(4, 6, 2, {"cold": Runs("300", 40, 1), "ramp": Runs(RAMP, 60, 1), "slow": Runs(RAMP, 80, 1)})


class Checks(NamedTuple):
    """A detector over the checks of a run: values (T, N), errors (T, N) in eV/Å, steps (T,)."""

    values: np.ndarray
    errors: np.ndarray
    steps: np.ndarray


def prepare(work: Path, amount: Amount, jobs: int) -> None:
    """Frames, models, runs, labels and predictions."""
    train, held_out = work / "train.extxyz", work / "held_out" / "frames.extxyz"
    if not train.exists():
        write(train, ase.io.read(DATA / "train.extxyz", ":") + at_300_kelvin(amount.training, TRAINING_SEEDS))
    if not held_out.exists():
        write(held_out, at_300_kelvin(amount.held_out, HELD_OUT_SEEDS))

    def train_model(name: str) -> None:
        made = ("checkpoints", "logs", "results", "model.model")
        run(work / name, Step("train", training(work / name, name, train, amount.epochs), made))

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(train_model, (*READOUTS, *COMMITTEE)))
        predicted = pool.submit(predict, work, work / "held_out", held_out)
        list(pool.map(lambda name: watch(work, name, amount), amount.names()))
        predicted.result()


def watch(work: Path, name: str, amount: Amount) -> None:
    """A run, its labels, and what all models say of it."""
    kind, seed = name.split("_")
    folder = work / name
    command = ["e2ip", "md", seen_from(folder, work / "leverage" / "model.model")]
    command += [seen_from(folder, DATA / "train.extxyz"), "run.extxyz", f"--frame={seed}", f"--seed={seed}"]
    temperature, steps, _ = amount.runs[kind]
    command += [f"--steps={steps}", f"--temperature={temperature}", f"--interval={INTERVAL}"]
    run(folder, Step("md", command, ("run.extxyz",)))
    command = ["e2ip", "label", "run.extxyz", "labelled.extxyz", "--calculator=tblite.ase:TBLite"]
    command += ["--argument=method=GFN2-xTB", "--argument=accuracy=0.1", "--argument=verbosity=0"]
    # Frames of which GFN2-xTB finds no solution are left out.
    run(folder, Step("label", command, (), (0, 1)))
    predict(work, folder, folder / "labelled.extxyz")


def at_300_kelvin(frames: int, seeds: tuple[int, ...]) -> list[ase.Atoms]:
    """Like the demo's frames, of as many further trajectories as there are seeds."""
    sys.path.insert(0, str(ROOT / "demo"))
    import make_data

    start, found = make_data.relaxed_molecule(), []
    for seed in seeds:
        found += make_data.trajectory(f"seed {seed}", start, 300.0, frames // len(seeds), seed=seed)
    return found


def write(path: Path, frames: list[ase.Atoms]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    ase.io.write(path, frames, format="extxyz")


def training(folder: Path, name: str, train: Path, epochs: int) -> list[str]:
    command = ["mace_run_train", f"--config={seen_from(folder, ROOT / 'configs' / 'mace_baseline.yaml')}"]
    command += ["--name=model", f"--seed={name.removeprefix('stock') if name in COMMITTEE else 1}"]
    command += ["--num_channels=16", "--max_ell=2", "--correlation=2", "--valid_batch_size=50", "--eval_interval=4"]
    command += [f"--max_num_epochs={epochs}", f"--lr_scheduler_gamma={0.05 ** (1 / epochs):.6g}"]
    command += [f"--train_file={seen_from(folder, train)}"]
    command += [f"--valid_file={seen_from(folder, DATA / 'valid.extxyz')}"]
    return [*command, *READOUTS.get(name, [])]


def predict(work: Path, folder: Path, frames: Path) -> None:
    for name in (*READOUTS, *COMMITTEE):
        command = ["mace_eval_configs", f"--configs={seen_from(folder, frames)}", f"--output={name}.xyz"]
        command += [f"--model={seen_from(folder, work / name / 'model.model')}", "--default_dtype=float32"]
        run(folder, Step(f"predict_{name}", [*command, "--batch_size=50"], (f"{name}.xyz",)))


def read(folder: Path) -> dict[str, Checks]:
    """What every detector says of the frames in a folder."""
    found = {name: ase.io.read(folder / f"{name}.xyz", ":") for name in (*READOUTS, *COMMITTEE)}
    steps = np.array([atoms.info.get("md_step", i) for i, atoms in enumerate(found["leverage"])])
    reference = stacked(found["leverage"], "REF_forces")
    members = np.stack([stacked(found[name], "MACE_forces") for name in COMMITTEE])
    forces = {name: stacked(found[name], "MACE_forces") for name in READOUTS} | {"committee": members.mean(0)}
    checks = {}
    for detector, (model, column) in DETECTORS.items():
        spread = np.sqrt(members.var(0, ddof=1).mean(-1))
        values = stacked(found[model], column) if column else spread
        checks[detector] = Checks(values, np.linalg.norm(forces[model] - reference, axis=-1), steps)
    return checks


def stacked(frames: list, name: str) -> np.ndarray:
    """A column of all frames, which ASE may have taken for a result (T, N, …)."""
    return np.stack([a.arrays[name] if name in a.arrays else a.calc.results[name] for a in frames])


def smoothed(values: np.ndarray, window: int) -> np.ndarray:
    """Medians of every atom over the last checks (T, N), as `Monitor` takes them; 0 before there are as many."""
    found = np.zeros_like(values)
    for end in range(window, len(values) + 1):
        found[end - 1] = np.median(values[end - window : end], axis=0)
    return found


def judge(checks: Checks, held_out: Checks) -> dict:
    """A run by one detector, at every threshold."""
    limit = TOO_LARGE * float(np.quantile(held_out.errors, 0.99))
    largest, error = checks.values.max(1), checks.errors.max(1)
    medians = {str(window): smoothed(checks.values, window).max(1) for window in WINDOWS}
    bad = np.flatnonzero(error > limit)
    end = int(bad[0]) if len(bad) else len(error)
    levels = {}
    for level in LEVELS:
        threshold = quantile(held_out.values.max(1), level)
        first = {window: next(iter(np.flatnonzero(values > threshold)), None) for window, values in medians.items()}
        levels[str(level)] = {
            "threshold": threshold,
            "above": int((largest > threshold).sum()),
            "stop": {window: None if stop is None else int(checks.steps[stop]) for window, stop in first.items()},
            "in_time": {
                window: bool(not len(bad) or (stop is not None and stop < end)) for window, stop in first.items()
            },
        }
    return {
        "limit": limit,
        "checks": len(largest),
        "too_large": int(checks.steps[end]) if len(bad) else None,
        "median_until_too_large": {
            window: float(values[:end].max()) if end else 0.0 for window, values in medians.items()
        },
        "levels": levels,
        "steps": checks.steps.tolist(),
        "value": [round(float(value), 4) for value in largest],
        "error": [round(float(value), 4) for value in error],
    }


def collect(work: Path, amount: Amount, out: Path) -> None:
    """Raw results of what is finished."""
    last = f"predict_{COMMITTEE[-1]}.done"
    if not (work / "held_out" / last).exists():
        return
    held_out = read(work / "held_out")
    out.mkdir(parents=True, exist_ok=True)
    for name in amount.names():
        if (work / name / last).exists():
            found = {key: judge(checks, held_out[key]) for key, checks in read(work / name).items()}
            (out / f"{name}.json").write_text(json.dumps(found) + "\n", encoding="utf-8")


def tables(out: Path, figure: Path) -> str:
    """Markdown tables, and the figure, of the raw results."""
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.glob("*_*.json"))}
    kinds = {kind: [runs for name, runs in found.items() if name.startswith(kind)] for kind in FULL.runs}
    cold, ramps = kinds.pop("cold"), kinds
    thresholds = ["detector", "quantile", "above at 300 K", "largest error there / limit"]
    apart = ["detector"]
    for window in WINDOWS:
        columns = [f"ramps of {FULL.runs[kind].steps} steps" for kind in ramps]
        thresholds += [f"window {window}: stopped at 300 K, step", *(f"{column}: in time" for column in columns)]
        apart += [f"window {window}: {column}" for column in columns]
    of_thresholds, of_drawn, of_any = [], [], []
    drawn = [
        "detector",
        "steps of a ramp",
        "stopped at, median",
        "first",
        "error too large at, median",
        "stops that are late: by steps",
    ]
    for detector in DETECTORS if found else ():
        quiet = [runs[detector] for runs in cold]
        hot = [[runs[detector] for runs in kind] for kind in ramps.values()]
        worst = max((max(r["error"]) / r["limit"] for r in quiet), default=0.0)
        for level in map(str, LEVELS):
            share = sum(r["levels"][level]["above"] for r in quiet) / max(1, sum(r["checks"] for r in quiet))
            cells = [detector, level, f"{share:.1%}", f"{worst:.2f}"]
            for window in map(str, WINDOWS):
                stops = [r["levels"][level]["stop"][window] for r in quiet]
                cells.append(", ".join(str(stop) for stop in stops if stop is not None) or "no")
                cells += [f"{sum(r['levels'][level]['in_time'][window] for r in kind)} of {len(kind)}" for kind in hot]
            of_thresholds.append(cells)
        of_drawn += [[detector, *when(runs, of)] for runs, of in zip(hot, ramps, strict=True) if runs]
        cells = [detector]
        for window in map(str, WINDOWS):
            highest = max((r["median_until_too_large"][window] for r in quiet), default=0.0)
            for kind in hot:
                higher = sum(r["median_until_too_large"][window] > highest for r in kind)
                cells.append(f"{higher} of {len(kind)}")
        of_any.append(cells)
    if found:
        draw(found, [name for name in found if name.startswith("ramp")], figure)
    return "\n\n".join(markdown(*table) for table in ((thresholds, of_thresholds), (drawn, of_drawn), (apart, of_any)))


def when(runs: list[dict], kind: str) -> list[str]:
    """Of ramps and the rule that is drawn: temperatures of the thermostat, and how late stops are that are late."""
    low, high = map(float, FULL.runs[kind].temperature.split(":"))
    steps = FULL.runs[kind].steps
    level, window = DRAWN
    ends = [(r["levels"][level]["stop"][window], r["too_large"]) for r in runs]
    stops, bad = ([low + (high - low) * end / steps for end in of if end is not None] for of in zip(*ends, strict=True))
    cells = [f"{f(of):.0f} K" if of else "never" for f, of in ((np.median, stops), (min, stops), (np.median, bad))]
    late = [stop - end for stop, end in ends if None not in (stop, end) and stop >= end]
    unstopped = sum(stop is None and end is not None for stop, end in ends)
    texts = [*map(str, sorted(late)), *([f"{unstopped} not stopped"] if unstopped else [])]
    return [str(steps), *cells, ", ".join(texts) or "none"]


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (columns, *rows)]
    return "\n".join([lines[0], "|---" * len(columns) + "|", *lines[1:]])


def draw(found: dict, ramps: list[str], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(DETECTORS), figsize=(13.0, 3.6), sharey=True, layout="constrained")
    for panel, detector in zip(panels, DETECTORS, strict=True):
        for name in ramps:
            run_of = found[name][detector]
            panel.plot(
                run_of["steps"], np.divide(run_of["error"], run_of["limit"]), color="#d55e00", alpha=0.25, lw=0.8
            )
            quantile_drawn, window = DRAWN
            level = run_of["levels"][quantile_drawn]
            ratio = np.divide(run_of["value"], level["threshold"])
            panel.plot(run_of["steps"], ratio, color="#0072b2", alpha=0.25, lw=0.8)
            if level["stop"][window] is not None:
                panel.axvline(level["stop"][window], color="black", alpha=0.4, lw=0.8)
        panel.axhline(1.0, color="black", lw=0.8, ls=":")
        # In mode coupled values have no bound once the molecule is in pieces.
        panel.set(ylim=(0.1, 100.0), yscale="log", xlabel="step of the ramp, 300 to 1500 K", title=detector)
    panels[0].set_ylabel(f"blue: largest value / quantile {DRAWN[0]}\nred: largest error / limit")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "monitor", help="folder of models and runs")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "monitor", help="raw results")
    parser.add_argument("--figure", type=Path, default=ROOT / "docs" / "figures" / "monitor.png")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--quick", action="store_true", help="hardly any of it, all in a folder quick of --work")
    parser.add_argument("--jobs", type=int, default=1, help="trainings or runs at a time, one thread each")
    options = parser.parse_args()
    amount, work, out, figure = FULL, options.work.resolve(), options.out, options.figure
    if options.quick:
        amount, work = QUICK, work / "quick"
        out, figure = work / "results", work / "monitor.png"
    if not options.table:
        prepare(work, amount, options.jobs)
    collect(work, amount, out)
    print(tables(out, figure))


if __name__ == "__main__":
    main()
