"""Results of benchmarks in JSON files, and tables of them in the paper's layout and units."""

import json
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from e2ip_plugins import families
from e2ip_plugins.bench import commands, cost, damping, data
from e2ip_plugins.bench.catalogue import DATASETS, EARLY, HOSTS, METHODS, SHIPPED, TABLES, read_table, read_yaml
from e2ip_plugins.bench.judge import Case, ensemble, judge, spread
from e2ip_plugins.bench.plan import Plan, Run, ensemble_size, runs
from e2ip_plugins.bench.runs import SECONDS, finished
from e2ip_plugins.errors import InputError
from e2ip_plugins.files import replacing
from e2ip_plugins.keys import KCAL_PER_MOL


class Column(NamedTuple):
    """One figure of `e2ip compare` in a table: heading, name, factor, digits."""

    heading: str
    name: str
    factor: float
    digits: int


COLUMNS = (
    Column("MAE", "force_mae", 1.0 / KCAL_PER_MOL, 3),
    Column("energy MAE meV/atom", "energy_mae", 1000.0, 2),
    Column("ES", "energy_score", 1.0 / KCAL_PER_MOL, 3),
    Column("coverage@95", "coverage95", 1.0, 3),
    Column("CE", "calibration_error", 1.0, 4),
    Column("NLL", "nll_kcal", 1.0, 3),
    Column("Spearman, epistemic", "spearman_epistemic", 1.0, 3),
    Column("total", "spearman_total", 1.0, 3),
    Column("AUROC of frames", "frame_auroc", 1.0, 3),
    Column("training s", "seconds", 1.0, 0),
    Column("ms/atom", "cost", 1.0, 3),
)

#: Ends of the 95 % interval of coverage@95, of a bootstrap of configurations.
INTERVAL = ("coverage95_low", "coverage95_high")

#: Figures that results keep of every test.
KEPT = (*(column.name for column in COLUMNS), *INTERVAL)

ROTATION = (
    Column("‖ΔΣ‖/‖Σ‖, mean", "covariance", 1.0, 6),
    Column("largest", "covariance_largest", 1.0, 6),
    Column("abs. Δρ", "spearman", 1.0, 4),
    Column("abs. ΔNLL", "nll", 1.0, 4),
    Column("abs. ΔES", "energy_score", 1.0 / KCAL_PER_MOL, 5),
)

EXPLANATION = (
    "MAE and ES in kcal/mol/Å, NLL in nats for a density in (kcal/mol/Å)⁻³. ± is the sample standard deviation "
    "over seeds; in brackets the 95 % interval of coverage@95 by a bootstrap of configurations, mean over seeds. "
    "DE, MVE-DE: committees (deep ensembles) of K stock or MVE models; MVE: a mean and a variance per component. "
    "Calibration: raw, none; floor and scale: constants fitted to validation frames (`e2ip calibrate`), or to "
    "further ones. "
    "Where floor or scale agrees with raw, the constant is 0 or 1, because the validation frames ask for none "
    "(docs/howto/calibrate.md). Methods that ensembles are made of have a run for every member. "
    "MAE: of force components; ES: energy score; CE: calibration error; definitions in docs/understand/glossary.md. "
    "Spearman: norm of the error against the epistemic and the total standard deviation. AUROC of frames: out of "
    "distribution against in distribution, by mean leverage, else by mean epistemic standard deviation. "
    "training s: processor time of the training command, with NequIP its predictions of all files included. "
    "ms/atom: one frame through the ASE calculator on one thread, all methods in turn; ensembles member by "
    "member. Isotropic: a third of the trace of every covariance in all directions. "
    "Covariances of two or three stock members have no full rank: only with a floor they have coverage, CE and "
    "NLL, and no row scale. ΔΣ, Δρ, ΔNLL, ΔES: changes of covariances, Spearman, NLL and ES when every "
    "frame is rotated. Preset smoke shows that everything runs; its figures rank nothing. "
    "Paper: its own networks, splits and lengths of training (arXiv:2602.10419); its silica is a glass."
)

#: Columns that mean nothing where a covariance has no full rank.
NEED_FULL_RANK = ("coverage95", "calibration_error", "nll_kcal")

#: Titles of ensembles of so few stock models that their covariance has no full rank, which takes four members.
TOO_FEW = tuple(f"{METHODS['stock'].ensemble}, K = {members}" for members in (2, 3))

#: Row of results: one method on one set with all its seeds (``cases``), or the beginning of one training (``steps``).
Row = Dict[str, Any]


def rows(plan: Plan) -> Iterator[Row]:
    """Scores of all finished runs of the plan's table, of both hosts, and of ensembles whose members are all finished.

    Whatever a call trains, its table has all that the folder has.
    """
    out = plan.out
    for name in plan.table.sets:
        for host in HOSTS:
            done = [run for run in runs(host, plan.preset, (name,), plan.methods) if finished(run, out)]
            timed = cost.path(name, host, out)
            costs = data.read_json(timed)["ms_per_atom"] if timed.exists() else {}
            for method in (m for m in plan.methods if m not in EARLY):
                of_method = [_case(run, plan) for run in done if run.method == method]
                title = METHODS[method].title
                if of_method:
                    yield _row(name, host, title, of_method, costs.get(title))
                title, size = METHODS[method].ensemble, ensemble_size(method, plan.preset)
                members = of_method[:size]
                if not members or len(members) < size:
                    continue
                predicted = all(path.exists() for case in members for path in case.files.values())
                # Committees of stock models also as they are mostly used: few models do not determine a matrix.
                for isotropic in (False, True) if not METHODS[method].readout else (False,):
                    folder = out / "ensembles" / f"{name}_{host}_{title}{'-isotropic' * isotropic}"
                    if isotropic and not predicted and not (folder / "scores.json").exists():
                        continue  # the predictions have been removed
                    kind = "isotropic" if isotropic else f"K = {size}"
                    yield _row(name, host, f"{title}, {kind}", [ensemble(members, folder, isotropic)], costs.get(title))


def _case(run: Run, plan: Plan) -> Case:
    folder, chosen = plan.out / "runs" / run.name, plan.sets[run.dataset]
    return Case(folder, {label: folder / commands.prediction(run, chosen, label) for label in chosen.labels})


def _row(name: str, host: str, title: str, cases: Sequence[Case], milliseconds: Optional[float]) -> Row:
    row: Row = {"dataset": name, "host": host, "title": title}
    if milliseconds is not None:
        row["cost"] = _rounded(milliseconds)
    row["cases"] = []
    for case in cases:
        scores, seconds = judge(case), case.folder / SECONDS
        trained = {"seconds": data.read_json(seconds).get("train")} if seconds.exists() else {}
        tests = {
            label: {how: _kept({**figures, **trained}) for how, figures in by_calibration.items()}
            for label, by_calibration in scores["tests"].items()
        }
        turned = {"rotation": {k: _rounded(v) for k, v in scores["rotation"].items()}} if "rotation" in scores else {}
        row["cases"].append({"tests": tests, **turned})
    return row


def _kept(figures: Dict[str, Any]) -> Dict[str, float]:
    return {name: _rounded(figures[name]) for name in KEPT if figures.get(name) is not None}


def _rounded(value: float) -> float:
    return float(f"{value:.7g}")


def read_results(path: Path) -> List[Row]:
    """Rows of a file of results; none where it does not exist yet."""
    if not path.parent.is_dir():
        raise InputError(f"--results {path}: there is no folder {path.parent}")
    return data.read_json(path) if path.exists() else []


def write(plan: Plan) -> Tuple[Path, Path]:
    """Write page and results of what is finished; their paths.

    Rows of a file of results that the options name stay in it, except those that this folder has anew.
    """
    early = [run for host in HOSTS for run in runs(host, plan.preset, plan.table.sets, tuple(EARLY))]
    begun = [run for run in early if run.method in plan.methods and finished(run, plan.out)]
    about = {"benchmark": plan.name, "preset": plan.options.preset, "epochs": plan.options.epochs}
    fresh = [{**about, **row} for row in (*rows(plan), *damping.beginnings(begun, plan))]
    raw = plan.options.results or plan.out / f"{plan.name}_{plan.options.preset}.json"
    kept = read_results(raw) if plan.options.results else []
    merged = list({_key(row): row for row in (*kept, *fresh)}.values())
    if not merged:
        raise InputError(f"{plan.out}: no run of these sets and methods is finished, so there is no table to write")
    with replacing(raw) as unfinished:
        unfinished.write_text("[\n" + ",\n".join(map(json.dumps, merged)) + "\n]\n", encoding="utf-8")
    page = raw.with_suffix(".md")
    page.write_text(markdown(merged, {plan.name: plan.table.about}), encoding="utf-8")
    return page, raw


def _key(row: Row) -> str:
    """What tells rows apart: all except figures."""
    names = ("benchmark", "preset", "epochs", "dataset", "host", "title", "numerics", "damper", "learning_rate", "seed")
    return str([row.get(name) for name in names])


def markdown(rows: Sequence[Row], about: Dict[str, str]) -> str:
    """The page of some results; ``about`` has sentences on tables that are not ours."""
    lines = ["# Results of e2ip bench", "", EXPLANATION]
    for name, preset, epochs in dict.fromkeys((row["benchmark"], row["preset"], row["epochs"]) for row in rows):
        of_table = [row for row in rows if (row["benchmark"], row["preset"], row["epochs"]) == (name, preset, epochs)]
        longer = f", trainings {epochs:g} times as long" if epochs != 1 else ""
        sentence = about.get(name) or (read_table(name)[1].about if name in (*TABLES, *DATASETS) else "")
        lines += ["", f"## {name}, preset {preset}{longer}", "", sentence]
        for dataset in dict.fromkeys(row["dataset"] for row in of_table):
            lines += _of_set(dataset, [row for row in of_table if row["dataset"] == dataset])
    return "\n".join(lines) + "\n"


def _of_set(name: str, rows: Sequence[Row]) -> List[str]:
    judged, lines = [row for row in rows if "cases" in row], []
    for label in dict.fromkeys(label for row in judged for label in row["cases"][0]["tests"]):
        lines += ["", f"### {name}, {label}", "", *_table(name, label, judged)]
    if turned := [row for row in judged if all("rotation" in case for case in row["cases"])]:
        lines += ["", f"### {name}, every test frame rotated", "", *_rotation_table(turned)]
    if begun := [row for row in rows if "steps" in row]:
        lines += ["", f"### {name}, the first steps of training", "", *damping.table(begun)]
    return lines


def _table(name: str, label: str, rows: Sequence[Row]) -> List[str]:
    entries: List[Tuple[List[str], Dict[str, str]]] = []
    for row in rows:
        of_label = [case["tests"].get(label, {}) for case in row["cases"]]
        for how in of_label[0]:
            if row["title"] in TOO_FEW and how == "scale":
                continue
            values = {c.name: [case.get(how, {}).get(c.name) for case in of_label] for c in COLUMNS}
            values["cost"] = [row.get("cost")]
            cells = {c.name: _cell(values[c.name], c) for c in COLUMNS}
            ends = [spread([case.get(how, {}).get(end) for case in of_label])[0] for end in INTERVAL]
            if None not in ends:
                cells["coverage95"] += f" ({ends[0]:.3f} to {ends[1]:.3f})"
            if row["title"] in TOO_FEW and how != "floor":
                cells |= dict.fromkeys(NEED_FULL_RANK, "")
            shown = how if len(of_label[0]) > 1 else ""
            entries.append(([row["host"], row["title"], shown, str(len(of_label))], cells))
    for method, figures in read_yaml(SHIPPED / "paper.yaml").get(name, {}).get(label, {}).items():
        title, shown = method.split(", ")
        of_paper = {c.name: figures.get(c.name.replace("nll_kcal", "nll")) for c in COLUMNS}
        entries.append((["paper", title, shown, ""], {k: "" if v is None else f"{v:g}" for k, v in of_paper.items()}))
    columns = [c for c in COLUMNS if any(cells[c.name] for _, cells in entries)]
    return _markdown(
        ["host", "method", "calibration", "seeds", *(c.heading for c in columns)],
        [[*first, *(cells[c.name] for c in columns)] for first, cells in entries],
    )


def _rotation_table(rows: Sequence[Row]) -> List[str]:
    equivariant = {m.title: families.get(m.readout).equivariant for m in METHODS.values() if m.readout}
    lines = []
    for row in rows:
        cells = {c.name: _cell([case["rotation"][c.name] for case in row["cases"]], c) for c in ROTATION}
        if row["title"] in TOO_FEW:
            cells["nll"] = ""
        # Ensembles of stock models rotate, as stock models do.
        turns = equivariant.get(row["title"], not row["title"].startswith("MVE-DE"))
        lines.append([row["host"], row["title"], "yes" if turns else "no", *cells.values()])
    return _markdown(
        ["host", "method", "turns with the structure, by construction", *(c.heading for c in ROTATION)], lines
    )


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> List[str]:
    lines = ["| " + " | ".join(cells) + " |" for cells in (heads, *rows)]
    return [lines[0], "|---" * len(heads) + "|", *lines[1:]]


def _cell(values: List[Optional[float]], column: Column) -> str:
    mean, deviation = spread(values)
    if mean is None:
        return ""
    if abs(column.factor * mean) >= 1e5:  # of a covariance without full rank, for example
        return f"{column.factor * mean:.1e}"
    text = f"{column.factor * mean:.{column.digits}f}"
    return text if deviation is None else f"{text} ± {column.factor * deviation:.{column.digits}f}"
