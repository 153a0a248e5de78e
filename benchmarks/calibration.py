"""Train and score every run of the calibration tables, then write the tables.

    python benchmarks/calibration.py --mace-bin DIR --nequip-bin DIR [--jobs 2] [--only PATTERN] [--tables]

A run is one folder under ``runs/calibration``. When it has finished, its scores go to ``docs/results``, one
small JSON file each, and the tables of ``docs/calibration.md`` are written from those alone. Runs that have
such a file are skipped (remove it to have one again), killed ones resume from their last checkpoint,
so the command can be stopped and repeated at will. Each run uses one thread. Data comes from ``E2IP_DATA``.
"""

import argparse
import fnmatch
import functools
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import crystals
import leverage

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs" / "calibration"
RESULTS = ROOT / "docs" / "results"


#: Data that a script makes are made once, for all runs that want them.
MAKING = threading.Lock()


class Dataset(NamedTuple):
    """Frames and training settings of one table.

    Attributes
    ----------
    source : str
        File with training frames, below ``E2IP_DATA``; empty: the demo's, or made by its script or `crystals`.
    tests : dict
        Test files by label; ``ood`` is out of distribution.
    train, valid : int
        Frames of each: the first ones, or, where validation frames are spread, every so-manieth for validation.
    species : str
        As NequIP's config wants them.
    mace, nequip : tuple of str
        Arguments beside the common ones.
    """

    source: str
    tests: dict[str, str]
    train: int
    valid: int
    species: str
    spread: bool = False
    mace: tuple[str, ...] = ()
    nequip: tuple[str, ...] = ()


_DEMO = Dataset("", {"test": "test", "ood": "ood"}, 300, 50, "[H,C,N,O]")
DATASETS = {
    "demo": _DEMO,
    "acac": Dataset(
        "acac/acac_train_300K.extxyz",
        {"test": "acac/acac_test_300K.extxyz", "ood": "acac/acac_test_600K.extxyz"},
        450,
        50,
        "[H,C,O]",
    ),
    "aspirin": Dataset(
        "rmd17/aspirin_split01_train.extxyz", {"test": "rmd17/aspirin_split01_test.extxyz"}, 450, 50, "[H,C,O]"
    ),
    "silica": Dataset(
        "silica/zeolite_train.extxyz",
        {"test": "silica/zeolite_test.extxyz", "ood": "silica/zeolite_ood.extxyz"},
        360,
        40,
        "[O,Si]",
        spread=True,
        mace=("--max_num_epochs=20", "--lr_scheduler_gamma=0.86", "--batch_size=2", "--valid_batch_size=8"),
        nequip=("max_epochs=20", "+training_module.lr_scheduler.scheduler.gamma=0.86", "batch_size=2"),
    ),
    "water": Dataset(
        "water/water_train.extxyz",
        {"test": "water/water_test.extxyz", "ood": "water/water_ood_surface.extxyz"},
        139,
        20,
        "[H,O]",
        spread=True,
        mace=(
            *("--max_num_epochs=16", "--lr_scheduler_gamma=0.83", "--batch_size=1", "--valid_batch_size=4"),
            "--r_max=4.5",
        ),
        nequip=(
            *("max_epochs=16", "+training_module.lr_scheduler.scheduler.gamma=0.83", "batch_size=1"),
            "cutoff_radius=4.5",
        ),
    ),
}

_CRYSTAL = Dataset(
    "",
    {"test": "test", "ood": "ood"},
    200,
    40,
    "",
    mace=("--max_num_epochs=24", "--lr_scheduler_gamma=0.88", "--valid_batch_size=10"),
    nequip=("max_epochs=24", "+training_module.lr_scheduler.scheduler.gamma=0.88"),
)
DATASETS |= {name: _CRYSTAL._replace(species=f"[{','.join(c.species)}]") for name, c in crystals.CRYSTALS.items()}
#: The same frames for MACE with half as many channels: how errors grow far out differs between networks.
NARROW = "-16"
_NARROW_MACE = (*_CRYSTAL.mace, "--num_channels=16")
DATASETS |= {name + NARROW: DATASETS[name]._replace(mace=_NARROW_MACE) for name in crystals.CRYSTALS}

#: Further molecules, made and trained as the demo's: names in ASE's g2 collection or start geometries, and species.
MOLECULES = {
    "dimethyl-sulfoxide": ("C2H6SO", "[H,C,O,S]"),
    "pyridine": ("C5H5N", "[H,C,N]"),
    "benzyloxypyridinamine": (str(ROOT / "benchmarks" / "benzyloxypyridinamine.xyz"), "[H,C,N,O]"),
}
DATASETS |= {name: _DEMO._replace(species=species) for name, (_, species) in MOLECULES.items()}
AS_THE_DEMO = ("demo", *MOLECULES)

#: Variant -> plugin options, in the words that both hosts share; None: the stock baseline.
VARIANTS = {
    "baseline": None,
    "leverage": {},
    "host-forces": {"forces": "host"},
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

    @property
    def studied(self) -> bool:
        """Whether `leverage.py` judges it; stock models where the tables have committees of them."""
        return self.variant in ("leverage", "host-forces") or (
            self.variant == "baseline" and self.dataset in ("demo", "acac")
        )

    @property
    def leverage(self) -> Path:
        return RESULTS / "leverage" / f"{self.name}.json"


def plan() -> list[Run]:
    """Every run, most wanted first."""
    hosts, main = ("mace", "nequip"), ("leverage", "baseline")
    runs = [Run(h, d, v, 1) for d in ("demo", "acac") for h in hosts for v in main]
    runs += [Run("mace", d, "leverage", 1) for d in ("silica", "water", "aspirin")]
    runs += [Run("nequip", "aspirin", v, 1) for v in main]
    runs += [Run(h, d, v, s) for s in (2, 3) for d in ("demo", "acac") for h in hosts for v in main]
    runs += [Run(h, d, "host-forces", 1) for d in ("demo", "acac") for h in hosts]
    runs += [Run(h, "aspirin", v, s) for s in (2, 3) for h in hosts for v in main]
    runs += [Run(h, d, "baseline", s) for s in (4, 5) for d in ("demo", "acac") for h in hosts]
    runs += [Run(h, d, "leverage", s) for s in (1, 2, 3) for d in ("silica", "water") for h in hosts]
    runs += [Run(h, d, "leverage", 1) for d in crystals.CRYSTALS for h in hosts]
    runs += [Run("mace", d + NARROW, "leverage", 1) for d in crystals.CRYSTALS]
    runs += [Run(h, d, "leverage", s) for s in (1, 2) for d in MOLECULES for h in hosts]
    runs += [Run("mace", d, v, 1) for d in ("aspirin", "acac") for v in VARIANTS]
    return list(dict.fromkeys(runs))


def read_frames(source: Path) -> list[str]:
    """Frames of an extxyz file, verbatim; ASE would round numbers."""
    lines, frames, start = source.read_text().splitlines(keepends=True), [], 0
    while start < len(lines):
        end = start + int(lines[start]) + 2
        frames.append("".join(lines[start:end]))
        start = end
    return frames


def molecule_folder(name: str) -> Path:
    """Folder with the frames of one of `MOLECULES`, made on first use: 6 minutes for 13 atoms, 40 for 27."""
    folder = RUNS / "data" / name
    with MAKING:
        if not folder.exists():
            if importlib.util.find_spec("tblite") is None:
                raise SystemExit(f"the frames of {name} are made with tblite, which nox -s calibration installs")
            unfinished = folder.with_name(f"{name}.unfinished")
            script = [sys.executable, str(ROOT / "demo" / "make_data.py"), "--molecule", MOLECULES[name][0]]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            subprocess.run([*script, "--out", str(unfinished)], env=environment, check=True)
            unfinished.rename(folder)
    return folder


def dataset_files(name: str) -> dict[str, Path]:
    """Paths of train, valid and the test sets; the split is made on first use."""
    dataset = DATASETS[name]
    if (metal := name.removesuffix(NARROW)) in crystals.CRYSTALS:
        return crystals.files(metal, RUNS / "data")
    if not dataset.source:
        folder = ROOT / "demo" / "data"
        if name in MOLECULES:
            folder = molecule_folder(name)
        return {label: folder / f"{label}.extxyz" for label in ("train", "valid", *dataset.tests)}
    if "E2IP_DATA" not in os.environ:
        raise SystemExit("set E2IP_DATA to the folder that holds rmd17/, acac/, silica/ and water/")
    data = Path(os.environ["E2IP_DATA"]).resolve()
    split = {"train": RUNS / "data" / f"{name}_train.extxyz", "valid": RUNS / "data" / f"{name}_valid.extxyz"}
    if not split["valid"].exists():
        frames = read_frames(data / dataset.source)[: dataset.train + dataset.valid]
        chosen = range(dataset.train, dataset.train + dataset.valid)
        if dataset.spread:
            chosen = [int((i + 0.5) * len(frames) / dataset.valid) for i in range(dataset.valid)]
        split["train"].parent.mkdir(parents=True, exist_ok=True)
        split["train"].write_text("".join(frame for i, frame in enumerate(frames) if i not in chosen))
        split["valid"].write_text("".join(frames[i] for i in chosen))
    return split | {label: data / path for label, path in dataset.tests.items()}


#: What no model of the demo's molecule should be certain of, in the order of `nonsense_file`.
NONSENSE = ("isolated C", "C-H at 0.3 Å", "benzene", "methane", "C crystal, one atom in 2.5 Å")


@functools.cache
def nonsense_file() -> Path:
    """Structures that have nothing to do with the demo's training set."""
    from ase import Atoms
    from ase.build import molecule
    from ase.io import write

    frames = [Atoms("C"), Atoms("CH", [[0, 0, 0], [0, 0, 0.3]]), molecule("C6H6"), molecule("CH4")]
    frames.append(Atoms("C", cell=[2.5] * 3, pbc=True))
    path = RUNS / "data" / "nonsense.extxyz"
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, frames)
    return path


def mace_commands(run: Run, files: dict[str, Path], bin_dir: Path) -> list[list[str]]:
    demo = run.dataset in AS_THE_DEMO
    config = ROOT / ("configs/mace_baseline.yaml" if demo else "benchmarks/mace.yaml")
    train = [str(bin_dir / "mace_run_train"), "--config", str(config), "--restart_latest"]
    train += ["--name", run.name, "--seed", str(run.seed), *DATASETS[run.dataset].mace]
    # As in the demo.
    train += ["--max_ell", "2", "--correlation", "2", "--max_num_epochs", "40"] if demo else []
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
    predict += ["--default_dtype", "float32", "--batch_size", "50" if files["train"].stat().st_size < 2**20 else "4"]
    tests = DATASETS[run.dataset].tests
    return [train, *([*predict, "--configs", str(files[t]), "--output", f"{t}.xyz"] for t in tests)]


#: NequIP runs use the project's ready configs; these overrides are shared by baseline and evidential runs.
NEQUIP_OVERRIDES = [
    "learning_rate=0.01",
    "training_module.lr_scheduler.scheduler._target_=torch.optim.lr_scheduler.ExponentialLR",
    "~training_module.lr_scheduler.scheduler.factor",
    "~training_module.lr_scheduler.scheduler.patience",
]
NEQUIP_SCHEDULE = ("max_epochs=40", "+training_module.lr_scheduler.scheduler.gamma=0.92")


def nequip_commands(run: Run, files: dict[str, Path], bin_dir: Path) -> list[list[str]]:
    dataset = DATASETS[run.dataset]
    config = "nequip_baseline" if VARIANTS[run.variant] is None else "nequip_e2ip"
    train = [str(bin_dir / "nequip-train"), "-cp", str(ROOT / "configs"), "-cn", config]
    train += [f"hydra.run.dir={run.folder}", f"seed={run.seed}", f"chemical_species={dataset.species}"]
    # The demo's own schedule is that of the ready configs.
    demo = run.dataset in AS_THE_DEMO
    train += ["max_epochs=60"] if demo else [*NEQUIP_OVERRIDES, *(dataset.nequip or NEQUIP_SCHEDULE)]
    train += [f"train_file={files['train']}", f"val_file={files['valid']}", "+trainer.enable_progress_bar=false"]
    train.append(f"test_file=[{','.join(str(files[label]) for label in dataset.tests)}]")
    for key, value in (VARIANTS[run.variant] or {}).items():
        train.append(f"{key}={value}")
    checkpoint = run.folder / "last.ckpt"
    if checkpoint.exists():
        train.append(f"++ckpt_path={checkpoint}")
    return [train]


def leverage_commands(run: Run, files: dict[str, Path], bin_dir: Path) -> list[list[str]]:
    """Study of the leverage: of a model with a readout, or of a stock model that gets one without training."""
    script = [str(bin_dir / "python"), str(ROOT / "benchmarks" / "leverage.py")]
    model = f"{run.name}.model" if run.host == "mace" else "best.ckpt"
    commands = []
    if VARIANTS[run.variant] is None:
        fitted = "fitted.model" if run.host == "mace" else "fitted.ckpt"
        fit = [str(bin_dir / "e2ip"), "fit", model, "--train", str(files["train"]), "--valid", str(files["valid"])]
        commands.append([*fit, "--output", fitted, "--overwrite"])
        model = fitted
    sets = [f"--set={name}={files[name]}" for name in ("train", "valid", *DATASETS[run.dataset].tests)]
    sets += [f"--set=nonsense={nonsense_file()}"] if run.dataset == "demo" else []
    commands.append([*script, "atoms", "--host", run.host, "--model", model, *sets, "--out", "atoms"])
    untrained = ["--untrained"] if VARIANTS[run.variant] is None else []
    commands.append([*script, "judge", "atoms", *untrained, "--out", str(run.leverage)])
    return commands


def execute(run: Run, bins: dict[str, Path]) -> None:
    """Train, predict and score, unless there are scores already."""
    if run.scores.exists() and (run.leverage.exists() or not run.studied):
        return
    run.folder.mkdir(parents=True, exist_ok=True)
    build = mace_commands if run.host == "mace" else nequip_commands
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    started = time.time()
    files = dataset_files(run.dataset)
    run.leverage.parent.mkdir(parents=True, exist_ok=True)
    for path in predictions(run).values():  # of a run that was killed: NequIP's writer appends
        path.unlink(missing_ok=True)
    commands = build(run, files, bins[run.host])
    if run.studied:
        commands += leverage_commands(run, files, bins[run.host])
    for command in commands:
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
    labels = DATASETS[run.dataset].tests
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


def judge_committees(bins: dict[str, Path]) -> None:
    """Score the five stock models of a set together, where all of them are here."""
    for dataset, host in (("demo", "mace"), ("demo", "nequip"), ("acac", "mace"), ("acac", "nequip")):
        members = [Run(host, dataset, "baseline", seed).folder / "atoms" for seed in range(1, 6)]
        if all((member / "test.npz").exists() for member in members):
            command = [bins["mace"] / "python", ROOT / "benchmarks" / "leverage.py", "committee", *members]
            out = RESULTS / "leverage" / f"{dataset}_{host}_committee.json"
            subprocess.run([*map(str, command), "--out", str(out)], check=True)


def compare_with_baselines(bin_dir: Path) -> None:
    """`e2ip compare` on baseline and default readout, in and out of distribution, per host."""
    for host in ("mace", "nequip"):
        both = [predictions(Run(host, "acac", v, 1)) for v in ("baseline", "leverage")]
        if not all(path.exists() for files in both for path in files.values()):
            continue
        out = RUNS / f"compare_{host}"
        command = [bin_dir / "e2ip", "compare", *(files["test"] for files in both), "--labels", "baseline,e2ip"]
        command += [item for files in both for item in ("--ood", files["ood"])]
        subprocess.run([*map(str, command), "--out", str(out)], check=True)
        text = (out / "compare.md").read_text().replace(f"{RUNS}/", "")
        page = RESULTS / f"compare_acac_{host}.md"
        page.write_text("\n".join(line for line in text.splitlines() if not line.startswith("![")) + "\n")


def mean_std(values: list[float], factor: float, digits: int) -> str:
    """`mean ± sample standard deviation`; empty without values."""
    if not values or any(v is None for v in values):
        return ""
    text = f"{factor * statistics.mean(values):.{digits}f}"
    return text if len(values) == 1 else f"{text} ± {factor * statistics.stdev(values):.{digits}f}"


def write_tables() -> None:
    """Tables of ``docs/calibration.md`` and ``docs/leverage.md`` from ``docs/results``; text around them is kept."""
    results = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*_s?.json"))]
    table: dict[tuple, list[dict]] = {}
    for result in results:
        for label, figures in result["tests"].items():
            table.setdefault((result["dataset"], label, result["host"], result["variant"]), []).append(figures)
    studies = {path.stem: json.loads(path.read_text()) for path in sorted((RESULTS / "leverage").glob("*.json"))}
    lines = []
    for dataset in DATASETS:
        for label in DATASETS[dataset].tests:
            keys = [k for k in table if k[:2] == (dataset, label)]
            if not keys:
                continue
            lines += ["", f"## {dataset}, {label}", ""]
            heads = [heading for heading, *_ in COLUMNS]
            lines += ["| host | readout | seeds | " + " | ".join(heads) + " |", "|---|---|---|" + "---|" * len(heads)]
            order = list(VARIANTS)
            for key in sorted(keys, key=lambda k: (k[2], order.index(k[3]))):
                runs = table[key]
                cells = [mean_std([r.get(name) for r in runs], f, d) for _, name, f, d in COLUMNS]
                forms = {study.get("form") for study in by_seed(studies, key[2], dataset, key[3])}
                mark = EARLIER * (key[3] in ("leverage", "host-forces") and forms != {leverage.FORM})
                lines.append(f"| {key[2]} | {key[3]}{mark} | {len(runs)} | " + " | ".join(cells) + " |")
    put(ROOT / "docs" / "calibration.md", "tables", lines)
    put(ROOT / "docs" / "leverage.md", "in and out", in_and_out(studies))
    put(ROOT / "docs" / "leverage.md", "frames", frame_aurocs(studies))
    put(ROOT / "docs" / "leverage.md", "nonsense", nonsense_table(studies))
    put(ROOT / "docs" / "leverage.md", "alternatives", alternatives(studies))
    put(ROOT / "docs" / "leverage.md", "forces", force_errors(table))


def put(page: Path, name: str, lines: list[str]) -> None:
    """Replace what stands between a page's two marks of that name."""
    begin, end = f"<!-- {name}: written by benchmarks/calibration.py -->", f"<!-- end of {name} -->"
    before, _, rest = page.read_text().partition(begin)
    _, _, after = rest.partition(end)
    page.write_text(before + begin + "\n" + "\n".join(lines) + "\n\n" + end + after)


STUDY_COLUMNS = [
    ("NLL", "nll", 1.0, 2),
    ("CE", "calibration_error", 1.0, 3),
    ("coverage@95", "coverage95", 1.0, 3),
    ("Spearman", "spearman_epistemic", 1.0, 3),
]


def by_seed(studies: dict[str, dict], host: str, dataset: str, variant: str) -> list[dict]:
    """Studies of one kind of run, all seeds."""
    return [s for name, s in studies.items() if name.startswith(f"{dataset}_{host}_{variant}_s")]


#: Mark of rows with models whose leverage had another form than the package has today.
EARLIER = " †"


def in_and_out(studies: dict[str, dict]) -> list[str]:
    heads = [f"{heading}, {where}" for where in ("in", "out") for heading, *_ in STUDY_COLUMNS]
    lines = ["", "| set | host | uncertainty | models | " + " | ".join(heads) + " |", "|---|---|---|---|" + "---|" * 8]
    for dataset in DATASETS:
        for host in ("mace", "nequip"):
            trained, stock, apart = (
                by_seed(studies, host, dataset, v) for v in ("leverage", "baseline", "host-forces")
            )
            committee = [s for name, s in studies.items() if name == f"{dataset}_{host}_committee"]
            rows = [("as trained (`coupled`)", trained, "as trained"), ("`leverage`", trained, "leverage")]
            rows += [("`leverage`, `forces: host`", apart, "leverage")]
            rows += [("`leverage` on a stock model, untrained", stock, "leverage")]
            rows += [(f"committee of five, {how}", committee, how) for how in ("raw", "scaled")]
            for title, runs, key in rows:
                if chosen := [run[key] for run in runs if key in run]:
                    title += EARLIER * (key == "leverage" and any(r.get("form") != leverage.FORM for r in runs))
                    found = [
                        [figures.get(test, {}).get(c[1]) for figures in chosen]
                        for test in ("test", "ood")
                        for c in STUDY_COLUMNS
                    ]
                    cells = [mean_std(v, f, d) for v, (_, _, f, d) in zip(found, STUDY_COLUMNS * 2, strict=True)]
                    lines.append(f"| {dataset} | {host} | {title} | {len(chosen)} | " + " | ".join(cells) + " |")
    return lines


def frame_aurocs(studies: dict[str, dict]) -> list[str]:
    lines = ["", "| set | host | by | AUROC |", "|---|---|---|---|"]
    for dataset in DATASETS:
        for host in ("mace", "nequip"):
            kinds = {"": "leverage", ", stock model": "baseline"}
            for suffix, variant in kinds.items():
                found = [s["frame_auroc"] for s in by_seed(studies, host, dataset, variant) if "frame_auroc" in s]
                for name in found[0] if found else ():
                    if variant == "leverage" or "trained" not in name:
                        cell = mean_std([f[name] for f in found], 1.0, 3)
                        lines.append(f"| {dataset} | {host} | {name}{suffix} | {cell} |")
            committee = studies.get(f"{dataset}_{host}_committee", {}).get("frame_auroc", {})
            lines += [f"| {dataset} | {host} | {k}, committee of five | {v:.3f} |" for k, v in committee.items()]
    return lines


def nonsense_table(studies: dict[str, dict]) -> list[str]:
    """The least of all seeds."""
    lines = ["", "| structure | host | model | leverage | training atoms below | epistemic std eV/Å | below |"]
    lines.append("|---|---|---|---|---|---|---|")
    kinds = {"e²IP": "leverage", "stock": "baseline"}
    rows = {
        (host, title): [s["nonsense"] for s in by_seed(studies, host, "demo", variant) if "nonsense" in s]
        for host in ("mace", "nequip")
        for title, variant in kinds.items()
    }
    for i, structure in enumerate(NONSENSE):
        for (host, title), runs in rows.items():
            if runs:
                least = {name: min(run[i][name] for run in runs) for name in runs[0][i]}
                lines.append(
                    f"| {structure} | {host} | {title}, {len(runs)} seeds | {least['leverage']:.1f} | "
                    f"{100 * least['training_below_leverage']:.2f} % | {least['epistemic_std']:.3g} | "
                    f"{100 * least['training_below_epistemic_std']:.2f} % |"
                )
    return lines


def alternatives(studies: dict[str, dict]) -> list[str]:
    """Means over sets and hosts of means over seeds; worst cases over sets and hosts."""
    studies = {name: study for name, study in studies.items() if study.get("form") == leverage.FORM}
    kinds = [(h, d) for d in DATASETS for h in ("mace", "nequip") if by_seed(studies, h, d, "leverage")]
    if not kinds:
        return []
    heads = ["NLL, in", "CE, in", "Spearman, in", "NLL, out", "CE, out", "largest CE, out", "coverage@95, out: lowest"]
    heads += ["highest", "Spearman, out"]
    lines = ["", "| form | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    runs = [s for kind in kinds for s in by_seed(studies, *kind, "leverage")]
    # Those that all of them have: `leverage.py` may have been changed between two runs.
    titles = [title for title in runs[0]["alternatives"] if all(title in s["alternatives"] for s in runs)]
    for title in ["as trained", "leverage", *titles]:
        cells: dict[str, list[list[float]]] = {"test": [], "ood": []}
        for kind in kinds:
            runs = [s.get(title) or s["alternatives"][title] for s in by_seed(studies, *kind, "leverage")]
            for test, rows in cells.items():
                if test in runs[0]:
                    rows.append([statistics.mean(r[test][c[1]] for r in runs) for c in STUDY_COLUMNS])
        (nll, ce, _, rho), (nll2, ce2, coverage, rho2) = (list(zip(*rows, strict=True)) for rows in cells.values())
        row = [f"{statistics.mean(nll):.3f}", f"{statistics.mean(ce):.3f}", f"{statistics.mean(rho):.3f}"]
        row += [f"{statistics.mean(nll2):.2f}", f"{statistics.mean(ce2):.3f}", f"{max(ce2):.3f}"]
        row += [f"{min(coverage):.3f}", f"{max(coverage):.3f}", f"{statistics.mean(rho2):.3f}"]
        lines.append(f"| {title} | " + " | ".join(row) + " |")
    return lines


def force_errors(table: dict[tuple, list[dict]]) -> list[str]:
    lines = ["", "| set | | host | seeds | baseline meV/Å | e²IP meV/Å | ratio |", "|---|---|---|---|---|---|---|"]
    for dataset in DATASETS:
        for label in DATASETS[dataset].tests:
            for host in ("mace", "nequip"):
                both = [table.get((dataset, label, host, v)) for v in ("baseline", "leverage")]
                if all(both):
                    maes = [[1000 * run["force_mae"] for run in runs] for runs in both]
                    ratio = statistics.mean(maes[1]) / statistics.mean(maes[0])
                    seeds = ", ".join(str(len(m)) for m in maes)
                    cells = " | ".join(mean_std(m, 1.0, 1) for m in maes)
                    lines.append(f"| {dataset} | {label} | {host} | {seeds} | {cells} | {ratio:.3f} |")
    return lines


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
        judge_committees(bins)
        compare_with_baselines(bins["mace"])
    write_tables()


if __name__ == "__main__":
    main()
