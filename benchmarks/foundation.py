"""Uncertainties of a stand-in foundation model: a small MACE model of 29 elements, trained on labels of CHGNet.

No public foundation model is used. Structures come from the builders of ASE and pymatgen (`foundation_structures.py`),
labels from CHGNet, whose weights come with its package (`foundation_labels.py`). The first two steps run in an
environment of their own (`pip install chgnet -c constraints.txt`), the others in that of MACE; all in this order, and
all with the same --work:

    python benchmarks/foundation.py structures       # a minute
    python benchmarks/foundation.py label            # ten minutes
    python benchmarks/foundation.py train            # 40 minutes; the committee: --member 2 to 5, --epochs 5
    python benchmarks/foundation.py ways             # fits, updates, fine-tunings and their scores
    python benchmarks/foundation.py table            # prints the figures of docs/evidence/foundation-models.md
"""

from typing import Any

import numpy as np
from common import load, markdown, parser_of
from foundation_ways import TESTS, UPDATED, UPDATES, Work, train

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


def main() -> None:
    parser = parser_of(__doc__ or "", "foundation", "work", "out")
    parser.add_argument("step", choices=("structures", "label", "train", "ways", "table"))
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the number of structures")
    parser.add_argument("--member", type=int, default=1, help="which training: 1 is the stand-in")
    parser.add_argument("--epochs", type=int, default=25, help="budget of a training; more continue a finished one")
    parser.add_argument("--tuning-epochs", type=int, default=20, help="budget of a fine-tuning")
    options = parser.parse_args()
    # Each step imports what its environment has.
    if options.step == "structures":
        from foundation_structures import write_all

        write_all(options.work / "structures", options.scale)
    elif options.step == "label":
        from foundation_labels import label_all

        label_all(options.work / "structures", options.work / "data")
    elif options.step == "train":
        train(Work(options.work), options.member, options.epochs)
    elif options.step == "ways":
        from foundation_scores import judge_all

        judge_all(Work(options.work), options.tuning_epochs, options.out)
    else:
        print(tables(load(options.out)))


if __name__ == "__main__":
    main()
