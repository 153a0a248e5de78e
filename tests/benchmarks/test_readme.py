"""README.md and CITATION.cff agree with the results, the version and the address that they are made of."""

import re
from pathlib import Path

import pytest

import e2ip_plugins

ROOT = Path(__file__).resolve().parents[2]

#: Address of the project until it has a public one. Who gives it one changes pyproject.toml, runs
#: `python benchmarks/readme.py`, and takes the address over here.
PLACEHOLDER = "https://example.org/e2ip-plugins"


@pytest.fixture(scope="module")
def script(load_script):
    """benchmarks/readme.py as a module."""
    return load_script("benchmarks/readme.py")


@pytest.mark.parametrize("name", ["README.md", "CITATION.cff"])
def test_file_is_what_the_command_writes(script, name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert script.WRITTEN[name](text) == text, "run: python benchmarks/readme.py"


def test_wrong_figures_and_addresses_are_mended(script):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    wrong = text.replace("| demo, MACE | 43.1 |", "| demo, MACE | 42.9 |").replace(PLACEHOLDER, "https://example.org/x")
    assert wrong != text and script.readme(wrong) == text


def test_every_measured_figure_of_a_table_in_readme_is_made_from_results(script):
    """Tables that the command does not write have no figure with decimals."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    made = text[text.index(script.HEAD[0]) :].split("\n\n")[0].splitlines()
    others = [line for line in text.splitlines() if line.startswith("|") and line not in made]
    assert len(made) == 5 and others  # two lines of heading, the demo with both frameworks, acetylacetone with NequIP
    assert [line for line in others if re.search(r"\d\.\d", line)] == []


def test_address_is_the_placeholder_everywhere(script):
    assert script.address() == PLACEHOLDER
    assert f"git clone {PLACEHOLDER}" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert f'repository-code: "{PLACEHOLDER}"' in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_version_citation_and_changelog_agree():
    """The version that the build reads is that of CITATION.cff and of the newest release in the changelog."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    source = re.search(r'^\[tool\.hatch\.version\]\npath = "(.+)"$', project, re.MULTILINE)[1]
    text = (ROOT / source).read_text(encoding="utf-8")
    version = re.search(r'^__version__ = "(\d+\.\d+\.\d+)"$', text, re.MULTILINE)[1]
    assert version == e2ip_plugins.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[(.+?)\](.*)$", changelog, re.MULTILINE)
    assert [name for name, _ in headings[:2]] == ["Unreleased", version]
    assert all(re.fullmatch(r" - \d{4}-\d\d-\d\d", date) for _, date in headings[1:])


def test_links_of_an_index_are_absolute():
    pytest.importorskip("hatchling", reason="hatch_build.py is a part of hatchling's builds")
    import importlib.util

    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    page = hook.absolute_links(text, PLACEHOLDER)
    targets = [re.search(r"\(([^)]+)\)$", match)[1] for match in re.findall(r"!?\[[^\]]*\]\([^)\s]+\)", page)]
    assert targets and all(target.startswith(("https://", "#")) for target in targets)
    for path in re.findall(re.escape(PLACEHOLDER) + r"/(?:blob|raw)/main/([^)#\s]+)", page):
        assert (ROOT / path).exists(), path
