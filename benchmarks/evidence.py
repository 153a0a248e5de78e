"""Print the tables of docs/evidence/accuracy.md and calibration.md, and draw their figures, from the results.

python benchmarks/evidence.py --table
"""

import functools
import json
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from common import RESULTS, parser_of

#: Data sets in the order of the tables, with what is in and out of distribution.
SETS = {
    "demo": ("2-methoxyacetamide", "300 K", "900 K"),
    "acac": ("acetylacetone", "300 K", "600 K"),
    "aspirin": ("aspirin", "rMD17", ""),
    "dimethyl-sulfoxide": ("dimethyl sulfoxide", "300 K", "900 K"),
    "pyridine": ("pyridine", "300 K", "900 K"),
    "benzyloxypyridinamine": ("benzyloxypyridinamine", "300 K", "900 K"),
    "silica": ("zeolites", "known", "unseen frameworks"),
    "water": ("water", "liquid", "slab"),
    "copper": ("copper", "200 K", "1000, 1300 K"),
    "aluminium": ("aluminium", "200 K", "700, 950 K"),
    "copper-gold": ("copper-gold", "200 K", "900, 1300 K"),
}
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
    scores = [scores.get(how, scores).get(key) for scores in tests]
    return [score for score in scores if score is not None]


def accuracy(rows: list[dict[str, Any]]) -> str:
    """Return the table of force errors, of data sets with a stock model."""
    lines = [
        "| set | | MACE: stock | e²IP | ratio | NequIP: stock | e²IP | ratio |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for dataset, (name, *kinds) in SETS.items():
        for test, kind in zip(("test", "ood"), kinds, strict=True):
            cells = [name, kind]
            for host in HOSTS:
                stock, ours = (
                    values(rows, dataset, host, title, test, "force_mae") for title in ("stock model", "e²IP")
                )
                if stock and ours:
                    cells += [
                        f"{1000 * mean(stock):.1f}",
                        f"{1000 * mean(ours):.1f}",
                        f"{mean(ours) / mean(stock):.2f}",
                    ]
            if len(cells) > 2:
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def calibration(rows: list[dict[str, Any]]) -> str:
    """Return the table of calibration errors and coverages, of models with the readout."""
    lines = [
        "| set | | MACE: CE | coverage | before the leverage | NequIP: CE | coverage | before the leverage |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for dataset, (name, *kinds) in SETS.items():
        for test, kind in zip(("test", "ood"), kinds, strict=True):
            cells = [name, kind]
            for host in HOSTS:
                for title, key in (
                    ("e²IP", "calibration_error"),
                    ("e²IP", "coverage95"),
                    ("e²IP, coupled", "coverage95"),
                ):
                    scores = values(rows, dataset, host, title, test, key)
                    cells.append(f"{mean(scores):.3f}" if scores else "")
            if any(cells[2:]):
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def lengths(rows: list[dict[str, Any]]) -> str:
    """Return the table of aspirin over the length of trainings; NLL for a density in (kcal/mol/Å)⁻³."""
    lines = [
        "| | epochs | MAE: stock | e²IP | ratio | NLL: e²IP | five stock models | CE: e²IP | Spearman: e²IP | five |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for host, label in HOSTS.items():
        for factor in (1.0, 2.0, 4.0):
            chosen = [row for row in rows if row.get("benchmark") == "rmd17" and row["epochs"] == factor]
            score = functools.partial(values, chosen, "aspirin", host)
            stock, ours = (score(title, "test", "force_mae") for title in ("stock model", "e²IP"))
            cells = [label, f"{EPOCHS * factor:.0f}", f"{1000 * mean(stock):.1f}"]
            cells += [f"{1000 * mean(ours):.1f}", f"{mean(ours) / mean(stock):.2f}"] if ours else ["", ""]
            for title, key, how, digits in (
                ("e²IP", "nll_kcal", "raw", 2),
                ("DE, isotropic", "nll_kcal", "floor", 2),
                ("DE, K = 5", "nll_kcal", "floor", 2),
                ("e²IP", "calibration_error", "raw", 3),
                ("e²IP", "spearman_epistemic", "raw", 2),
                ("DE, K = 5", "spearman_epistemic", "raw", 2),
            ):
                scores = score(title, "test", key, how)
                cells.append(f"{mean(scores):.{digits}f}" if scores else "")
            best = min((cell for cell in cells[6:8] if cell), key=float)
            lines.append(f"| {' | '.join([*cells[:6], best, *cells[8:]])} |")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], folder: Path) -> None:
    """Draw force errors against those of the stock model, and coverages with and without the leverage."""
    for name, title_of_axes in (("accuracy", "Force error, e²IP over stock"), ("coverage", "Coverage of 95 % regions")):
        figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained", sharex=name == "coverage")
        for panel, (test, text) in zip(
            axes, (("test", "in distribution"), ("ood", "out of distribution")), strict=True
        ):
            names = [dataset for dataset in SETS if values(rows, dataset, "mace", "e²IP", test, "force_mae")]
            if name == "accuracy":
                names = [
                    dataset for dataset in names if values(rows, dataset, "mace", "stock model", test, "force_mae")
                ]
            for shift, (host, label) in zip((-0.15, 0.15), HOSTS.items(), strict=True):
                for title, marker in (("e²IP", "o"), ("e²IP, coupled", "x")):
                    points = []
                    for i, dataset in enumerate(names):
                        if name == "coverage":
                            points += [(v, i + shift) for v in values(rows, dataset, host, title, test, "coverage95")]
                        elif title == "e²IP":
                            stock = mean(values(rows, dataset, host, "stock model", test, "force_mae"))
                            points += [
                                (v / stock, i + shift) for v in values(rows, dataset, host, title, test, "force_mae")
                            ]
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


def main() -> None:
    options = parser_of(__doc__, "evidence", "table", "figure").parse_args()
    rows = json.loads((RESULTS / "calibration.json").read_text(encoding="utf-8"))
    longer = json.loads((RESULTS / "bench.json").read_text(encoding="utf-8"))
    print(accuracy(rows), lengths(longer), calibration(rows), sep="\n\n")
    draw(rows, options.figure.parent)


if __name__ == "__main__":
    main()
