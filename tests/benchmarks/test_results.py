"""Results of benchmarks: pages link to existing files, and the scripts write their tables from them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").glob("*/*.md"))]
#: Script, its options, and a cell of the table that docs have.
TABLES = [
    ("active_learning.py", ["--table"], "228 (222, 219, 244)"),
    ("monitor.py", ["--table"], "9290, 7890"),
    ("bias.py", ["--table"], "0.0007 ± 0.0005"),
    ("derived.py", [], "along a bond"),
    ("evidence.py", ["--table"], "| acetylacetone | 600 K | 0.019 | 0.942 | 0.634 | 0.032 | 0.924 | 0.675 |"),
    ("evaluate.py", ["table"], "1.06 (1.00–1.08)"),
    ("foundation.py", ["table"], "hot, 20 frames"),
    ("hosts.py", ["--table", str(RESULTS / "hosts.json")], "1.191 (1.187–1.195); processes 1.177–1.198"),
    ("kernel.py", ["--table"], "memory floor (copy)"),
    ("kinds.py", ["--table"], "178, 4 present"),
    ("members.py", ["--table"], "carbonyl C to methyl C"),
    ("releases.py", ["--table"], "mace-torch 0.3.13"),
    ("stress.py", ["--table"], "| 7.1 %, 300 K | 0.0177 | 1.00 | 0.92 | 1.09 | 0.56 |"),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_into_results_and_benchmarks_exist(page):
    links = re.findall(r"\]\(([^)#\s]*(?:benchmarks|results)/[^)#\s]*)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if not link.startswith("http") and not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize(
    ("script", "options", "cell"), TABLES, ids=lambda value: value if str(value)[-3:] == ".py" else ""
)
def test_scripts_write_their_tables_from_the_results(load_script, monkeypatch, capsys, tmp_path, script, options, cell):
    if script in ("active_learning.py", "monitor.py", "evaluate.py", "evidence.py"):
        options = [*options, "--figure", str(tmp_path / "figure.png")]
    if script == "releases.py":  # it would add runs of this machine
        options = [*options, "--work", str(tmp_path)]
    before = {path: path.read_bytes() for path in RESULTS.glob("*.json")}
    monkeypatch.setattr("sys.argv", [script, *options])
    load_script(f"benchmarks/{script}").main()
    assert cell in capsys.readouterr().out
    assert {path: path.read_bytes() for path in RESULTS.glob("*.json")} == before


def test_results_are_few_compact_files():
    files = list(RESULTS.rglob("*.*"))
    assert len(files) <= 30 and all(path.stat().st_size < 2**20 for path in files)
