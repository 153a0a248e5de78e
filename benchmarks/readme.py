"""Writes what README.md and CITATION.cff have from elsewhere, so that every figure and address has one source.

    .nox/mace/bin/python benchmarks/readme.py

The table of results in README.md is made from benchmarks/results/forces.json; the address in the clone line of
README.md and in CITATION.cff is that in pyproject.toml, and the version that of the package. The tests make all of it
anew and compare.
"""

import json
import re
from functools import partial
from pathlib import Path
from statistics import mean

from common import RESULTS, ROOT
from evidence import HOSTS, values

import e2ip_plugins

SETS = {"demo": "demo", "acac": "acetylacetone"}
HEAD = (
    "| | MAE in: baseline | e²IP | MAE out: baseline | e²IP | CE in | coverage@95 in | CE out | coverage@95 out |",
    "|---|---|---|---|---|---|---|---|---|",
)


def address() -> str:
    """Return the public address of the project."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return re.search(r'^address = "(.+)"$', text, re.MULTILINE)[1]


def results_table(rows: list[dict]) -> str:
    """Return the table of README.md; force errors in meV/Å."""
    lines = list(HEAD)
    for name, title in SETS.items():
        for host, host_title in HOSTS.items():
            stock, e2ip = (partial(values, rows, name, host, model) for model in ("stock model", "e²IP"))
            if not (stock("test", "force_mae") and e2ip("test", "force_mae")):
                continue  # has not been trained with today's defaults
            tests = ("test", "ood")
            cells = [f"{1000 * mean(of(test, 'force_mae')):.1f}" for test in tests for of in (stock, e2ip)]
            for test in tests:
                cells.append(f"{mean(e2ip(test, 'calibration_error')):.3f}")
                cells.append(f"{mean(e2ip(test, 'coverage95')):.2f}")
            lines.append(f"| {title}, {host_title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def readme(text: str) -> str:
    """Return README.md with its table of results and its clone line made anew."""
    rows = json.loads((RESULTS / "forces.json").read_text(encoding="utf-8"))
    old_table = re.compile(re.escape(HEAD[0]) + r"\n(\|.*\n)+")
    return re.sub(r"git clone [^\s`]+", f"git clone {address()}", old_table.sub(results_table(rows) + "\n", text))


def citation(text: str) -> str:
    """Return CITATION.cff with the version of the package and the project's address."""
    text = re.sub(r"^version: .*$", f"version: {e2ip_plugins.__version__}", text, flags=re.MULTILINE)
    return re.sub(r"^repository-code: .*$", f'repository-code: "{address()}"', text, flags=re.MULTILINE)


#: What is written, and how.
WRITTEN = {"README.md": readme, "CITATION.cff": citation}


def main() -> None:
    """Write the files."""
    for name, make in WRITTEN.items():
        path: Path = ROOT / name
        path.write_text(make(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
