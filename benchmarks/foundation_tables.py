"""Tables of the stand-in foundation model, from the file of results."""

from typing import Any

import numpy as np
from common import markdown
from foundation_ways import TESTS, UPDATED, UPDATES

COLUMNS = ("", "force MAE, meV/Å", "coverage at 95 %", "CE", "Spearman", "NLL", "unsupported atoms")
#: Ways in the tables' words.
TITLES = {
    "all": "whole training set",
    "subset": "400 of its frames",
    "own": "the user's 70 frames alone",
    "multihead": "multi-head fine-tuning with replay, `e2ip fit` for the user's head",
    "multihead-replay": "the same, `e2ip fit` for the head of the replay",
    "multihead-readout": "multi-head fine-tuning with `--readout e2ip`",
    "lora": "LoRA, then `e2ip fit`",
    "committee": "committee",
    "committee-scaled": "committee, scaled",
}


def cell(value: float | None) -> str:
    """Return a figure with three digits; a dash where there is none."""
    return "–" if value is None or np.isnan(value) else f"{value:.3g}"


def row(label: str, entry: dict[str, Any] | None) -> list[str]:
    """Return a row of a table; dashes where there is no result."""
    if entry is None:
        return [label, *["–"] * (len(COLUMNS) - 1)]
    figures = [entry[name] for name in ("coverage95", "calibration_error", "spearman_total", "nll")]
    unsupported = entry["unsupported"]
    share = "–" if unsupported is None else f"{100 * unsupported:.0f} %"
    return [label, f"{1000 * entry['force_mae']:.0f}", *map(cell, figures), share]


def tables(results: dict[str, Any]) -> str:
    """Return the tables of the documentation as Markdown: fits, updates, fine-tunings."""
    fits, updates, tunings = [], [], []
    for test in (*TESTS, "user"):
        for name in ("all", "subset", "committee", "committee-scaled"):
            fits.append(row(f"{test}, {TITLES[name]}", results.get(f"{name}/{test}")))
    for test in UPDATED:
        updates.append(row(f"{test}, as fitted", results.get(f"all/{test}")))
        for number in UPDATES:
            updates.append(row(f"{test}, {number} frames", results.get(f"update-{test}-{number}/{test}")))
            updates.append(row(f"seen, {number} frames of {test}", results.get(f"update-{test}-{number}/seen")))
    for test in ("user", "seen"):
        for name in ("all", "own", "multihead", "multihead-replay", "multihead-readout", "lora"):
            tunings.append(row(f"{test}, {TITLES[name]}", results.get(f"{name}/{test}")))
    return "\n\n".join(markdown(COLUMNS, rows) for rows in (fits, updates, tunings))
