"""Train and score every run of the calibration tables, then write the tables.

    python benchmarks/calibration.py --mace-bin DIR --nequip-bin DIR [--jobs 2] [--only PATTERN] [--tables]

A run is one folder under ``runs/calibration``. When it has finished, its scores go to ``docs/results``, one
small JSON file each, and the tables of ``docs/calibration.md`` are written from those alone. Runs that have
such a file are skipped (remove it to have one again), killed ones resume from their last checkpoint,
so the command can be stopped and repeated at will. Each run uses one thread. Data comes from ``E2IP_DATA``.
"""

import argparse
import fnmatch
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs" / "calibration"
RESULTS = ROOT / "docs" / "results"

#: name -> (file with training frames, test files by label)
DATASETS = {
    "aspirin": ("rmd17/aspirin_split01_train.extxyz", {"test": "rmd17/aspirin_split01_test.extxyz"}),
    "acac": (
        "acac/acac_train_300K.extxyz",
        {"300K": "acac/acac_test_300K.extxyz", "600K": "acac/acac_test_600K.extxyz"},
    ),
}
TRAIN_FRAMES, VALID_FRAMES = 450, 50

#: Variant -> plugin options, in the words that both hosts share; None: the stock baseline.
VARIANTS = {
    "baseline": None,
    "coupled": {"evidence": "coupled"},
    "independent-0": {"evidence": "independent", "evidence_weight": 0.0},
    "independent-0.01": {"evidence": "independent", "evidence_weight": 0.01},
    "independent-0.1": {"evidence": "independent", "evidence_weight": 0.1},
    "paper": {"preset": "paper"},
}

#: Heading, entry of `e2ip compare`'s JSON, factor, digits.
COLUMNS = [
    ("force MAE meV/Å", "force_mae", 1000.0, 1),
    ("energy MAE meV/atom", "energy_mae", 1000.0, 2),
    ("NLL", "nll", 1.0, 3),
    ("CE", "calibration_error", 1.0, 3),
    ("coverage@95", "coverage95", 1.0, 3),
    ("energy score meV/Å", "energy_score", 1000.0, 1),
    ("Spearman", "spearman_epistemic", 1.0, 3),
    ("AUROC", "auroc_epistemic", 1.0, 3),
    ("mean ν", "mean_nu", 1.0, 2),
    ("mean κ", "mean_kappa", 1.0, 2),
]


class Run(NamedTuple):
    host: str
    dataset: str
    variant: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.dataset}_{self.host}_{self.variant}_s{self.seed}"

    @property
    def folder(self) -> Path:
        return RUNS / self.name

    @property
    def scores(self) -> Path:
        return RESULTS / f"{self.name}.json"


def plan() -> list[Run]:
    """Every run, most wanted first."""
    runs = [Run("mace", "aspirin", v, 1) for v in ("baseline", "coupled", "independent-0.01")]
    runs += [Run("nequip", "aspirin", v, 1) for v in ("baseline", "coupled")]
    runs += [Run("mace", "aspirin", v, 1) for v in ("independent-0", "independent-0.1", "paper")]
    runs += [Run(h, "aspirin", v, s) for s in (2, 3) for h in ("mace", "nequip") for v in ("baseline", "coupled")]
    runs += [Run("mace", "acac", v, 1) for v in VARIANTS]
    return runs


def split_frames(source: Path, targets: list[tuple[Path, int]]) -> None:
    """Copy consecutive frames of an extxyz file verbatim; ASE would round numbers."""
    lines = source.read_text().splitlines(keepends=True)
    start = 0
    for target, count in targets:
        first = start
        for _ in range(count):
            start += int(lines[start]) + 2
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("".join(lines[first:start]))


def dataset_files(name: str) -> dict[str, Path]:
    """Paths of train, valid and the test sets; the split is made on first use."""
    if "E2IP_DATA" not in os.environ:
        raise SystemExit("set E2IP_DATA to the folder that holds rmd17/ and acac/")
    data = Path(os.environ["E2IP_DATA"]).resolve()
    train, tests = DATASETS[name]
    split = {"train": RUNS / "data" / f"{name}_train.extxyz", "valid": RUNS / "data" / f"{name}_valid.extxyz"}
    if not split["valid"].exists():
        split_frames(data / train, [(split["train"], TRAIN_FRAMES), (split["valid"], VALID_FRAMES)])
    return split | {label: data / path for label, path in tests.items()}


def mace_commands(run: Run, files: dict[str, Path], bin_dir: Path) -> list[list[str]]:
    train = [str(bin_dir / "mace_run_train"), "--config", str(ROOT / "benchmarks" / "mace.yaml"), "--restart_latest"]
    train += ["--name", run.name, "--seed", str(run.seed)]
    train += ["--train_file", str(files["train"]), "--valid_file", str(files["valid"])]
    options = VARIANTS[run.variant]
    if options is not None:
        train += ["--readout", "e2ip"]
        for key, value in options.items():
            train += [f"--e2ip_{key}", str(value)]
    if run.variant == "paper":
        # The paper's weights go with its raw NLL; optimiser and schedule stay those of the other rows.
        train += ["--energy_weight", "1", "--forces_weight", "10000", "--clip_grad", "10"]
    predict = [str(bin_dir / "mace_eval_configs"), "--model", f"{run.name}.model", "--device", "cpu"]
    predict += ["--default_dtype", "float32", "--batch_size", "50"]
    tests = DATASETS[run.dataset][1]
    return [train, *([*predict, "--configs", str(files[t]), "--output", f"{t}.xyz"] for t in tests)]


#: NequIP runs use the project's ready configs; these overrides are shared by baseline and evidential runs.
NEQUIP_OVERRIDES = [
    "max_epochs=40",
    "learning_rate=0.01",
    "training_module.lr_scheduler.scheduler._target_=torch.optim.lr_scheduler.ExponentialLR",
    "~training_module.lr_scheduler.scheduler.factor",
    "~training_module.lr_scheduler.scheduler.patience",
    "+training_module.lr_scheduler.scheduler.gamma=0.92",
]


def nequip_commands(run: Run, files: dict[str, Path], bin_dir: Path) -> list[list[str]]:
    config = "nequip_baseline" if VARIANTS[run.variant] is None else "nequip_e2ip"
    tests = list(DATASETS[run.dataset][1])
    train = [str(bin_dir / "nequip-train"), "-cp", str(ROOT / "configs"), "-cn", config]
    train += [f"hydra.run.dir={run.folder}", f"seed={run.seed}", *NEQUIP_OVERRIDES]
    train += [f"train_file={files['train']}", f"val_file={files['valid']}"]
    train.append(f"test_file=[{','.join(str(files[label]) for label in tests)}]")
    for key, value in (VARIANTS[run.variant] or {}).items():
        train.append(f"{key}={value}")
    checkpoint = run.folder / "last.ckpt"
    if checkpoint.exists():
        train.append(f"++ckpt_path={checkpoint}")
    return [train]


def execute(run: Run, bins: dict[str, Path]) -> None:
    """Train, predict and score, unless there are scores already."""
    if run.scores.exists():
        return
    run.folder.mkdir(parents=True, exist_ok=True)
    build = mace_commands if run.host == "mace" else nequip_commands
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    started = time.time()
    for command in build(run, dataset_files(run.dataset), bins[run.host]):
        print(f"[{run.name}] {' '.join(command)}", flush=True)
        with open(run.folder / "log.txt", "a") as log:
            code = subprocess.run(command, cwd=run.folder, env=environment, stdout=log, stderr=log).returncode
        if code:
            print(f"[{run.name}] failed with status {code}; see {run.folder / 'log.txt'}", flush=True)
            return
    score(run, time.time() - started)
    print(f"[{run.name}] finished after {(time.time() - started) / 60:.1f} min", flush=True)


def predictions(run: Run) -> dict[str, Path]:
    """The file of predictions for every test set, by label."""
    labels = DATASETS[run.dataset][1]
    return {
        label: run.folder / (f"{label}.xyz" if run.host == "mace" else f"test_dataset{index}.xyz")
        for index, label in enumerate(labels)
    }


def score(run: Run, seconds: float) -> None:
    """Scores of a run's predictions, as `e2ip compare` gives them, into ``docs/results``."""
    from e2ip_plugins.report.compare import compare, load_models

    result = run._asdict() | {"seconds": round(seconds), "tests": {}}
    for label, path in predictions(run).items():
        model = load_models([path])[0]
        report = compare([model])["models"][0]
        parameters = model.predictions.parameters or {}
        evidence = {f"mean_{k[5:]}": float(v[model.kept].mean()) for k, v in parameters.items() if v.ndim == 1}
        result["tests"][label] = report["overall"] | evidence
    RESULTS.mkdir(parents=True, exist_ok=True)
    run.scores.write_text(json.dumps(result, indent=1) + "\n")


def compare_with_baselines(bin_dir: Path) -> None:
    """`e2ip compare` on baseline and default readout, per host, for the first seed whose predictions are still here."""
    for host in ("mace", "nequip"):
        for seed in (1, 2, 3):
            files = [predictions(Run(host, "aspirin", v, seed))["test"] for v in ("baseline", "coupled")]
            if all(path.exists() for path in files):
                out = RUNS / f"compare_{host}"
                command = [
                    str(bin_dir / "e2ip"),
                    "compare",
                    *map(str, files),
                    "--labels",
                    "baseline,e2ip",
                    "--out",
                    str(out),
                ]
                subprocess.run(command, check=True)
                text = (out / "compare.md").read_text().replace(f"{RUNS}/", "")
                page = ROOT / "docs" / "results" / f"compare_aspirin_{host}.md"
                page.write_text("\n".join(line for line in text.splitlines() if not line.startswith("![")) + "\n")
                break


def mean_std(values: list[float], factor: float, digits: int) -> str:
    """`mean ± sample standard deviation`; empty without values."""
    if not values or any(v is None for v in values):
        return ""
    text = f"{factor * statistics.mean(values):.{digits}f}"
    return text if len(values) == 1 else f"{text} ± {factor * statistics.stdev(values):.{digits}f}"


def write_tables() -> None:
    """``docs/calibration.md``'s tables from ``docs/results``; the text around them is kept."""
    results = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    table: dict[tuple, list[dict]] = {}
    for result in results:
        for label, figures in result["tests"].items():
            table.setdefault((result["dataset"], label, result["host"], result["variant"]), []).append(figures)
    lines = []
    for dataset, (_, tests) in DATASETS.items():
        for label in tests:
            keys = [k for k in table if k[:2] == (dataset, label)]
            if not keys:
                continue
            lines += ["", f"### {dataset}, {label}", ""]
            heads = [heading for heading, *_ in COLUMNS]
            lines += ["| host | readout | seeds | " + " | ".join(heads) + " |", "|---|---|---|" + "---|" * len(heads)]
            order = list(VARIANTS)
            for key in sorted(keys, key=lambda k: (k[2], order.index(k[3]))):
                runs = table[key]
                cells = [mean_std([r.get(name) for r in runs], f, d) for _, name, f, d in COLUMNS]
                lines.append(f"| {key[2]} | {key[3]} | {len(runs)} | " + " | ".join(cells) + " |")
    page = ROOT / "docs" / "calibration.md"
    begin, end = "<!-- tables: written by benchmarks/calibration.py -->", "<!-- end of tables -->"
    before, _, rest = page.read_text().partition(begin)
    _, _, after = rest.partition(end)
    page.write_text(before + begin + "\n".join(lines) + "\n\n" + end + after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mace-bin", type=Path, required=True, help="bin folder of the MACE environment")
    parser.add_argument("--nequip-bin", type=Path, required=True, help="bin folder of the NequIP environment")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="*", help="glob on run names, e.g. 'aspirin_mace_*'")
    parser.add_argument("--tables", action="store_true", help="train nothing, only write the tables")
    arguments = parser.parse_args()
    bins = {"mace": arguments.mace_bin.absolute(), "nequip": arguments.nequip_bin.absolute()}
    runs = [run for run in plan() if fnmatch.fnmatch(run.name, arguments.only)]
    if not runs:
        sys.exit(f"no run matches '{arguments.only}'")
    if not arguments.tables:
        with ThreadPoolExecutor(arguments.jobs) as pool:
            list(pool.map(lambda run: execute(run, bins), runs))
        compare_with_baselines(bins["mace"])
    write_tables()


if __name__ == "__main__":
    main()
