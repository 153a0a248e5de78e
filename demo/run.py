"""The demo: train a baseline and an e²IP model with one host's stock commands, evaluate and compare them.

    python demo/run.py nequip      # in an environment with e2ip-plugins[nequip]
    python demo/run.py mace        # in an environment with e2ip-plugins[mace]

Every command is printed before it runs, to be copied. The two trainings run side by side with one thread each.
Finished steps are skipped when the demo is run again; ``rm -r runs/demo`` starts it afresh.
"""

import argparse
import csv
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
DATA = "demo/data"
TESTS = ("test", "ood")
MODELS = ("baseline", "e2ip")
SYMBOLS = "[H,C,N,O]"
EPOCHS = {"nequip": 60, "mace": 40}


class Step(NamedTuple):
    """One command of the demo.

    Attributes
    ----------
    name : str
        Stem of its log file and of the mark that it has finished.
    command : list of str
    progress : callable or None
        Returns all lines worth showing that a running command has produced so far.
    clears : str or None
        What to remove before the command starts: hosts append to or continue from what an interrupted run left.
    """

    name: str
    command: list[str]
    progress: Callable[[], list[str]] | None = None
    clears: str | None = None


def say(message: str = "") -> None:
    print(message, flush=True)


def mace_epochs(log: Path) -> list[str]:
    """Return MACE's own line on every epoch."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return [line.split("INFO: ", 1)[1] for line in lines if "INFO: Epoch" in line]


def nequip_epochs(metrics: Path) -> list[str]:
    """Return a line on every epoch from the file that NequIP's CSV logger writes."""
    if not metrics.exists():
        return []
    with metrics.open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("val0_epoch/forces_mae")]
    shown = {
        "force MAE (eV/Å)": "val0_epoch/forces_mae",
        "energy MAE (eV/atom)": "val0_epoch/per_atom_energy_mae",
        "NLL": "val0_epoch/e2ip_nll",
        "coverage@95": "val0_epoch/e2ip_coverage95",
    }
    return [
        f"Epoch {row['epoch']}: " + ", ".join(f"{k} {float(row[v]):.4f}" for k, v in shown.items() if row.get(v))
        for row in rows
    ]


def nequip_stages(out: Path, epochs: int) -> list[list[Step]]:
    """Return NequIP's steps: train and test both models; NequIP writes the test predictions itself."""
    training = []
    for model in MODELS:
        folder = out / model
        command = ["nequip-train", "-cp", str(ROOT / "configs"), "-cn", f"nequip_{model}"]
        command += [f"train_file={DATA}/train.extxyz", f"val_file={DATA}/valid.extxyz"]
        command += [f"test_file=[{','.join(f'{DATA}/{t}.extxyz' for t in TESTS)}]", f"chemical_species={SYMBOLS}"]
        command += [f"max_epochs={epochs}", f"hydra.run.dir={folder}"]
        # Lightning's logger keeps what it has in memory for hours otherwise, and its progress bar wants a terminal.
        command += ["+trainer.logger.flush_logs_every_n_steps=1", "+trainer.enable_progress_bar=false"]
        metrics = ROOT / folder / "logs" / "version_0" / "metrics.csv"
        training.append(Step(f"train_{model}", command, lambda path=metrics: nequip_epochs(path), str(folder)))
    predictions = {t: [f"{out}/{m}/test_dataset{i}.xyz" for m in MODELS] for i, t in enumerate(TESTS)}
    return [training, [comparison(out, predictions)]]


def mace_stages(out: Path, epochs: int) -> list[list[Step]]:
    """Return MACE's steps: train both models, predict both test sets with both."""
    training = []
    for model in MODELS:
        command = [
            "mace_run_train",
            "--config",
            "configs/mace_baseline.yaml",
            "--name",
            model,
            "--work_dir",
            f"{out}/{model}",
        ]
        command += ["--train_file", f"{DATA}/train.extxyz", "--valid_file", f"{DATA}/valid.extxyz"]
        command += ["--max_ell", "2", "--correlation", "2", "--max_num_epochs", str(epochs)]
        command += ["--readout", "e2ip"] if model == "e2ip" else []
        log = ROOT / out / f"train_{model}.log"
        training.append(Step(f"train_{model}", command, lambda path=log: mace_epochs(path), f"{out}/{model}"))
    stages = [training]
    for test in TESTS:
        stages.append([])
        for model in MODELS:
            command = ["mace_eval_configs", "--configs", f"{DATA}/{test}.extxyz"]
            command += ["--model", f"{out}/{model}/{model}.model", "--output", f"{out}/{model}/{test}.xyz"]
            command += ["--default_dtype", "float32", "--batch_size", "50"]
            stages[-1].append(Step(f"predict_{model}_{test}", command))
    predictions = {t: [f"{out}/{m}/{t}.xyz" for m in MODELS] for t in TESTS}
    return [*stages, [comparison(out, predictions)]]


def comparison(out: Path, predictions: dict[str, list[str]]) -> Step:
    """Return the ``e2ip compare`` of both models on both test sets."""
    command = ["e2ip", "compare", *predictions["test"]]
    for file in predictions["ood"]:
        command += ["--ood", file]
    return Step("compare", [*command, "--labels", ",".join(MODELS), "--out", f"{out}/compare"])


def environment() -> dict[str, str]:
    """Return the environment of the commands: this Python's commands first, one thread each."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def run_side_by_side(host: str, steps: list[Step], out: Path) -> None:
    """Run a stage's commands at the same time, show their progress, and end the demo if one fails."""
    running: dict[str, tuple[Step, subprocess.Popen, float]] = {}
    shown = {step.name: 0 for step in steps}
    try:
        for step in steps:
            say(f"[{host} {step.name}] $ {shlex.join(step.command)}")
            if step.clears:
                shutil.rmtree(ROOT / step.clears, ignore_errors=True)
            with log_of(out, step).open("w") as log:
                process = subprocess.Popen(
                    step.command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment()
                )
            running[step.name] = step, process, time.monotonic()
        while running:
            time.sleep(0.5)
            for name, (step, process, began) in list(running.items()):
                ended = process.poll() is not None
                lines = step.progress() if step.progress else []
                for line in lines[shown[name] :]:
                    say(f"[{host} {name}] {line}")
                shown[name] = max(shown[name], len(lines))
                if ended:
                    del running[name]
                    finish(host, step, process.returncode, time.monotonic() - began, out)
    finally:
        for _, process, _ in running.values():
            process.terminate()
            process.wait()


def log_of(out: Path, step: Step) -> Path:
    return ROOT / out / f"{step.name}.log"


def mark_of(out: Path, step: Step) -> Path:
    return ROOT / out / f"{step.name}.done"


def finish(host: str, step: Step, status: int, seconds: float, out: Path) -> None:
    """Mark a step as finished and show what the comparison has printed, or end the demo with the end of its log."""
    text = log_of(out, step).read_text(errors="replace").strip()
    if status:
        tail = "\n".join(text.splitlines()[-15:])
        sys.exit(
            f"\n{tail}\n\n[{host} {step.name}] failed with status {status}; its whole output is in "
            f"{out / log_of(out, step).name}"
        )
    mark_of(out, step).write_text(shlex.join(step.command))
    if step.name == "compare":
        say(f"\n{text}\n")
    say(f"[{host} {step.name}] done in {seconds:.0f} s")


def run(host: str, stages: list[list[Step]], out: Path) -> None:
    """Run the stages in order; what has finished with the same command is skipped, unless something before it ran."""
    anything_ran = False
    for stage in stages:
        todo = []
        for step in stage:
            mark = mark_of(out, step)
            if not anything_ran and mark.exists() and mark.read_text() == shlex.join(step.command):
                say(f"[{host} {step.name}] already done: {log_of(out, step).relative_to(ROOT)}")
            else:
                mark.unlink(missing_ok=True)
                todo.append(step)
        anything_ran = anything_ran or bool(todo)
        run_side_by_side(host, todo, out)


def in_and_out_of_distribution(out: Path) -> list[str]:
    """Return the lines that set the e²IP model's errors and uncertainties on both test sets side by side."""
    report = json.loads((ROOT / out / "compare" / "compare.json").read_text(encoding="utf-8"))
    lines = ["e2ip model          force RMSE   mean predicted std   coverage@95   mean leverage"]
    for models, what in ((report["models"], "300 K, in distribution"), (report["ood"]["models"], "900 K, OOD")):
        scores = of_e2ip(models)["overall"]
        rmse, std = 1000 * scores["force_rmse"], 1000 * scores["total_std"]
        figures = f"{rmse:6.0f} meV/Å {std:13.0f} meV/Å {scores['coverage95']:13.2f}"
        lines.append(f"{what:18}{figures} {number(scores['leverage']):>15}")
    found = of_e2ip(report["ood"]["frame_auroc"])
    by = {"mean leverage": "mean_leverage", "largest epistemic std": "max_epistemic_std"}
    by["mean epistemic std"] = "mean_epistemic_std"
    lines.append("AUROC of 900 K frames: " + ", ".join(f"{number(found[key])} by {name}" for name, key in by.items()))
    return lines


def of_e2ip(entries: list[dict]) -> dict:
    return next(entry for entry in entries if entry["label"] == "e2ip")


def number(value: float | None) -> str:
    """Return two decimals, or ``none`` for what the predictions do not have."""
    return "none" if value is None else f"{value:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("host", choices=("nequip", "mace"))
    parser.add_argument("--epochs", type=int, help="training epochs (default: 60 for NequIP, 40 for MACE)")
    options = parser.parse_args()
    out = Path("runs") / "demo" / options.host
    (ROOT / out).mkdir(parents=True, exist_ok=True)
    stages = {"nequip": nequip_stages, "mace": mace_stages}[options.host]
    began = time.monotonic()
    say(f"[{options.host}] commands of {Path(sys.executable).parent}, started in {ROOT}; logs and results in {out}")
    try:
        run(options.host, stages(out, options.epochs or EPOCHS[options.host]), out)
    except KeyboardInterrupt:
        sys.exit(f"\n[{options.host}] stopped; the same command goes on from the last finished step")
    say("\n" + "\n".join(in_and_out_of_distribution(out)) + "\n")
    say(f"[{options.host}] finished in {time.monotonic() - began:.0f} s: tables and figure page in {out}/compare")


if __name__ == "__main__":
    main()
