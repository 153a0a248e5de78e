"""Print the tables of docs/evidence/accuracy.md and calibration.md, and draw their figures, from the results.

Sets that have been trained with today's defaults come from forces.json; what is left, and what modes of the evidence
are compared, from calibration.json, of the form of the leverage before.

python benchmarks/evidence.py --table
"""

import functools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from common import RESULTS, markdown, parser_of

#: Data sets in the order of the tables, with their tests, those in distribution first.
SETS = {
    "demo": ("2-methoxyacetamide", {"test": "300 K", "ood": "900 K"}),
    "acac": ("acetylacetone", {"test": "300 K", "ood": "600 K"}),
    "aspirin": ("aspirin", {"test": "rMD17"}),
    "dimethyl-sulfoxide": ("dimethyl sulfoxide", {"test": "300 K", "ood": "900 K"}),
    "pyridine": ("pyridine", {"test": "300 K", "ood": "900 K"}),
    "benzyloxypyridinamine": ("benzyloxypyridinamine", {"test": "300 K", "ood": "900 K"}),
    "silica": ("zeolites", {"test": "known", "ood": "unseen frameworks"}),
    "water": ("water", {"test": "liquid", "ood": "slab"}),
    "copper": ("copper", {"test": "200 K", "ood": "1000, 1300 K"}),
    "aluminium": ("aluminium", {"test": "200 K", "ood": "700, 950 K"}),
    "copper-gold": ("copper-gold", {"test": "200 K", "ood": "900, 1300 K"}),
    "si": (
        "silicon",
        {
            "test": "300 to 843 K",
            "strain": "strain of 6 to 10 %",
            "warm": "1518 K",
            "ood": "melt",
            "surface": "surfaces",
        },
    ),
    "li": ("lithium", {"test": "up to 408 K", "warm": "680 K", "ood": "907 K", "surface": "surfaces"}),
    "ta": ("tantalum", {"test": "300 K", "2000K": "2000 K", "ood": "4000 K", "surface": "surfaces"}),
}
MOLECULES = ("demo", "acac", "aspirin")
#: Epochs on aspirin in `e2ip bench rmd17 --preset cpu`.
EPOCHS = 24
HOSTS = {"mace": "MACE", "nequip": "NequIP"}


def values(
    rows: list[dict[str, Any]], dataset: str, host: str, title: str, test: str, key: str, how: str = "raw"
) -> list[float]:
    """Return a score of every seed, with a calibration (``how``); empty where there is none."""
    cases = [row["cases"] for row in rows if (row["dataset"], row["host"], row["title"]) == (dataset, host, title)]
    tests = [case["tests"].get(test, {}) for case in (cases[0] if cases else [])]
    # A model without a distribution has its errors alone.
    of_seeds = [of_test.get(how, of_test).get(key) for of_test in tests]
    return [score for score in of_seeds if score is not None]


def by_set(heads: Iterable[str], cells_of: Callable[[str, str, str], list[str]]) -> str:
    """Return a table with a row for every test; ``cells_of`` returns a host's cells for data set, host and test."""
    heads, rows = list(heads), []
    for dataset, (name, tests) in SETS.items():
        for test, kind in tests.items():
            cells = [cell for host in HOSTS for cell in cells_of(dataset, host, test)]
            if any(cells):
                rows.append([name, kind, *cells])
    of_hosts = [f"{label}: {head}" if i == 0 else head for label in HOSTS.values() for i, head in enumerate(heads)]
    return markdown(["set", "", *of_hosts], rows, left=2)


def accuracy(rows: list[dict[str, Any]]) -> str:
    """Return the table of force errors, of data sets with a stock model."""

    def cells(dataset: str, host: str, test: str) -> list[str]:
        stock, ours = (values(rows, dataset, host, title, test, "force_mae") for title in ("stock model", "e²IP"))
        if not (stock and ours):
            return [""] * 3
        return [f"{1000 * mean(stock):.1f}", f"{1000 * mean(ours):.1f}", f"{mean(ours) / mean(stock):.2f}"]

    return by_set(("stock", "e²IP", "ratio"), cells)


def scores(rows: list[dict[str, Any]], columns: dict[str, tuple[str, str, int]]) -> str:
    """Return a table of scores for every test and host; a column by its head is a method, a key and digits."""

    def cells(dataset: str, host: str, test: str) -> list[str]:
        of_columns = [(values(rows, dataset, host, title, test, key), n) for title, key, n in columns.values()]
        return [f"{mean(of_seeds):.{digits}f}" if of_seeds else "" for of_seeds, digits in of_columns]

    return by_set(columns, cells)


#: Columns of `scores`: what error bars are worth, and what the leverage changes.
SCORES = {
    "CE": ("e²IP", "calibration_error", 3),
    "coverage@95": ("e²IP", "coverage95", 3),
    "Spearman": ("e²IP", "spearman_total", 2),
}
MODES = {
    "CE": ("e²IP", "calibration_error", 3),
    "coverage@95": ("e²IP", "coverage95", 3),
    "likelihood alone": ("e²IP, coupled", "coverage95", 3),
}


def paired(rows: list[dict[str, Any]], dataset: str, host: str, test: str) -> list[float]:
    """Return the force errors of e²IP over those of the stock models of the same seeds."""
    stock, ours = (values(rows, dataset, host, title, test, "force_mae") for title in ("stock model", "e²IP"))
    return [b / a for a, b in zip(stock, ours, strict=False)]


def against_stock(rows: list[dict[str, Any]]) -> str:
    """Return the force errors over those of the stock model of the same seed: mean, and upper end of its interval."""
    ratios: dict[str, list[float]] = {}
    for dataset, (_, tests) in SETS.items():
        for test in tests:
            for host, label in HOSTS.items():
                groups = [f"{label}, {'in' if test in ('test', 'strain') else 'out of'} distribution", "all"]
                groups += ["molecules"] * (dataset in MOLECULES)
                for group in groups:
                    ratios.setdefault(group, []).extend(paired(rows, dataset, host, test))
    lines = []
    for group, of_group in sorted(ratios.items(), key=lambda item: (item[0] == "all", item[0] == "molecules")):
        if of_group:
            error = stdev(of_group) / len(of_group) ** 0.5 if len(of_group) > 1 else float("nan")
            figures = (mean(of_group), mean(of_group) + 1.645 * error)
            lines.append([group, len(of_group), *(f"{figure:.3f}" for figure in figures), f"{max(of_group):.2f}"])
    heads = ("pairs of models of one seed", "number", "mean ratio", "upper 95 % bound of the mean", "largest")
    return markdown(heads, lines, left=1)


def rates(rows: list[dict[str, Any]]) -> str:
    """Return the table of force errors with two learning rates, of the seeds that both methods have."""
    lines = []
    for dataset, (name, tests) in SETS.items():
        for host, label in HOSTS.items():
            for test, kind in tests.items():
                score = functools.partial(values, rows, dataset, host, test=test, key="force_mae")
                cells = []
                for suffix in ("", ", learning rate 0.03"):
                    seeds = list(zip(score(f"stock model{suffix}"), score(f"e²IP{suffix}"), strict=False))
                    if seeds:
                        stock, ours = (1000 * mean(of_method) for of_method in zip(*seeds, strict=True))
                        cells += [f"{stock:.1f}", f"{ours:.1f}", f"{ours / stock:.2f}"]
                if len(cells) == 6:
                    lines.append([name, label, kind, *cells])
    heads = (column for rate in ("0.01", "0.03") for column in (f"{rate}: stock", "e²IP", "ratio"))
    return markdown(["set", "", "", *heads], lines, left=3)


def together(rows: list[dict[str, Any]]) -> str:
    """Return the table of one and two models of e²IP and of five stock models of the demo; NLL for (kcal/mol/Å)⁻³."""
    lines = []
    ways = {
        "one e²IP": ("e²IP", "raw"),
        "two e²IP, as they are": ("e²IP together, K = 2", "raw"),
        "two e²IP, scaled": ("e²IP together, K = 2", "scale"),
        "five stock models, scaled": ("DE, isotropic", "scale"),
    }
    for host, label in HOSTS.items():
        for test, kind in SETS["demo"][1].items():
            for what, (title, how) in ways.items():
                score = functools.partial(values, rows, "demo", host, title, test, how=how)
                if not score("nll_kcal"):
                    continue
                cells = [f"{1000 * mean(score('force_mae')):.1f}", f"{mean(score('nll_kcal')):.2f}"]
                cells += [f"{mean(score(key)):.3f}" for key in ("calibration_error", "coverage95")]
                cells.append(f"{mean(score('spearman_total')):.2f}")
                lines.append([label, kind, what, *cells])
    return markdown(["", "", "trained", "force MAE", "NLL", "CE", "coverage@95", "Spearman"], lines, left=3)


def lengths(rows: list[dict[str, Any]]) -> str:
    """Return the table of aspirin over the length of trainings; NLL for a density in (kcal/mol/Å)⁻³."""
    lines = []
    for host, label in HOSTS.items():
        for factor in (1.0, 4.0, 16.0):
            chosen = [row for row in rows if row.get("benchmark") == "rmd17" and row["epochs"] == factor]
            score = functools.partial(values, chosen, "aspirin", host)
            stock, ours = (score(title, "test", "force_mae") for title in ("stock model", "e²IP"))
            if not stock:
                continue
            cells = [label, f"{EPOCHS * factor:.0f}", f"{1000 * mean(stock):.1f}"]
            cells += [f"{1000 * mean(ours):.1f}", f"{mean(ours) / mean(stock):.2f}"] if ours else ["", ""]
            for title, key, how, digits in (
                ("e²IP", "nll_kcal", "raw", 2),
                ("DE, isotropic", "nll_kcal", "floor", 2),
                ("DE, K = 5", "nll_kcal", "floor", 2),
                ("MVE-DE, K = 5", "nll_kcal", "scale", 2),
                ("e²IP", "calibration_error", "raw", 3),
                ("e²IP", "spearman_epistemic", "raw", 2),
                ("DE, K = 5", "spearman_epistemic", "raw", 2),
            ):
                of_seeds = score(title, "test", key, how)
                cells.append(f"{mean(of_seeds):.{digits}f}" if of_seeds else "")
            best = min((cell for cell in cells[6:8] if cell), key=float, default="")
            lines.append([*cells[:6], best, *cells[8:]])
    heads = ["", "epochs", "MAE: stock", "e²IP", "ratio", "NLL: e²IP", "five stock models", "five `mve`", "CE: e²IP"]
    return markdown([*heads, "Spearman: e²IP", "five stock models"], lines, left=1)


def draw(both: list[dict[str, Any]], before: list[dict[str, Any]], folder: Path) -> None:
    """Draw force errors against those of the stock model, and coverages with and without the leverage."""
    for name, title_of_axes in (("accuracy", "Force error, e²IP over stock"), ("coverage", "Coverage of 95 % regions")):
        rows = both if name == "accuracy" else before
        figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained", sharex=name == "coverage")
        titles = ("e²IP", "stock model") if name == "accuracy" else ("e²IP",)
        for panel, test, text in zip(axes, ("test", "ood"), ("in distribution", "out of distribution"), strict=True):
            names = [s for s in SETS if all(values(rows, s, "mace", title, test, "force_mae") for title in titles)]
            for shift, (host, label) in zip((-0.15, 0.15), HOSTS.items(), strict=True):
                for title, marker in (("e²IP", "o"), ("e²IP, coupled", "x")):
                    points = []
                    for i, dataset in enumerate(names):
                        if name == "coverage":
                            points += [(v, i + shift) for v in values(rows, dataset, host, title, test, "coverage95")]
                        elif title == "e²IP":
                            points += [(ratio, i + shift) for ratio in paired(rows, dataset, host, test)]
                    if points:
                        what = f"{label}, without the leverage" if marker == "x" else label
                        color = {"mace": "tab:blue", "nequip": "tab:orange"}[host]
                        panel.plot(*zip(*points, strict=True), marker, color=color, markersize=5, alpha=0.8, label=what)
            panel.axvline(0.95 if name == "coverage" else 1.0, color="black", linewidth=0.8, linestyle="--")
            panel.set_yticks(range(len(names)), [SETS[dataset][0] for dataset in names])
            panel.invert_yaxis()
            panel.set(title=text, xlabel=title_of_axes)
        axes[0].legend(fontsize=8, loc="lower left" if name == "coverage" else "best")
        figure.savefig(folder / f"{name}.png", dpi=130)
        plt.close(figure)


def read(name: str) -> list[dict[str, Any]]:
    """Return the rows of a file of results; none where there is no such file yet."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def main() -> None:
    options = parser_of(__doc__, "evidence", "table", "figure").parse_args()
    today, before, longer = read("forces"), read("calibration"), read("bench")
    renewed, compared = (
        {(row["dataset"], row["host"]) for row in today if row["title"] == title} for title in ("e²IP", "stock model")
    )
    # Force errors do not depend on the form of the leverage.
    both = [row for row in today if (row["dataset"], row["host"]) in renewed & compared]
    both += [row for row in before if (row["dataset"], row["host"]) not in renewed & compared]
    print(
        accuracy(both),
        against_stock(both),
        rates([*both, *(row for row in today if "learning rate" in row["title"])]),
        together(today),
        lengths(longer),
        scores(today, SCORES),
        scores(before, MODES),
        sep="\n\n",
    )
    draw(both, before, options.figure.parent)


if __name__ == "__main__":
    main()
