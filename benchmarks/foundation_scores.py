"""Scores of the models of `foundation_ways`, and the check of a readout file."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
from common import Step, hardware, load, run, save
from foundation_ways import TESTS, Way, Work, e2ip, members, ways

from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.prediction_files import read_predictions
from e2ip_plugins.report.ensemble import combine
from e2ip_plugins.report.scored_model import score
from e2ip_plugins.scores.calibration import Calibration
from e2ip_plugins.scores.metrics import summarise

FIGURES = ("force_mae", "coverage95", "calibration_error", "spearman_total", "spearman_epistemic", "nll", "leverage")
#: Leverage of atoms whose species has no training atoms, about.
UNSUPPORTED = 1e5


def predict(work: Work, way: Way, test: str) -> Path:
    """Predict a set by a model, once; return the file."""
    output = work.folder / "predictions" / way.name / f"{test}.xyz"
    output.parent.mkdir(parents=True, exist_ok=True)
    options = ["--no-energy-vectors", *([f"--head={way.head}"] if way.head else [])]
    e2ip(output.parent, test, "evaluate", str(work.model(way.name)), str(work.part(test)), output.name, *options)
    return output


def judge(path: Path, calibration: Calibration | None = None) -> dict[str, Any]:
    """Return the scores of a file of predictions, with its number of frames and atoms."""
    predictions = read_predictions(path)
    figures = summarise(score(path.stem, predictions, calibration).scores)
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
    """Judge the committee of all members that are trained, two at least: as it is, and scaled on validation frames."""
    names = members(work)
    if len(names) < 2:
        print(f"no committee: {len(names)} member trained", flush=True)
        return
    committee = work.folder / "predictions" / "committee"
    committee.mkdir(parents=True, exist_ok=True)
    tests = (*TESTS, "user")
    for test in ("valid", *tests):
        files = []
        for name in names:
            folder = work.folder / "predictions" / name
            command = ["mace_eval_configs", f"--configs={work.part(test)}", f"--output={test}.xyz", "--batch_size=40"]
            command += [f"--model={work.model(name, 'standin.model')}", "--default_dtype=float32"]
            run(folder, Step(f"predict_{test}", command, (f"{test}.xyz",)))
            files.append(folder / f"{test}.xyz")
        combine(files, committee / f"{test}.xyz", isotropic=True)
    e2ip(committee, "calibrate", "calibrate", "valid.xyz", "--output=scale.json")
    save(out, {f"committee/{test}": {**judge(committee / f"{test}.xyz"), "members": len(names)} for test in tests})
    calibration = Calibration.read(committee / "scale.json")
    for test in tests:
        try:
            scores = judge(committee / f"{test}.xyz", calibration)
        except InputError:  # elements that no validation frame has
            continue
        save(out, {f"committee-scaled/{test}": {**scores, "members": len(names)}})


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
