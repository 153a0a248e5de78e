"""The result of `e2ip_plugins.report.compare.compare` as terminal tables, Markdown and JSON."""

import json
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Tuple

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
    Row("leverage", "Mean leverage", "", "number"),
)

#: Scores that frames are ranked by, as in the result's ``frame_auroc``, and their column titles.
FRAME_SCORES = {
    "mean_leverage": "mean leverage",
    "max_epistemic_std": "largest epistemic std",
    "mean_epistemic_std": "mean epistemic std",
}

#: unit name -> (force unit, energy unit, factor from eV, decimals of forces and energies)
UNITS = {
    "eV": ("meV/Å", "meV/atom", 1e3, 2),
    "kcal": ("kcal/mol/Å", "kcal/mol/atom", 1.0 / KCAL_PER_MOL, 4),
}

NOTES = """\
- Force MAE and RMSE run over components; energy MAE is per atom.
- NLL: mean negative log density of the reference force, in nats, for a density in {density}. Only differences between
  models mean something, and only in one unit.
- Energy score: E‖X − y‖ − ½ E‖X − X′‖ of the predicted distribution, a proper score in force units. Where a
  distribution has to be sampled for it, ± is the standard error of that.
- Coverage at p: share of atoms whose reference lies in the ellipsoid that should hold it with probability p. CE: mean
  distance of observed from expected coverage over p = 0.01 … 0.99. Bands in the figures and `interval95` in the JSON
  are 95 % of a bootstrap that draws whole configurations.
- RMS z: error along the principal axes of the predicted covariance in units of its standard deviation there. A
  covariance of the right size that points the wrong way has RMS z > 1 on the minor and < 1 on the major axis. Isotropic
  covariances, as those of a model that was fitted without training, have no axes.
- Spearman: rank correlation of the predicted standard deviation (epistemic part or total) with the error ‖y − γ‖.
  The table per species has ρ for the total one: over all atoms, part of it is that some species err more than others.
  AUROC: probability that an atom among the worst 10 % errors has a larger total standard deviation than one that is
  not (0.5 is chance). AUSE: area between the sparsification curves by total standard deviation and by the error.
- An empty cell means that the file carries no distribution to compute it from.
"""

LEVERAGE_NOTE = """\
- Leverage: how far an atom's environment is from the training set; 1 is that of the training atoms on average. The mean
  is over atoms with a finite one.
"""

CONFORMAL_NOTE = """\
- Conformal coverage: share of a configuration's atoms within the calibration's radius of the prediction, distances in
  units of the calibrated covariance, averaged over configurations. For new configurations like those of the validation
  file it is at least the level, on average over validation files.
"""

OOD_NOTE = """\
- OOD: the same model on the frames out of distribution. AUROC of frames: probability that a frame out of distribution
  has a larger value than one in distribution (0.5 is chance). Values are the mean leverage, and the largest and the
  mean epistemic standard deviation, over the atoms of a frame; the largest of more atoms is larger, so that it tells
  frames of one size apart, not large ones from small. Coverage over all atoms can hide a species that is too certain
  behind others that are too cautious: see the table per species. Beyond a mean leverage of about ten, uncertainties
  grow, but are not calibrated.
"""


def cell(row: Row, summary: dict, unit: str) -> str:
    """One figure in the table's unit; empty where there is none."""
    _, _, factor, digits = UNITS[unit]
    key = "nll_kcal" if row.kind == "nll" and unit == "kcal" else row.key
    value: Optional[float] = summary.get(key)
    if value is None:
        return ""
    if row.kind in ("force", "energy"):
        error = summary.get(f"{row.key}_error")  # from sampling
        return f"{value * factor:.{digits}f}" + (f" ± {error * factor:.{digits}f}" if error else "")
    return f"{value:.4f}" if row.key == "calibration_error" else f"{value:.3f}"


def title(row: Row, unit: str) -> str:
    """Title of a figure with its unit."""
    force, energy, _, _ = UNITS[unit]
    suffix = {"force": f" ({force})", "energy": f" ({energy})", "nll": " (nats)"}.get(row.kind, "")
    return row.title + suffix


def named_reports(result: dict) -> List[Tuple[str, dict]]:
    """Every model's report, that out of distribution beside the one in distribution, and what to call it."""
    ood = result.get("ood", {"models": []})["models"]
    inside = [(m["label"], m) for m in result["models"]]
    outside = [(f"{m['label']} OOD", m) for m in ood]
    return [pair for pairs in zip(inside, outside, strict=True) for pair in pairs] if ood else inside


def overall_table(result: dict, unit: str) -> List[List[str]]:
    """Header and rows: one row per figure, one column per model and set; the leverage only where a model has it."""
    reports = named_reports(result)
    header = ["", "ideal", *(name for name, _ in reports)]
    rows = [r for r in ROWS if r.key != "leverage" or _have_leverage(result)]
    table = [header] + [[title(r, unit), r.ideal, *(cell(r, m["overall"], unit) for _, m in reports)] for r in rows]
    for level in _conformal_levels(result):
        shares = [_conformal(m).get(level) for _, m in reports]
        cells = ["" if share is None else f"{share['coverage']:.3f}" for share in shares]
        table.append([f"Conformal coverage at {100 * float(level):g} %", f">= {level}", *cells])
    return table


def _conformal(report: dict) -> Dict[str, dict]:
    return (report["calibration"] or {}).get("conformal", {})


def _conformal_levels(result: dict) -> List[str]:
    return sorted({level for _, m in named_reports(result) for level in _conformal(m)}, key=float)


def _have_leverage(result: dict) -> bool:
    return any(m["overall"]["leverage"] is not None for _, m in named_reports(result))


def species_table(result: dict, unit: str) -> List[List[str]]:
    """Header and rows: one row per species, model and set that has it, the most telling figures as columns."""
    rows = [r for r in ROWS if r.short]
    table = [["", "model", *(r.short for r in rows)]]
    reports = named_reports(result)
    for symbol in sorted({symbol for _, m in reports for symbol in m["species"]}):
        for name, m in reports:
            if symbol in m["species"]:
                table.append([symbol, name, *(cell(r, m["species"][symbol], unit) for r in rows)])
    return table


def frames_table(result: dict) -> List[List[str]]:
    """Header and rows: the AUROC of frames, one row per model, one column per score."""
    table = [["AUROC by", *FRAME_SCORES.values()]]
    for m in result["ood"]["frame_auroc"]:
        table.append([m["label"], *("" if m[key] is None else f"{m[key]:.3f}" for key in FRAME_SCORES)])
    return table


def print_tables(result: dict, unit: str, console: Console) -> None:
    """All tables on the terminal; long labels wrap, figures are never cut."""
    heading = f"Over all atoms ({_size(result['models'][0])}"
    if "ood" in result:
        heading += f"; OOD: {_size(result['ood']['models'][0])}"
    overall = Table(title=heading + ")", **_LOOK)
    header, *rows = overall_table(result, unit)
    overall.add_column(header[0], no_wrap=True, min_width=max(len(row[0]) for row in rows))
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
    tables = [overall, species]
    if "ood" in result:
        frames = Table(title=FRAMES_TITLE, **_LOOK)
        header, *rows = frames_table(result)
        frames.add_column(header[0], overflow="fold", min_width=12)
        for name in header[1:]:
            frames.add_column(name, justify="right")
        for row in rows:
            frames.add_row(*row)
        tables.append(frames)
    # Rich would cut off the columns that have no room.
    unbounded = console.options.update(max_width=10_000)
    console.width = max(console.width, *(console.measure(t, options=unbounded).minimum for t in tables))
    console.print(*tables)


FRAMES_TITLE = "Finding out-of-distribution frames"


def _size(report: dict) -> str:
    frames, atoms = report["frames"], report["overall"]["atoms"]
    return f"{frames} frame{'s' * (frames != 1)}, {atoms} atom{'s' * (atoms != 1)}"


_LOOK = {"box": SIMPLE_HEAD, "title_justify": "left", "title_style": "bold", "header_style": "bold", "pad_edge": False}


def markdown(result: dict, unit: str, figure: str) -> str:
    """The report as Markdown, with a link to the figure page."""
    density = "(eV/Å)⁻³" if unit == "eV" else "(kcal/mol/Å)⁻³"
    lines = ["# Comparison of force predictions", ""]
    for name, m in named_reports(result):
        kind = f"uncertainties: {m['uq_family']}" if m["uq_family"] else "no uncertainties"
        lines.append(f"- **{name}**: `{m['file']}`, {_size(m)}, {kind}")
        if m["file_calibration"]:
            lines.append(f"  - was calibrated already, with `{m['file_calibration']}`")
        if m["calibration"]:
            lines.append(f"  - calibrated ({', '.join(m['calibration']['methods'])}): `{m['calibration']['file']}`")
        lines += [f"  - {text}" for text in m["left_out"]]
    lines += ["", "## Over all atoms", "", *_markdown_table(overall_table(result, unit), 2)]
    lines += ["", f"## Per species (forces in {UNITS[unit][0]})", "", *_markdown_table(species_table(result, unit), 2)]
    notes = NOTES.format(density=density) + (LEVERAGE_NOTE if _have_leverage(result) else "")
    notes += CONFORMAL_NOTE if _conformal_levels(result) else ""
    if "ood" in result:
        lines += ["", f"## {FRAMES_TITLE}", "", *_markdown_table(frames_table(result), 1)]
        notes += OOD_NOTE
    lines += ["", f"![Figure page]({figure})", "", "## What the numbers mean", "", notes]
    return "\n".join(lines)


def _markdown_table(table: List[List[str]], text_columns: int) -> List[str]:
    align = [":--" if i < text_columns else "--:" for i in range(len(table[0]))]
    return ["| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in (table[0], align, *table[1:])]


def write_json(result: dict, path: Path) -> None:
    """The result with full precision."""
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
