"""The glossary has every name that the commands print, taken from the lists that they print from."""

import re
from pathlib import Path

import pytest

from e2ip_plugins.fitting.constants import FittedConstants
from e2ip_plugins.fitting.energies import FittedLength, FittedStress
from e2ip_plugins.fitting.report import FitReport
from e2ip_plugins.md.thresholds import WATCHED
from e2ip_plugins.report.tables import (
    ENERGY_KINDS,
    ENERGY_ROWS,
    FRAME_SCORES,
    REPORT_ROWS,
    energies_table,
    overall_table,
    species_table,
)

GLOSSARY = Path(__file__).resolve().parents[3] / "docs" / "understand" / "glossary.md"

#: Levels of coverages and radii, which the glossary does not list one by one.
LEVEL = re.compile(r"(?<=overage at )[\d.]+(?= %)")


@pytest.fixture(scope="module")
def explained():
    """Names in bold letters or as code."""
    return set(re.findall(r"\*\*(.+?)\*\*|`(.+?)`", GLOSSARY.read_text(encoding="utf-8")))


def lacking(names, explained):
    known = {name for pair in explained for name in pair if name}
    return sorted({LEVEL.sub("p", name) for name in names} - known)


def test_names_of_lists(explained):
    rows = [name for row in REPORT_ROWS for name in (row.title, row.short) if name]
    rows += [row.title for row in ENERGY_ROWS]
    assert not lacking([*rows, *ENERGY_KINDS.values(), *FRAME_SCORES.values(), *WATCHED], explained)


def test_names_of_tables(explained, write, make_frames, with_energies, compared, succeed):
    """The model is calibrated and has conformal radii, so that all rows are there; names are compared without units."""
    write("valid.xyz", with_energies(2, seed=1))
    write("test.xyz", with_energies(2))
    succeed("calibrate", "valid.xyz", "--method", "scale", "--method", "conformal")
    _, result, _ = compared("test.xyz", "--calibration", "calibration.json")
    titles = [row[0] for table in (overall_table, energies_table) for row in table(result, "eV")[1:]]
    names = [re.sub(r"^(Frames|Pairs): | \([^)]*\)$", "", title) for title in titles]
    assert any(name.startswith("Conformal") for name in names)
    columns = species_table(result, "eV")[0][2:]
    assert not lacking({*names, *columns} - {"number"}, explained)


@pytest.mark.parametrize("method", ["scale", "species-scale", "floor", "conformal"])
def test_lines_of_a_calibration(explained, write, with_energies, succeed, method):
    write("valid.xyz", with_energies(2, inflate=2.0))
    lines = succeed("calibrate", "valid.xyz", "--method", method, "--overwrite").stdout.splitlines()
    # The first line is on the file, the last one on the output.
    titles = [line.partition(":")[0] for line in lines[1:-1] if ":" in line]
    names = [re.sub(r" for [\d.]+$| of these \w+$|, [A-Z][a-z]?$", "", title) for title in titles]
    assert len(names) >= 6 and not lacking([name.replace("coverage", "Coverage") for name in names], explained)


def test_lines_of_a_fit(explained):
    report = FitReport({(0, 0): 4}, {}, {0: FittedConstants(2.0, (1.0, 3.0), 0.0, 0.1, (1.0, 0.9), 20, 60, 0.2, 0.1)})
    report.energies[0] = FittedLength(0.1, 0.01, 20, 0.0, 0.01)
    report.stresses[0] = FittedStress((1.0, 1.0), (0.1, 0.1), 0.0, 0.1, 20)
    lines = report.lines()
    assert len(lines) == 5 and not lacking([line.partition(":")[0] for line in lines], explained)
