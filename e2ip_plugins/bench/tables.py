"""Tables of a benchmark, in the paper's layout and units, and everything behind them as JSON."""

import json
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from e2ip_plugins import __version__, families
from e2ip_plugins.bench import commands, cost, damping, data
from e2ip_plugins.bench.judge import Case, ensemble, judge, spread
from e2ip_plugins.bench.plan import BENCHMARKS, EARLY, HOSTS, METHODS, PRESETS, Run, dataset, labels, runs
from e2ip_plugins.bench.reference import PAPER
from e2ip_plugins.bench.runs import finished
from e2ip_plugins.errors import InputError
from e2ip_plugins.keys import KCAL_PER_MOL


class Column(NamedTuple):
    """One figure of `e2ip compare` in a table: heading, name, factor, digits."""

    heading: str
    name: str
    factor: float
    digits: int


COLUMNS = (
    Column("MAE", "force_mae", 1.0 / KCAL_PER_MOL, 3),
    Column("ES", "energy_score", 1.0 / KCAL_PER_MOL, 3),
    Column("coverage@95", "coverage95", 1.0, 3),
    Column("CE", "calibration_error", 1.0, 4),
    Column("NLL", "nll_kcal", 1.0, 3),
    Column("Spearman, epistemic", "spearman_epistemic", 1.0, 3),
    Column("total", "spearman_total", 1.0, 3),
    Column("AUROC of frames", "frame_auroc", 1.0, 3),
    Column("ms/atom", "cost", 1.0, 3),
)

#: Ends of the 95 % interval of coverage@95, of a bootstrap of configurations.
INTERVAL = ("coverage95_low", "coverage95_high")

ROTATION = (
    Column("‖ΔΣ‖/‖Σ‖, mean", "covariance", 1.0, 6),
    Column("largest", "covariance_largest", 1.0, 6),
    Column("abs. Δρ", "spearman", 1.0, 4),
    Column("abs. ΔNLL", "nll", 1.0, 4),
    Column("abs. ΔES meV/Å", "energy_score", 1000.0, 4),
)


class Row(NamedTuple):
    """One method on one set, all seeds."""

    dataset: str
    host: str
    title: str
    cases: List[Dict[str, Any]]
    cost: Optional[float] = None


def rows(preset: str, sets: Sequence[str], methods: Sequence[str], out: Path) -> Iterator[Row]:
    """Scores of all finished runs of both hosts, and of ensembles of which every member is finished."""
    for name in sets:
        for host in HOSTS:
            found = runs(host, PRESETS[preset], (name,), tuple(methods))
            done = [run for run in found if finished(run, out)]
            timed = cost.path(name, host, out)
            costs = data.read_json(timed)["ms_per_atom"] if timed.exists() else {}
            for method in (m for m in methods if m not in EARLY):
                of_method = [_case(run, out) for run in done if run.method == method]
                if of_method:
                    title = METHODS[method].title
                    yield Row(name, host, title, [judge(case) for case in of_method], costs.get(title))
                title = METHODS[method].ensemble
                if not title or len(of_method) < PRESETS[preset].members:
                    continue
                predicted = all(path.exists() for case in of_method for path in case.files.values())
                # Of stock models also as committees are mostly used: few of them do not determine a matrix.
                for isotropic in (False, True) if not METHODS[method].readout else (False,):
                    folder = out / "ensembles" / f"{name}_{host}_{title}{'-isotropic' * isotropic}"
                    if isotropic and not predicted and not (folder / "scores.json").exists():
                        continue  # members of before there was such a row
                    kind = "isotropic" if isotropic else f"K = {len(of_method)}"
                    of_ensemble = [judge(ensemble(of_method, folder, isotropic))]
                    yield Row(name, host, f"{title}, {kind}", of_ensemble, costs.get(title))


def _case(run: Run, out: Path) -> Case:
    folder, chosen = out / "runs" / run.name, dataset(run.dataset)
    return Case(folder, {label: folder / commands.prediction(run, chosen, label) for label in labels(chosen)})


def figure(case: Dict[str, Any], label: str, calibration: str, name: str) -> Optional[float]:
    """One figure of one seed; None where it has none."""
    overall = case["tests"].get(label, {}).get(calibration, {})
    if name in INTERVAL:
        interval = overall.get("interval95") or {}
        return interval.get("coverage95", [None, None])[INTERVAL.index(name)]
    if name == "frame_auroc":
        auroc = case.get("frame_auroc", {}).get(calibration, {})
        value = auroc.get("mean_leverage")
        return auroc.get("mean_epistemic_std") if value is None else value
    return overall.get(name)


def write(benchmark: str, preset: str, sets: Sequence[str], methods: Sequence[str], out: Path) -> Tuple[Path, Path]:
    """Page and JSON of what is finished; their paths."""
    found = list(rows(preset, sets, methods, out))
    early = tuple(method for method in methods if method in EARLY)
    begun = [run for host in HOSTS for run in runs(host, PRESETS[preset], tuple(sets), early)]
    begun = [run for run in begun if finished(run, out)]
    if not found and not begun:
        raise InputError(f"{out}: no run of these sets and methods is finished, so there is no table to write")
    page, raw = (out / f"{benchmark}_{preset}.{ending}" for ending in ("md", "json"))
    body: Dict[str, Any] = {"e2ip_version": __version__, "benchmark": benchmark, "preset": preset}
    beginnings, lines = damping.write(begun, out, raw.with_suffix(""))
    body = {**body, "rows": [row._asdict() for row in found], **({"beginnings": beginnings} if beginnings else {})}
    raw.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    page.write_text("\n".join([*markdown(benchmark, preset, found), *lines]) + "\n", encoding="utf-8")
    return page, raw


def markdown(benchmark: str, preset: str, found: Sequence[Row]) -> List[str]:
    """The page."""
    lines = [f"# {benchmark}, preset {preset}", "", BENCHMARKS[benchmark].about, ""]
    lines += [
        "MAE and ES in kcal/mol/Å, NLL in nats for a density in (kcal/mol/Å)⁻³. ± is the sample standard deviation "
        "over seeds; in brackets the 95 % interval of coverage@95 by a bootstrap of configurations, mean over seeds. "
        "floor and scale: constants fitted to validation frames (`e2ip calibrate`), or to further ones. "
        "Spearman: norm of the error against the epistemic and the total standard deviation. AUROC of frames: out of "
        "distribution against in distribution, by mean leverage, else by mean epistemic standard deviation. "
        "ms/atom: one frame through the host's ASE calculator on one thread, all methods in turn; ensembles member by "
        "member. Isotropic: a third of the trace of every covariance in all directions. "
        "Covariances of fewer than four stock members have no full rank: their NLL and coverage mean nothing. "
        "Paper: its own networks, splits and lengths of training (arXiv:2602.10419); its silica is a glass.",
    ]
    for name in dict.fromkeys(row.dataset for row in found):
        of_set = [row for row in found if row.dataset == name]
        for label in dataset(name).tests:
            lines += ["", f"## {name}, {label}", "", *_table(name, label, of_set)]
        turned = [row for row in of_set if all("rotation" in case for case in row.cases)]
        if turned:
            lines += ["", f"## {name}, every test frame rotated", "", *_rotation_table(turned)]
    return lines


def _table(name: str, label: str, found: Sequence[Row]) -> List[str]:
    ood = label == "ood"
    columns = [c for c in COLUMNS if c.name != "frame_auroc" or ood]
    lines = ["| host | method | | seeds | " + " | ".join(c.heading for c in columns) + " |"]
    lines.append("|---" * (4 + len(columns)) + "|")
    for row in found:
        for calibration in row.cases[0]["tests"].get(label, {}):
            values = {c.name: [figure(case, label, calibration, c.name) for case in row.cases] for c in columns}
            cells = [_cell([row.cost] if c.name == "cost" else values[c.name], c) for c in columns]
            ends = [spread([figure(case, label, calibration, end) for case in row.cases])[0] for end in INTERVAL]
            if None not in ends:
                cells[[c.name for c in columns].index("coverage95")] += f" ({ends[0]:.3f} to {ends[1]:.3f})"
            shown = calibration if len(row.cases[0]["tests"][label]) > 1 else ""
            lines.append(f"| {row.host} | {row.title} | {shown} | {len(row.cases)} | " + " | ".join(cells) + " |")
    for method, figures in PAPER.get((name, label), {}).items():
        title, shown = method.split(", ")
        cells = [f"{figures[key]:g}" if (key := c.name.replace("nll_kcal", "nll")) in figures else "" for c in columns]
        lines.append(f"| paper | {title} | {shown} | | " + " | ".join(cells) + " |")
    return lines


def _rotation_table(found: Sequence[Row]) -> List[str]:
    lines = ["| host | method | turns with the structure | " + " | ".join(c.heading for c in ROTATION) + " |"]
    lines.append("|---" * (3 + len(ROTATION)) + "|")
    equivariant = {m.title: families.get(m.readout).equivariant for m in METHODS.values() if m.readout}
    for row in found:
        cells = [_cell([case["rotation"][c.name] for case in row.cases], c) for c in ROTATION]
        # Ensembles of stock models rotate, as stock models do.
        turns = equivariant.get(row.title, not row.title.startswith("MVE-DE"))
        lines.append(f"| {row.host} | {row.title} | {'yes' if turns else 'no'} | " + " | ".join(cells) + " |")
    return lines


def _cell(values: List[Optional[float]], column: Column) -> str:
    mean, deviation = spread(values)
    if mean is None:
        return ""
    if abs(column.factor * mean) >= 1e5:  # of a covariance without full rank, for example
        return f"{column.factor * mean:.1e}"
    text = f"{column.factor * mean:.{column.digits}f}"
    return text if deviation is None else f"{text} ± {column.factor * deviation:.{column.digits}f}"
