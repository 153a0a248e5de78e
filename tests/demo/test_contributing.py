"""CONTRIBUTING.md: its tables and recipes name what exists."""

import ast
import itertools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def section(title):
    """Return the text below a heading, up to the next heading."""
    return re.split(r"^#+ ", TEXT.split(f"# {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def rooms():
    """Return the rooms of the core's table, row by row."""
    table = section("Where things are").split("Core:\n")[1].split("Both adapters")[0]
    rows = re.findall(r"^\| (`.*?) \|", table, flags=re.MULTILINE)
    return [re.findall(r"`(\w+)`", row) for row in rows]


def test_rooms_are_those_of_the_import_contract():
    """The table goes from the ground up, the contract from the top down."""
    contract = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split('id = "rooms"')[1]
    layers = ast.literal_eval(re.search(r"layers = (\[.*?\])", contract, flags=re.DOTALL)[1])
    assert [set(row) for row in rooms()] == [set(layer.split(" | ")) for layer in reversed(layers)]


def test_every_room_says_what_it_is():
    for room in itertools.chain.from_iterable(rooms()):
        folder = ROOT / "e2ip_plugins" / room
        path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), path


@pytest.mark.parametrize(
    "title", ["A new predictive family", "A new release of a host", "A new data set of the benchmarks"]
)
def test_recipes_name_files_that_exist(title):
    named = re.findall(r"`([\w/.-]+/[\w/.-]*)`|\]\(([\w/.-]+)\)", section(title))
    paths = [ROOT / (code or link) for code, link in named]
    assert paths
    for path in paths:
        # NAME stands for the new one, beside existing ones.
        assert any(path.parent.glob(path.name.replace("NAME", "*"))), path
