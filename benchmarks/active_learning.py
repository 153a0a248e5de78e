"""Three rounds of active learning on the demo's molecule, with GFN2-xTB for the labels, by the package's own commands.

    python benchmarks/active_learning.py            # what is not there yet, an hour or two on one core; then the table
    python benchmarks/active_learning.py --table    # table, raw results and figure of what is there

Needs an environment with e2ip-plugins[mace] and tblite. A model of a few 300 K frames runs hotter from round to round;
``e2ip select`` takes frames of its trajectories, ``e2ip label`` labels them, and `mace_run_train` trains anew on all.
Frames taken by leverage, at random and by farthest-point selection are compared at equal numbers of labels, by the
force error on the demo's 900 K frames, which nothing is trained or chosen on. Every command is printed; what is
finished is skipped.
"""

import argparse
import json
import sys
from pathlib import Path

import ase.io
import numpy as np
from steps import Step, run, seen_from

from e2ip_plugins.predictions.prediction_files import read_predictions

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "demo" / "data"
METHODS = ("leverage", "random", "farthest")
SEEDS = (0, 1, 2)
#: Frames at the beginning and taken in every round; temperature of its runs in K.
FIRST, TAKEN, TEMPERATURES = 40, 15, (600, 750, 900)
#: Runs of a round, their steps of 0.5 fs, and steps between frames.
RUNS, STEPS, INTERVAL = 2, 500, 4
#: Leverage of an atom at which a run ends.
STOP = 30
#: Batches of a training, whatever the number of frames, and frames in a batch.
BATCHES, BATCH = 600, 5
TESTS = {"900 K": "ood", "300 K": "test"}


def training(folder: Path, seed: int, frames: int) -> list[str]:
    epochs = BATCHES * BATCH // frames
    command = [
        "mace_run_train",
        f"--config={seen_from(folder, ROOT / 'configs' / 'mace_e2ip.yaml')}",
        "--name=model",
        f"--seed={seed}",
    ]
    command += ["--num_channels=16", "--max_ell=2", "--correlation=2", f"--batch_size={BATCH}", "--valid_batch_size=50"]
    command += [f"--max_num_epochs={epochs}", f"--lr_scheduler_gamma={0.05 ** (1 / epochs):.6g}", "--eval_interval=4"]
    return [*command, "--train_file=train.extxyz", f"--valid_file={seen_from(folder, DATA / 'valid.extxyz')}"]


def evaluation(folder: Path) -> list[Step]:
    command = ["mace_eval_configs", "--model=model.model", "--default_dtype=float32", "--batch_size=50"]
    files = {
        name: [f"--configs={seen_from(folder, DATA / f'{name}.extxyz')}", f"--output={name}.xyz"]
        for name in TESTS.values()
    }
    return [Step(f"test_{name}", [*command, *options], (f"{name}.xyz",)) for name, options in files.items()]


def fit(folder: Path, seed: int, frames: list) -> None:
    """Train in a folder, and test."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "train.extxyz").exists():
        ase.io.write(folder / ".train.extxyz", frames, format="extxyz")
        (folder / ".train.extxyz").rename(folder / "train.extxyz")
    run(folder, Step("train", training(folder, seed, len(frames)), ("checkpoints", "logs", "results", "model.model")))
    for step in evaluation(folder):
        run(folder, step)


def explore(model: Path, folder: Path, seed: int, number: int) -> list[Path]:
    """Candidates of a round: runs of the model from frames that it was trained on."""
    folder.mkdir(parents=True, exist_ok=True)
    count = len(ase.io.read(model / "train.extxyz", ":"))
    rng, names = np.random.default_rng([seed, number]), []
    for i in range(RUNS):
        command = ["e2ip", "md", *(seen_from(folder, model / name) for name in ("model.model", "train.extxyz"))]
        command.append(f"md{i}.extxyz")
        command += [f"--steps={STEPS}", f"--temperature={TEMPERATURES[number - 1]}", f"--interval={INTERVAL}"]
        command += [f"--seed={rng.integers(10**6)}", f"--frame={rng.integers(count)}", "--friction=0.02"]
        command += [f"--watch=e2ip_leverage={STOP}", "--action=stop"]
        run(folder, Step(f"md{i}", command, (f"md{i}.extxyz", f"md{i}-monitor.extxyz")))
        names.append(folder / f"md{i}.extxyz")
    return names


def round_of(method: str, seed: int, number: int, before: Path, folder: Path, shared: Path) -> None:
    """A round: run, select, label, train, test."""
    folder.mkdir(parents=True, exist_ok=True)
    # All methods begin with the same model, and so with the same candidates.
    candidates = explore(before, shared if number == 1 else folder, seed, number)
    command = ["e2ip", "select", *(seen_from(folder, path) for path in (before / "model.model", *candidates))]
    command += [f"--train={seen_from(folder, before / 'train.extxyz')}"]
    command += [f"--number={TAKEN}", f"--method={method}", f"--seed={seed}", "--output=selected.extxyz"]
    run(folder, Step("select", command, ("selected.extxyz",)))
    command = ["e2ip", "label", "selected.extxyz", "labelled.extxyz", "--calculator=tblite.ase:TBLite"]
    command += ["--argument=method=GFN2-xTB", "--argument=accuracy=0.1", "--argument=verbosity=0"]
    run(folder, Step("label", command, ()))
    frames = [
        frame for file in (before / "train.extxyz", folder / "labelled.extxyz") for frame in ase.io.read(file, ":")
    ]
    fit(folder, seed, frames)


def learn(work: Path, seeds: tuple[int, ...], methods: tuple[str, ...]) -> None:
    """All rounds of all methods, seed by seed."""
    frames = ase.io.read(DATA / "train.extxyz", ":")
    for seed in seeds:
        chosen = np.random.default_rng(seed).permutation(len(frames))[:FIRST]
        start = work / f"s{seed}_start"
        fit(start, seed, [frames[i] for i in chosen])
        for method in methods:
            before = start
            for number in range(1, len(TEMPERATURES) + 1):
                folder = work / f"s{seed}_{method}_{number}"
                round_of(method, seed, number, before, folder, work / f"s{seed}_candidates")
                before = folder


def errors(folder: Path) -> dict[str, dict[str, float]] | None:
    """Force errors in meV/Å by test set; None before they are there."""
    if not all((folder / f"test_{name}.done").exists() for name in TESTS.values()):
        return None
    found = {}
    for label, name in TESTS.items():
        predicted = read_predictions(folder / f"{name}.xyz")
        error = 1000.0 * (predicted.forces - predicted.reference_forces)
        found[label] = {"mae": float(np.abs(error).mean()), "rmse": float(np.sqrt(np.square(error).mean()))}
    return found


def collect(work: Path, out: Path) -> None:
    """Raw results of what is finished, one file for every seed and method."""
    for seed in SEEDS:
        for method in METHODS:
            rounds = []
            for number in range(len(TEMPERATURES) + 1):
                folder = work / (f"s{seed}_{method}_{number}" if number else f"s{seed}_start")
                scores = errors(folder)
                if scores is None:
                    break
                entry = {"labels": FIRST + number * TAKEN, "errors": scores}
                if number:
                    entry["labels"] = len(ase.io.read(folder / "train.extxyz", ":"))
                    runs = folder if number > 1 else work / f"s{seed}_candidates"
                    logs = [*(runs / f"md{i}.log" for i in range(RUNS)), folder / "select.log", folder / "label.log"]
                    entry["said"] = [line for log in logs for line in said(log)]
                    entry["taken"] = [
                        [int(frame.info["select_index"]), round(float(frame.info["select_score"]), 4)]
                        for frame in ase.io.read(folder / "selected.extxyz", ":")
                    ]
                rounds.append(entry)
            if rounds:
                out.mkdir(parents=True, exist_ok=True)
                content = {"seed": seed, "method": method, "rounds": rounds}
                (out / f"s{seed}_{method}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def said(log: Path) -> list[str]:
    """What a command of the package has printed, without what libraries say."""
    marks = (
        " steps, ",
        "monitor: ",
        "stopped: ",
        " candidates (",
        "leverage",
        "distance from",
        " labelled, ",
        "warning",
    )
    lines = [line for line in log.read_text(errors="replace").splitlines() if any(mark in line for mark in marks)]
    return [line for line in lines if "UserWarning" not in line and "WARNING" not in line]


def table(out: Path, figure: Path) -> str:
    """Markdown table, and the figure, of the raw results: mean over seeds, and each of them."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.glob("s*.json"))]
    if not found:
        sys.exit(f"{out}: has no results")
    lines = []
    for test in TESTS:
        numbers = sorted({entry["labels"] for run in found for entry in run["rounds"]})
        lines += [f"Force MAE at {test}, meV/Å", "", "| labels | " + " | ".join(METHODS) + " |"]
        lines.append("|---" * (len(METHODS) + 1) + "|")
        for number in numbers:
            cells = []
            for method in METHODS:
                values = of(found, method, number, test)
                each = ", ".join(f"{value:.0f}" for value in values)
                cells.append(f"{np.mean(values):.0f} ({each})" if values else "")
            lines.append(f"| {number} | " + " | ".join(cells) + " |")
        lines.append("")
    draw(found, figure)
    return "\n".join(lines)


def of(found: list[dict], method: str, labels: int, test: str) -> list[float]:
    """Errors of all seeds with so many labels."""
    runs = (run for run in found if run["method"] == method)
    return [entry["errors"][test]["mae"] for run in runs for entry in run["rounds"] if entry["labels"] == labels]


def draw(found: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(TESTS), figsize=(9.0, 3.6), layout="constrained")
    for panel, test in zip(panels, TESTS, strict=True):
        for color, method in zip(("#0072b2", "#777777", "#d55e00"), METHODS, strict=True):
            numbers = sorted({e["labels"] for run in found if run["method"] == method for e in run["rounds"]})
            values = [of(found, method, number, test) for number in numbers]
            panel.fill_between(
                numbers, [min(v) for v in values], [max(v) for v in values], color=color, alpha=0.15, lw=0
            )
            panel.plot(numbers, [np.mean(v) for v in values], "o-", color=color, label=f"--method {method}")
        panel.set_xlabel("labelled frames")
        panel.set_ylabel(f"force MAE at {test} (meV/Å)")
        panel.set_ylim(bottom=0.0)
    panels[0].legend(frameon=False)
    seeds = len({run["seed"] for run in found})
    figure.suptitle(f"2-methoxyacetamide, GFN2-xTB, MACE: mean of {seeds} seeds, band from the least to the largest")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--work", type=Path, default=ROOT / "runs" / "active_learning", help="folder of models and runs"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "active_learning", help="raw results")
    parser.add_argument("--figure", type=Path, default=ROOT / "docs" / "figures" / "active_learning.png")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)), help="seeds, separated by commas")
    parser.add_argument("--methods", default=",".join(METHODS), help="methods, separated by commas")
    parser.add_argument("--table", action="store_true", help="run nothing")
    options = parser.parse_args()
    if not options.table:
        seeds = tuple(int(seed) for seed in options.seeds.split(","))
        learn(options.work.resolve(), seeds, tuple(options.methods.split(",")))
    if options.work.is_dir():
        collect(options.work, options.out)
    print(table(options.out, options.figure))


if __name__ == "__main__":
    main()
