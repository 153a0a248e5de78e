"""Other people's tools: the page has what was tried, and those of ASE are tried here."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def clients(load_script):
    """benchmarks/clients.py as a module."""
    return load_script("benchmarks/clients.py")


def test_page_has_the_results(clients):
    results = json.loads((ROOT / "benchmarks" / "results" / "clients.json").read_text(encoding="utf-8"))
    assert list(results) == list(clients.CLIENTS)
    assert not [name for name, result in results.items() if "error" in result]
    assert clients.table(results) in (ROOT / "docs" / "howto" / "other-tools.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["optimisers", "dynamics", "neb", "phonons"])
def test_what_ase_hands_back(clients, name):
    pytest.importorskip("mace", reason="the tools are tried with a MACE model")
    expected = json.loads((ROOT / "benchmarks" / "results" / "clients.json").read_text(encoding="utf-8"))[name]
    assert clients.tried(name)["outputs"] == expected["outputs"]
