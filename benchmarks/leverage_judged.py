"""Tables of what `leverage.py judge` has found; its command `table` prints them."""

from pathlib import Path

import numpy as np
from common import load, markdown

SHOWN = ("nll", "calibration_error", "coverage95", "spearman_epistemic")


def by_model(paths: list[Path]) -> dict[str, dict]:
    """Return results of `judge` by model; a file has one, or several by name."""
    results = {}
    for path in paths:
        content = load(path)
        results |= {path.stem: content} if "leverage" in content else content
    return results


def scores_of(result: dict, form: str) -> dict:
    return result["alternatives"].get(form) or result[form]


def table(results: dict[str, dict], forms: list[str]) -> str:
    """Return a Markdown table by model."""
    columns = [f"{name}, {where}" for where in ("in", "out") for name in ("NLL", "CE", "coverage@95", "Spearman")]
    rows = []
    for model, result in results.items():
        for form in forms:
            scores = scores_of(result, form)
            cells = [f"{scores[s][f]:.3f}" if s in scores else "" for s in ("test", "ood") for f in SHOWN]
            rows.append([model, form, *cells])
    return markdown(["model", "form", *columns], rows)


def summary(results: dict[str, dict], forms: list[str]) -> str:
    """Return a Markdown table of means over models and sets, and of the worst; *out* are warm, hot and molten sets."""
    columns = ["NLL, in", "CE, in", "NLL, out", "CE, out", "lowest coverage@95, out"]
    columns += ["error over deviation along axes, out", "CE, surfaces", "lowest coverage@95, surfaces"]
    rows = []
    for form in forms:
        inside, outside, surfaces = (
            [scores[name] for r in results.values() if (scores := scores_of(r, form)) for name in names & scores.keys()]
            for names in ({"test"}, {"warm", "2000K", "ood"}, {"surface"})
        )
        along = [scores[name] for scores in outside for name in sorted(scores) if name.startswith("z_rms")]
        cells = [f"{np.mean([s[name] for s in sets]):.3f}" for sets in (inside, outside) for name in SHOWN[:2]]
        cells += [f"{min(s['coverage95'] for s in outside):.3f}", f"{min(along):.2f} to {max(along):.2f}"]
        if surfaces:
            cells += [f"{np.mean([s['calibration_error'] for s in surfaces]):.3f}"]
            cells += [f"{min(s['coverage95'] for s in surfaces):.3f}"]
        rows.append([form, *cells, *[""] * (len(columns) - len(cells))])
    return markdown(["form", *columns], rows)
