"""Scores of the models of `foundation_ways`, the check of a readout file, and their tables."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
from common import Step, hardware, load, markdown, run, save
from foundation_ways import TESTS, UPDATED, UPDATES, Way, Work, e2ip, members, ways

from e2ip_plugins.predictions.prediction_files import read_predictions
from e2ip_plugins.report.ensemble import combine
from e2ip_plugins.report.scored_model import score
from e2ip_plugins.scores.metrics import summarise

FIGURES = ("force_mae", "coverage95", "calibration_error", "spearman_total", "spearman_epistemic", "nll", "leverage")
COLUMNS = ("", "force MAE, meV/Å", "coverage at 95 %", "CE", "Spearman", "NLL", "unsupported atoms")
#: Leverage of atoms whose species has no training atoms, about.
UNSUPPORTED = 1e5
#: Ways in the tables' words.
TITLES = {
    "all": "whole training set",
    "subset": "400 of its frames",
    "own": "the user's 70 frames alone",
    "multihead": "multi-head fine-tuning with replay, `e2ip fit` for the user's head",
    "multihead-replay": "the same, `e2ip fit` for the head of the replay",
    "multihead-readout": "multi-head fine-tuning with `--readout e2ip`",
    "lora": "LoRA, then `e2ip fit`",
    "committee": "committee",
}


def predict(work: Work, way: Way, test: str) -> Path:
    """Predict a set by a model, once; return the file."""
    output = work.folder / "predictions" / way.name / f"{test}.xyz"
    output.parent.mkdir(parents=True, exist_ok=True)
    options = ["--no-energy-vectors", *([f"--head={way.head}"] if way.head else [])]
    e2ip(output.parent, test, "evaluate", str(work.model(way.name)), str(work.part(test)), output.name, *options)
    return output


def judge(path: Path) -> dict[str, Any]:
    """Return the scores of a file of predictions, with its number of frames and atoms."""
    predictions = read_predictions(path)
    figures = summarise(score(path.stem, predictions, None).scores)
    chosen = {name: figures[name] for name in FIGURES}
    unsupported = None if predictions.leverage is None else float(np.mean(predictions.leverage > UNSUPPORTED))
    return {**chosen, "unsupported": unsupported, "frames": len(predictions.sizes), "atoms": len(predictions.species)}


def judge_all(work: Work, epochs: int, out: Path) -> None:
    """Make all models, judge every one on its sets, and add the scores to the file of results."""
    for way in ways(work, epochs):
        save(out, {f"{way.name}/{test}": judge(predict(work, way, test)) for test in way.tests})
    judge_committee(work, out)
    save(out, {"readout file": readout_file(work), "about": about(work)})


def judge_committee(work: Work, out: Path) -> None:
    """Judge the committee of all members that are trained; two are the least."""
    names = members(work)
    if len(names) < 2:
        print(f"no committee: {len(names)} member trained", flush=True)
        return
    entries = {}
    for test in (*TESTS, "user"):
        files = []
        for name in names:
            folder = work.folder / "predictions" / name
            command = ["mace_eval_configs", f"--configs={work.part(test)}", f"--output={test}.xyz", "--batch_size=40"]
            command += [f"--model={work.model(name, 'standin.model')}", "--default_dtype=float32"]
            run(folder, Step(f"predict_{test}", command, (f"{test}.xyz",)))
            files.append(folder / f"{test}.xyz")
        target = work.folder / "predictions" / "committee" / f"{test}.xyz"
        target.parent.mkdir(parents=True, exist_ok=True)
        combine(files, target, isotropic=True)
        entries[f"committee/{test}"] = {**judge(target), "members": len(names)}
    save(out, entries)


def readout_file(work: Work) -> dict[str, Any]:
    """Export the readout, attach it in another process, and compare forces and uncertainties bit by bit."""
    folder, base, test = work.model("attached", ""), work.model("member1", "standin.model"), work.part("rare")
    e2ip(folder, "export", "export-readout", str(work.model("all")), "all.e2ip")
    run(folder, Step("attach", ["e2ip", "attach", str(base), "all.e2ip", "--output=fitted.model"], ("fitted.model",)))
    script = Path(__file__).with_name("foundation_attached.py")
    models = [str(base), str(work.model("all")), str(folder / "fitted.model")]
    run(folder, Step("compare", [sys.executable, str(script), *models, str(test), "compared.json"], ("compared.json",)))
    return {"megabytes": (folder / "all.e2ip").stat().st_size / 1e6, **load(folder / "compared.json")}


def about(work: Work) -> dict[str, Any]:
    """Return what the figures belong to: frames, epochs, members and the machine."""
    trained = {name: load(work.model(name, "epochs.json")) for name in members(work)}
    counts = {path.stem: len(work.data(path.stem)) for path in sorted((work.folder / "data").glob("*.extxyz"))}
    size = work.model("member1", "standin.model").stat().st_size / 1e6
    return {"members": trained, "frames": counts, "hardware": hardware(), "model_megabytes": size}


def cell(value: float | None) -> str:
    """Return a figure with three digits; a dash where there is none."""
    return "–" if value is None or np.isnan(value) else f"{value:.3g}"


def row(label: str, entry: dict[str, Any] | None) -> list[str]:
    """Return a row of a table; dashes where there is no result."""
    if entry is None:
        return [label, *["–"] * (len(COLUMNS) - 1)]
    figures = [entry[name] for name in ("coverage95", "calibration_error", "spearman_total", "nll")]
    unsupported = entry["unsupported"]
    share = "–" if unsupported is None else f"{100 * unsupported:.0f} %"
    return [label, f"{1000 * entry['force_mae']:.0f}", *map(cell, figures), share]


def tables(results: dict[str, Any]) -> str:
    """Return the tables of the documentation as Markdown: fits, updates, fine-tunings."""
    fits, updates, tunings = [], [], []
    for test in (*TESTS, "user"):
        of_test = [(TITLES[name], results.get(f"{name}/{test}")) for name in ("all", "subset", "committee")]
        fits += [row(f"{test}, {title}", entry) for title, entry in of_test if entry is not None]
    for test in UPDATED:
        updates.append(row(f"{test}, as fitted", results.get(f"all/{test}")))
        for number in UPDATES:
            updates.append(row(f"{test}, {number} frames", results.get(f"update-{test}-{number}/{test}")))
            updates.append(row(f"seen, {number} frames of {test}", results.get(f"update-{test}-{number}/seen")))
    for test in ("user", "seen"):
        for name in ("all", "own", "multihead", "multihead-replay", "multihead-readout", "lora"):
            tunings.append(row(f"{test}, {TITLES[name]}", results.get(f"{name}/{test}")))
    return "\n\n".join(markdown(COLUMNS, rows) for rows in (fits, updates, tunings))
