"""Three rounds of active learning on the demo's molecule, with GFN2-xTB for the labels, by the package's own commands.

    python benchmarks/active_learning.py            # runs what is missing, an hour or two on one core; then the table
    python benchmarks/active_learning.py --table    # table and figure of the results

Needs an environment with e2ip-plugins[mace] and tblite. A model of a few 300 K frames runs hotter from round to round;
``e2ip select`` takes frames of its trajectories, ``e2ip label`` labels them, and `mace_run_train` trains anew on all.
Frames taken by leverage, at random and by farthest-point selection are compared at equal numbers of labels, by the
force error on the demo's 900 K frames, on which nothing is trained or chosen. Every command is printed; finished ones
are skipped.
"""

from pathlib import Path

import ase.io
import numpy as np
from common import (
    DEMO_DATA,
    GFN2_XTB,
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

from e2ip_plugins.predictions.prediction_files import read_predictions

METHODS = ("leverage", "random", "farthest")
SEEDS = (0, 1, 2)
#: Frames at the beginning and taken in every round; temperature of a round's runs in K.
FIRST, TAKEN, TEMPERATURES = 40, 15, (600, 750, 900)
#: Runs of a round, their steps of 0.5 fs, and steps between frames.
RUNS, STEPS, INTERVAL = 2, 500, 4
#: Leverage of an atom at which a run ends.
STOP = 30
#: Batches of a training, whatever the number of frames, and frames in a batch.
BATCHES, BATCH = 600, 5
TESTS = {"900 K": "ood", "300 K": "test"}


def fit(folder: Path, seed: int, frames: list[ase.Atoms]) -> None:
    """Train in a folder, and predict the test frames."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "train.extxyz").exists():
        ase.io.write(folder / ".train.extxyz", frames, format="extxyz")
        (folder / ".train.extxyz").rename(folder / "train.extxyz")
    epochs = BATCHES * BATCH // len(frames)
    run(folder, mace_training(folder, "mace_e2ip", folder / "train.extxyz", seed, epochs, f"--batch_size={BATCH}"))
    for name in TESTS.values():
        run(folder, mace_predictions(folder, name, folder / "model.model", DEMO_DATA / f"{name}.extxyz"))


def explore(model: Path, folder: Path, seed: int, number: int) -> list[Path]:
    """Return the candidates of a round: runs of the model from frames on which it was trained."""
    count = len(ase.io.read(model / "train.extxyz", ":"))
    rng, candidates = np.random.default_rng([seed, number]), []
    for i in range(RUNS):
        command = ["e2ip", "md", *(relative(folder, model / name) for name in ("model.model", "train.extxyz"))]
        command.append(f"md{i}.extxyz")
        command += [f"--steps={STEPS}", f"--temperature={TEMPERATURES[number - 1]}", f"--interval={INTERVAL}"]
        command += [f"--seed={rng.integers(10**6)}", f"--frame={rng.integers(count)}", "--friction=0.02"]
        command += [f"--watch=e2ip_leverage={STOP}", "--action=stop"]
        run(folder, Step(f"md{i}", command, (f"md{i}.extxyz", f"md{i}-monitor.extxyz")))
        candidates.append(folder / f"md{i}.extxyz")
    return candidates


def round_of(method: str, seed: int, number: int, before: Path, folder: Path, shared: Path) -> None:
    """Run, select, label, train and test."""
    # All methods begin with the same model, and so with the same candidates.
    candidates = explore(before, shared if number == 1 else folder, seed, number)
    command = ["e2ip", "select", *(relative(folder, path) for path in (before / "model.model", *candidates))]
    command += [f"--train={relative(folder, before / 'train.extxyz')}"]
    command += [f"--number={TAKEN}", f"--method={method}", f"--seed={seed}", "--output=selected.extxyz"]
    run(folder, Step("select", command, ("selected.extxyz",)))
    run(folder, Step("label", ["e2ip", "label", "selected.extxyz", "labelled.extxyz", *GFN2_XTB]))
    files = (before / "train.extxyz", folder / "labelled.extxyz")
    fit(folder, seed, [frame for file in files for frame in ase.io.read(file, ":")])


def learn(work: Path) -> None:
    """Run all rounds of all methods, seed by seed."""
    frames = ase.io.read(DEMO_DATA / "train.extxyz", ":")
    for seed in SEEDS:
        start = work / f"s{seed}_start"
        fit(start, seed, [frames[i] for i in np.random.default_rng(seed).permutation(len(frames))[:FIRST]])
        for method in METHODS:
            before = start
            for number in range(1, len(TEMPERATURES) + 1):
                folder = work / f"s{seed}_{method}_{number}"
                round_of(method, seed, number, before, folder, work / f"s{seed}_candidates")
                before = folder


def force_maes(folder: Path) -> dict[str, float]:
    """Return force errors in meV/Å by test set; empty before they exist."""
    if not all((folder / f"predict_{name}.done").exists() for name in TESTS.values()):
        return {}
    predicted = {label: read_predictions(folder / f"{name}.xyz") for label, name in TESTS.items()}
    return {label: 1000.0 * float(np.abs(p.forces - p.reference_forces).mean()) for label, p in predicted.items()}


def collect(work: Path) -> dict[str, list[dict]]:
    """Return rounds that are finished, by seed and method: labels, errors, and which candidates were taken."""
    results: dict[str, list[dict]] = {}
    for seed in SEEDS:
        for method in METHODS:
            rounds = results.setdefault(f"s{seed}_{method}", [])
            for number in range(len(TEMPERATURES) + 1):
                folder = work / (f"s{seed}_{method}_{number}" if number else f"s{seed}_start")
                errors = force_maes(folder)
                if not errors:
                    break
                rounds.append({"labels": len(ase.io.read(folder / "train.extxyz", ":")), "mae": errors})
                if number:
                    taken = [frame.info for frame in ase.io.read(folder / "selected.extxyz", ":")]
                    rounds[-1]["taken"] = [[int(t["select_index"]), float(t["select_score"])] for t in taken]
    return {name: rounds for name, rounds in results.items() if rounds}


def errors_at(results: dict[str, list[dict]], method: str, test: str) -> dict[int, list[float]]:
    """Return the errors of all seeds by number of labels."""
    errors: dict[int, list[float]] = {}
    for name, rounds in results.items():
        for entry in rounds if name.endswith(f"_{method}") else ():
            errors.setdefault(entry["labels"], []).append(entry["mae"][test])
    return errors


def table(results: dict[str, list[dict]]) -> str:
    """Return a Markdown table for each test: mean over seeds, and each of them."""
    blocks = []
    for test in TESTS:
        by_method = [errors_at(results, method, test) for method in METHODS]
        rows = []
        for labels in sorted({labels for errors in by_method for labels in errors}):
            cells = [errors.get(labels, []) for errors in by_method]
            texts = [f"{np.mean(c):.0f} ({', '.join(f'{x:.0f}' for x in c)})" if c else "" for c in cells]
            rows.append([labels, *texts])
        blocks += [f"Force MAE at {test}, meV/Å", markdown(["labels", *METHODS], rows)]
    return "\n\n".join(blocks)


def draw(results: dict[str, list[dict]], path: Path) -> None:
    """Draw errors against labels."""
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    panels = figure.subplots(1, len(TESTS))
    for panel, test in zip(panels, TESTS, strict=True):
        for color, method in zip(("#0072b2", "#777777", "#d55e00"), METHODS, strict=True):
            errors = errors_at(results, method, test)
            lowest, highest, mean = ([f(v) for v in errors.values()] for f in (min, max, np.mean))
            panel.fill_between(list(errors), lowest, highest, color=color, alpha=0.15, lw=0)
            panel.plot(list(errors), mean, "o-", color=color, label=f"--method {method}")
        panel.set(xlabel="labelled frames", ylabel=f"force MAE at {test} (meV/Å)")
        panel.set_ylim(bottom=0.0)
    panels[0].legend(frameon=False)
    seeds = len({name.partition("_")[0] for name in results})
    figure.suptitle(f"2-methoxyacetamide, GFN2-xTB, MACE: mean of {seeds} seeds, band from the least to the largest")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = parser_of(__doc__, "active_learning", "work", "out", "figure", "table")
    options = parser.parse_args()
    if not options.table:
        learn(options.work.resolve())
        save(options.out, collect(options.work))
    results = load(options.out)
    print(table(results))
    draw(results, options.figure)


if __name__ == "__main__":
    main()
