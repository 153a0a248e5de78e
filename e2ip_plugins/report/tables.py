"""The result of `e2ip_plugins.report.compare.compare` as terminal tables, Markdown and JSON."""

import json
import re
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from e2ip_plugins.errors import plural
from e2ip_plugins.keys import KCAL_PER_MOL
from e2ip_plugins.report.verdict import verdicts


class ReportRow(NamedTuple):
    """One figure of the tables.

    Attributes
    ----------
    key : str
        In the result's ``overall`` and ``species`` dictionaries.
    title : str
    ideal : str
        Value of a good model.
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


REPORT_ROWS = (
    ReportRow("force_mae", "Force MAE", "low", "force", "F MAE"),
    ReportRow("force_rmse", "Force RMSE", "low", "force"),
    ReportRow("energy_mae", "Energy MAE", "low", "energy"),
    ReportRow("nll", "NLL", "low", "nll", "NLL"),
    ReportRow("energy_score", "Energy score", "low", "force", "ES"),
    ReportRow("calibration_error", "Calibration error CE", "0", "number", "CE"),
    ReportRow("coverage50", "Coverage at 50 %", "0.5", "number"),
    ReportRow("coverage80", "Coverage at 80 %", "0.8", "number"),
    ReportRow("coverage90", "Coverage at 90 %", "0.9", "number"),
    ReportRow("coverage95", "Coverage at 95 %", "0.95", "number", "cov95"),
    ReportRow("z_rms_minor", "RMS z, minor axis", "1", "number"),
    ReportRow("z_rms_middle", "RMS z, middle axis", "1", "number"),
    ReportRow("z_rms_major", "RMS z, major axis", "1", "number"),
    ReportRow("spearman_epistemic", "Spearman, epistemic", "high", "number"),
    ReportRow("spearman_total", "Spearman, total", "high", "number", "ρ"),
    ReportRow("auroc_total", "AUROC, worst 10 %", "high", "number", "AUROC"),
    ReportRow("ause_total", "AUSE", "0", "number"),
    ReportRow("leverage", "Mean leverage", "", "number"),
)

#: Column titles of the scores that frames are ranked by, as in the result's ``frame_auroc``.
FRAME_SCORES = {
    "mean_leverage": "mean leverage",
    "max_epistemic_std": "largest epistemic std",
    "mean_epistemic_std": "mean epistemic std",
}

#: Force unit, energy unit, factor from eV, and decimals of forces and energies, by the name of the unit.
REPORT_UNITS = {
    "eV": ("meV/Å", "meV/atom", 1e3, 2),
    "kcal": ("kcal/mol/Å", "kcal/mol/atom", 1.0 / KCAL_PER_MOL, 4),
}

#: Figures of energies, of frames and of pairs. The kind ``energy`` is per atom for frames, of the whole for pairs.
ENERGY_ROWS = (
    ReportRow("mae", "MAE", "low", "energy"),
    ReportRow("nll", "NLL", "low", "nll"),
    ReportRow("crps", "CRPS", "low", "energy"),
    ReportRow("calibration_error", "Calibration error CE", "0", "number"),
    ReportRow("coverage95", "Coverage at 95 %", "0.95", "number"),
    ReportRow("z_rms", "RMS z", "1", "number"),
    ReportRow("z_mean", "Mean z", "0", "number"),
    ReportRow("spearman", "Spearman", "high", "number"),
)

#: Titles of the kinds of figures of energies, as in a report's ``energies``.
ENERGY_KINDS = {"frames": "Frames", "pairs": "Pairs"}

#: Figures that not every model with a distribution has.
_ONLY_SOME = ("leverage", "z_rms_minor", "z_rms_middle", "z_rms_major")

_TITLE_OF_FRAMES = "Finding out-of-distribution frames"

_LOOK = {"box": SIMPLE_HEAD, "title_justify": "left", "title_style": "bold", "header_style": "bold", "pad_edge": False}
_LOOK |= {"caption_justify": "left", "caption_style": "dim"}


class Section(NamedTuple):
    """One table of the report.

    Attributes
    ----------
    title : str
    table : list of lists
        Header and rows.
    text : tuple of dicts
        Options of rich for the columns of text, which come first.
    figures : dict
        The same for the other columns.
    grouped : bool
        Whether rows with the same first cell belong together.
    note : str
        Line below the table.
    """

    title: str
    table: List[List[str]]
    text: Tuple[Dict[str, Any], ...]
    figures: Dict[str, Any]
    grouped: bool = False
    note: str = ""

    def for_terminal(self, remark: str = "") -> Table:
        """Return the table of rich."""
        table = Table(title=self.title + remark, caption=f"{self.note}\n" if self.note else None, **_LOOK)
        header, *rows = self.table
        for i, name in enumerate(header):
            table.add_column(name, **(self.text[i] if i < len(self.text) else {"justify": "right", **self.figures}))
        for i, row in enumerate(rows):
            last_of_group = self.grouped and i + 1 < len(rows) and rows[i + 1][0] != row[0]
            table.add_row(*row, end_section=last_of_group)
        return table

    def lines(self) -> List[str]:
        """Return the lines of the table in Markdown, with the note."""
        align = [":--" if i < len(self.text) else "--:" for i in range(len(self.table[0]))]
        rows = (self.table[0], align, *self.table[1:])
        lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
        return lines + (["", self.note] if self.note else [])


def sections(result: dict, unit: str) -> List[Section]:
    """Return the tables of a report."""
    overall, label = overall_table(result, unit), {"overflow": "fold", "min_width": 12}

    def titles(table: List[List[str]]) -> Tuple[Dict[str, Any], ...]:
        # Rich takes columns that must not wrap for as narrow as their longest word.
        title, ideal = (max(len(row[i]) for row in table) for i in (0, 1))
        return {"no_wrap": True, "min_width": title}, {"no_wrap": True, "min_width": ideal, "style": "dim"}

    any_interval = any(m["interval95"] for _, m in named_reports(result))
    note = "in brackets: 95 % interval; those of coverages: interval95 in compare.json" if any_interval else ""
    tables = [
        Section("Over all atoms", overall, titles(overall), {"overflow": "fold", "min_width": 9}, note=note),
        Section(
            f"Per species (forces in {REPORT_UNITS[unit][0]})",
            species_table(result, unit),
            ({"no_wrap": True}, label),
            {"no_wrap": True},
            grouped=True,
        ),
    ]
    if have_energies(result):
        energies = energies_table(result, unit)
        tables.append(Section("Energies", energies, titles(energies), {"min_width": 10}))
    return tables + ([Section(_TITLE_OF_FRAMES, frames_table(result), (label,), {})] if "ood" in result else [])


def cell(row: ReportRow, summary: dict, unit: str) -> str:
    """Return one figure in the table's unit, with its sampling error or interval if it has one; empty without it."""
    key = "nll_kcal" if row.kind == "nll" and unit == "kcal" else row.key
    value: Optional[float] = summary.get(key)
    if value is None:
        return ""
    _, _, factor, digits = REPORT_UNITS[unit]
    if row.kind not in ("force", "energy"):
        factor, digits = 1.0, 4 if key == "calibration_error" else 3
    error, interval = summary.get(f"{key}_error"), (summary.get("interval95") or {}).get(key)
    after = f" ± {error * factor:.{digits}f}" if error else ""
    if interval is not None:
        after = " ({:.{d}f} to {:.{d}f})".format(*(factor * end for end in interval), d=digits)
    return f"{value * factor:.{digits}f}{after}"


def title(row: ReportRow, unit: str) -> str:
    """Return the title of a figure with its unit."""
    force, energy, _, _ = REPORT_UNITS[unit]
    suffix = {"force": f" ({force})", "energy": f" ({energy})", "nll": " (nats)"}.get(row.kind, "")
    return row.title + suffix


def named_reports(result: dict) -> List[Tuple[str, dict]]:
    """Return every model's name and report, that out of distribution after the one in distribution."""
    reports = [(m["label"], m) for m in result["models"]]
    if "ood" not in result:
        return reports
    ood = list(zip(ood_names(result), result["ood"]["models"], strict=True))
    return [report for pair in zip(reports, ood, strict=True) for report in pair]


def ood_names(result: dict) -> List[str]:
    """Return the names of the models' reports out of distribution: those of their files where models have these."""
    inside, outside = result["models"], result["ood"]["models"]
    names = [Path(m["file"]).stem for m in outside]
    if len(set(names)) < len(names) or any(m["label"] != Path(m["file"]).stem for m in inside):
        names = [m["label"] for m in inside]
    return [f"{name} OOD" for name in names]


def overall_table(result: dict, unit: str) -> List[List[str]]:
    """Return one row per figure, one column per model and set.

    The leverage and the axes of covariances only where a model has them: isotropic covariances have no axes.
    """
    reports = named_reports(result)
    header = ["", "ideal", *(name for name, _ in reports)]
    rows = [
        r for r in REPORT_ROWS if r.key not in _ONLY_SOME or any(m["overall"][r.key] is not None for _, m in reports)
    ]
    table = [header] + [[title(r, unit), r.ideal, *(_overall_cell(r, m, unit) for _, m in reports)] for r in rows]
    return table + _conformal_rows([_conformal(m) for _, m in reports])


def _overall_cell(row: ReportRow, report: dict, unit: str) -> str:
    """Return one figure over all atoms, CE with its interval: intervals of all coverages would fill the table."""
    intervals = (report["interval95"] or {}).get("overall") or {}
    shown = {name: interval for name, interval in intervals.items() if name == "calibration_error"}
    return cell(row, {**report["overall"], "interval95": shown}, unit)


def _conformal(report: dict) -> Dict[str, dict]:
    return (report["calibration"] or {}).get("conformal", {})


def _conformal_of_energies(report: dict) -> Dict[str, dict]:
    return (report["calibration"] or {}).get("energies", {}).get("conformal", {})


def _conformal_rows(of_models: List[Dict[str, dict]], name: str = "") -> List[List[str]]:
    """Return one row per level that any model has a conformal radius for."""
    rows = []
    for level in sorted({level for of_model in of_models for level in of_model}, key=float):
        shares = [of_model.get(level) for of_model in of_models]
        cells = ["" if share is None else f"{share['coverage']:.3f}" for share in shares]
        rows.append([f"{name}Conformal coverage at {100 * float(level):g} %", f">= {level}", *cells])
    return rows


def species_table(result: dict, unit: str) -> List[List[str]]:
    """Return one row per species, model and set that has it, with the most telling figures as columns."""
    rows, reports = [r for r in REPORT_ROWS if r.short], named_reports(result)
    symbols = sorted({symbol for _, m in reports for symbol in m["species"]})
    return [["", "model", *(r.short for r in rows)]] + [
        [symbol, name, *(cell(r, m["species"][symbol], unit) for r in rows)]
        for symbol in symbols
        for name, m in reports
        if symbol in m["species"]
    ]


def have_energies(result: dict) -> bool:
    """Return whether any model has figures of energies with uncertainties."""
    return any("energies" in m for _, m in named_reports(result))


def energies_table(result: dict, unit: str) -> List[List[str]]:
    """Return one row per figure of energies and of their differences, one column per model and set."""
    reports = named_reports(result)
    table = [["", "ideal", *(name for name, _ in reports)]]
    for kind, name in ENERGY_KINDS.items():
        of_models = [m.get("energies", {}).get(kind) for _, m in reports]
        if not any(of_models):
            continue
        numbers = ["" if figures is None else _number_of(figures) for figures in of_models]
        table.append([f"{name}: number", "", *numbers])
        for row in ENERGY_ROWS:
            cells = ["" if figures is None else cell(row, figures, unit) for figures in of_models]
            if any(cells):
                table.append([f"{name}: {_energy_title(row, kind, unit)}", row.ideal, *cells])
        if kind == "frames":
            table += _conformal_rows([_conformal_of_energies(m) for _, m in reports], f"{name}: ")
    return table


def _number_of(figures: dict) -> str:
    number, possible = figures["number"], figures["possible"]
    return f"{number}" if number == possible else f"{number} of {possible}"


def _energy_title(row: ReportRow, kind: str, unit: str) -> str:
    title_per_atom = title(row, unit)
    return title_per_atom.replace("/atom", "") if kind == "pairs" else title_per_atom


def frames_table(result: dict) -> List[List[str]]:
    """Return the AUROC of frames: one row per model, one column per score."""
    return [["AUROC by", *FRAME_SCORES.values()]] + [
        [m["label"], *("" if m[key] is None else f"{m[key]:.3f}" for key in FRAME_SCORES)]
        for m in result["ood"]["frame_auroc"]
    ]


def print_tables(result: dict, unit: str, console: Console) -> None:
    """Print all tables on the terminal; long labels wrap, figures are never cut."""
    size = _size(result["models"][0])
    if "ood" in result:
        size += f"; OOD: {_size(result['ood']['models'][0])}"
    overall, *others = sections(result, unit)
    tables = [overall.for_terminal(f" ({size})"), *(section.for_terminal() for section in others)]
    # Rich would cut off the columns that have no room.
    unbounded = console.options.update(max_width=10_000)
    console.width = max(console.width, *(console.measure(table, options=unbounded).minimum for table in tables))
    console.print(*tables)
    # No markup: labels may have brackets.
    console.print("\n".join(verdict_lines(result)), markup=False, highlight=False)


def verdict_lines(result: dict) -> List[str]:
    """Return the verdicts on every model and set, after its name."""
    in_words = [(m["label"], verdicts(m)) for m in result["models"]]
    if "ood" in result:
        outside = zip(ood_names(result), result["ood"]["models"], strict=True)
        in_words += [(name, verdicts(m, True)) for name, m in outside]
    return [f"{name}: {line}" for name, lines in in_words for line in lines]


def _size(report: dict) -> str:
    return f"{plural(report['frames'], 'frame')}, {plural(report['overall']['atoms'], 'atom')}"


def markdown(result: dict, unit: str, figure: str) -> str:
    """Return the report as Markdown, with a link to the figure page."""
    lines = ["# Comparison of force predictions", ""]
    for name, m in named_reports(result):
        kind = f"uncertainties: {m['uq_family']}" if m["uq_family"] else "no uncertainties"
        lines.append(f"- **{name}**: `{m['file']}`, {_size(m)}, {kind}")
        if m["file_calibration"]:
            lines.append(f"  - was calibrated already, with `{m['file_calibration']}`")
        if m["calibration"]:
            lines.append(f"  - calibrated ({', '.join(m['calibration']['methods'])}): `{m['calibration']['file']}`")
        lines += [f"  - {text}" for text in m["left_out"]]
    lines += ["", "## Verdict", "", *(f"- {line}" for line in verdict_lines(result))]
    for section in sections(result, unit):
        lines += ["", f"## {section.title}", "", *section.lines()]
    present = {
        "all": True,
        "leverage": any(m["overall"]["leverage"] is not None for _, m in named_reports(result)),
        "conformal": any(_conformal(m) for _, m in named_reports(result)),
        "ood": "ood" in result,
        "energies": have_energies(result),
    }
    notes = "".join(text for name, text in _notes().items() if present[name])
    densities = ("(eV/Å)⁻³", "eV⁻¹") if unit == "eV" else ("(kcal/mol/Å)⁻³", "(kcal/mol)⁻¹")
    notes = notes.format(density=densities[0], energy_density=densities[1])
    lines += ["", f"![Figure page]({figure})", "", "## What the numbers mean", "", notes]
    return "\n".join(lines)


def _notes() -> Dict[str, str]:
    """Return the explanations in ``notes.md``, by what a report must have for them."""
    text = Path(__file__).with_name("notes.md").read_text(encoding="utf-8")
    return dict(re.findall(r"<!-- (\w+) -->\n(.*?)(?=<!--|\Z)", text, re.DOTALL))


def write_json(result: dict, path: Path) -> None:
    """Write the result with full precision."""
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
