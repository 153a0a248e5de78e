"""Tables of the results of energies.py, whose command `table` prints them."""

from typing import Any

import numpy as np
from common import markdown

#: Sets by what they ask.
GROUPS = {"in": ("test", "strain"), "out": ("ood", "warm", "2000K"), "surfaces": ("surface",)}
SHOWN = ("nll", "crps", "calibration_error", "coverage95", "spearman")


def table(content: dict[str, Any], kind: str) -> str:
    """Return the means over models and sets of a group, and the least coverage, of ways that all models have."""
    rows = []
    for title in dict.fromkeys(title for model in content.values() for title in model):
        if not all(title in model for model in content.values()):
            continue
        cells = []
        for sets in GROUPS.values():
            scores_of = [
                model[title][name][kind]
                for model in content.values()
                for name in sets
                if kind in model[title].get(name, {})
            ]
            for figure in SHOWN:
                mean = np.mean([scores[figure] for scores in scores_of]) if scores_of else np.nan
                cells.append(f"{mean:.2f}" if figure in ("nll", "spearman") else f"{mean:.3f}")
            cells[-2] += f" ({min((scores['coverage95'] for scores in scores_of), default=np.nan):.2f})"
        if "nan" not in cells[0]:
            rows.append([title, *cells])
    names = ("NLL", "CRPS", "CE", "coverage@95 (least)", "Spearman")
    return markdown(["way", *(f"{group}: {name}" for group in GROUPS for name in names)], rows)


def pooled(content: dict[str, Any], title: str = "error vector, as shipped") -> str:
    """Return the coverage of one way over all frames and pairs of a group, and how many of its sets have 0.85."""
    rows = []
    for kind in ("energies", "differences"):
        for group, sets in GROUPS.items():
            chosen = [
                model[title][name][kind]
                for model in content.values()
                for name in sets
                if kind in model[title].get(name, {})
            ]
            coverage, number = (np.array([scores[key] for scores in chosen]) for key in ("coverage95", "number"))
            cells = [
                str(number.sum()),
                f"{coverage @ number / number.sum():.3f}",
                f"{(coverage >= 0.85).sum()} of {len(chosen)}",
            ]
            rows.append([kind, group, *cells])
    return markdown(["kind", "group", "number", "coverage@95, pooled", "sets of at least 0.85"], rows, left=2)


def beside(content: dict[str, Any], kind: str, method: str) -> str:
    """Return the means over the models that have a method, without studies of constants."""

    kept = ("error vector, as shipped", "constant", "LLPR", "LLPR, by species")
    return table(
        {
            model: {title: rows for title, rows in ways.items() if title in kept or method in title}
            for model, ways in content.items()
            if any(method in title for title in ways)
        },
        kind,
    )


def by_set(content: dict[str, Any], title: str = "error vector, as shipped") -> str:
    """Return the figures of one way for every model and set, with intervals where there are some."""

    def cell(scores_of: dict[str, Any], figure: str) -> str:
        low, high = scores_of.get(f"{figure}_interval", (None, None))
        return f"{scores_of[figure]:.3f}" + ("" if low is None else f" ({low:.2f} to {high:.2f})")

    rows = []
    for model, ways in content.items():
        for name, kinds in ways[title].items():
            if name == "constants":
                continue
            cells = []
            for kind in ("energies", "differences"):
                scores_of = kinds.get(kind)
                shown = ("rms", *SHOWN) if kind == "energies" else SHOWN
                cells += [cell(scores_of, figure) for figure in shown] if scores_of else [""] * len(shown)
            rows.append([model, name, str(kinds["energies"]["number"]), *cells])
    names = ("NLL", "CRPS", "CE", "coverage@95", "Spearman")
    differences = (f"differences: {name}" for name in names)
    return markdown(["model", "set", "frames", "RMSE in eV", *names, *differences], rows)
