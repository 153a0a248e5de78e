"""The result of `e2ip_plugins.report.compare.compare` as terminal tables, Markdown and JSON."""

import json
from pathlib import Path
from typing import List, NamedTuple, Optional

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from e2ip_plugins.keys import KCAL_PER_MOL


class Row(NamedTuple):
    """One figure of the tables.

    Attributes
    ----------
    key : str
        In the result's ``overall`` and ``species`` dictionaries.
    title : str
    ideal : str
        What a good model shows.
    kind : str
        ``force``, ``energy``, ``nll`` or ``number``: decides unit and digits.
    short : str
        Column title in the table of species; empty: not in it.
    """

    key: str
    title: str
    ideal: str
    kind: str
    short: str = ""


ROWS = (
    Row("force_mae", "Force MAE", "low", "force", "F MAE"),
    Row("force_rmse", "Force RMSE", "low", "force"),
    Row("energy_mae", "Energy MAE", "low", "energy"),
    Row("nll", "NLL", "low", "nll", "NLL"),
    Row("energy_score", "Energy score", "low", "force", "ES"),
    Row("calibration_error", "Calibration error CE", "0", "number", "CE"),
    Row("coverage50", "Coverage at 50 %", "0.5", "number"),
    Row("coverage80", "Coverage at 80 %", "0.8", "number"),
    Row("coverage90", "Coverage at 90 %", "0.9", "number"),
    Row("coverage95", "Coverage at 95 %", "0.95", "number", "cov95"),
    Row("z_rms_minor", "RMS z, minor axis", "1", "number"),
    Row("z_rms_middle", "RMS z, middle axis", "1", "number"),
    Row("z_rms_major", "RMS z, major axis", "1", "number"),
    Row("spearman_epistemic", "Spearman, epistemic", "high", "number"),
    Row("spearman_total", "Spearman, total", "high", "number", "ρ"),
    Row("auroc_total", "AUROC, worst 10 %", "high", "number", "AUROC"),
    Row("ause_total", "AUSE", "0", "number"),
)

#: unit name -> (force unit, energy unit, factor from eV, decimals of forces and energies)
UNITS = {
    "eV": ("meV/Å", "meV/atom", 1e3, 2),
    "kcal": ("kcal/mol/Å", "kcal/mol/atom", 1.0 / KCAL_PER_MOL, 4),
}

NOTES = """\
- Force MAE and RMSE run over components; energy MAE is per atom.
- NLL: mean negative log density of the reference force, in nats, for a density in {density}. Only differences between
  models mean something, and only in one unit.
- Energy score: E‖X − y‖ − ½ E‖X − X′‖ of the predicted distribution, a proper score in force units.
- Coverage at p: share of atoms whose reference lies in the ellipsoid that should hold it with probability p. CE: mean
  distance of observed from expected coverage over p = 0.01 … 0.99.
- RMS z: error along the principal axes of the predicted covariance in units of its standard deviation there. A
  covariance of the right size that points the wrong way has RMS z > 1 on the minor and < 1 on the major axis.
- Spearman: rank correlation of the predicted standard deviation (epistemic part or total) with the error ‖y − γ‖.
  The table per species has ρ for the total one.
  AUROC: probability that an atom among the worst 10 % errors has a larger total standard deviation than one that is
  not (0.5 is chance). AUSE: area between the sparsification curves by total standard deviation and by the error.
- An empty cell means that the file carries no distribution to compute it from.
"""


def cell(row: Row, summary: dict, unit: str) -> str:
    """One figure in the table's unit; empty where there is none."""
    _, _, factor, digits = UNITS[unit]
    key = "nll_kcal" if row.kind == "nll" and unit == "kcal" else row.key
    value: Optional[float] = summary.get(key)
    if value is None:
        return ""
    if row.kind in ("force", "energy"):
        return f"{value * factor:.{digits}f}"
    return f"{value:.4f}" if row.key == "calibration_error" else f"{value:.3f}"


def title(row: Row, unit: str) -> str:
    """Title of a figure with its unit."""
    force, energy, _, _ = UNITS[unit]
    suffix = {"force": f" ({force})", "energy": f" ({energy})", "nll": " (nats)"}.get(row.kind, "")
    return row.title + suffix


def overall_table(result: dict, unit: str) -> List[List[str]]:
    """Header and rows: one row per figure, one column per model."""
    models = result["models"]
    header = ["", "ideal", *(m["label"] for m in models)]
    return [header] + [[title(r, unit), r.ideal, *(cell(r, m["overall"], unit) for m in models)] for r in ROWS]


def species_table(result: dict, unit: str) -> List[List[str]]:
    """Header and rows: one row per species and model, the most telling figures as columns."""
    rows = [r for r in ROWS if r.short]
    table = [["", "model", *(r.short for r in rows)]]
    for symbol in result["models"][0]["species"]:
        for m in result["models"]:
            summary = m["species"][symbol]
            table.append([symbol, m["label"], *(cell(r, summary, unit) for r in rows)])
    return table


def print_tables(result: dict, unit: str, console: Console) -> None:
    """Both tables on the terminal; long labels wrap, figures are never cut."""
    first = result["models"][0]
    overall = Table(title=f"Over all atoms ({first['frames']} frames, {first['overall']['atoms']} atoms)", **_LOOK)
    header, *rows = overall_table(result, unit)
    overall.add_column(header[0], no_wrap=True)
    overall.add_column(header[1], no_wrap=True, style="dim")
    for label in header[2:]:
        overall.add_column(label, justify="right", overflow="fold", min_width=9)
    for row in rows:
        overall.add_row(*row)

    species = Table(title=f"Per species (forces in {UNITS[unit][0]})", **_LOOK)
    header, *rows = species_table(result, unit)
    species.add_column(header[0], no_wrap=True)
    species.add_column(header[1], overflow="fold", min_width=12)
    for name in header[2:]:
        species.add_column(name, justify="right", no_wrap=True)
    for i, row in enumerate(rows):
        species.add_row(*row, end_section=i + 1 < len(rows) and rows[i + 1][0] != row[0])
    console.print(overall, species)


_LOOK = {"box": SIMPLE_HEAD, "title_justify": "left", "title_style": "bold", "header_style": "bold", "pad_edge": False}


def markdown(result: dict, unit: str, figure: str) -> str:
    """The report as Markdown, with a link to the figure page."""
    models = result["models"]
    density = "(eV/Å)⁻³" if unit == "eV" else "(kcal/mol/Å)⁻³"
    lines = ["# Comparison of force predictions", ""]
    for m in models:
        kind = f"uncertainties: {m['uq_family']}" if m["uq_family"] else "no uncertainties"
        lines.append(f"- **{m['label']}**: `{m['file']}`, {m['frames']} frames, {m['overall']['atoms']} atoms, {kind}")
        lines += [f"  - {text}" for text in m["left_out"]]
    lines += ["", "## Over all atoms", "", *_markdown_table(overall_table(result, unit), 2)]
    lines += ["", f"## Per species (forces in {UNITS[unit][0]})", "", *_markdown_table(species_table(result, unit), 2)]
    lines += ["", f"![Figure page]({figure})", "", "## What the numbers mean", "", NOTES.format(density=density)]
    return "\n".join(lines)


def _markdown_table(table: List[List[str]], text_columns: int) -> List[str]:
    align = [":--" if i < text_columns else "--:" for i in range(len(table[0]))]
    return ["| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in (table[0], align, *table[1:])]


def write_json(result: dict, path: Path) -> None:
    """The result with full precision."""
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
