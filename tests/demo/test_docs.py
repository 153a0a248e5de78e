"""Documentation: links lead somewhere, every page is in a menu, pages for users are short, tutorials have results."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.glob("*/*.md") if path.parent.name != "_build")
#: Folders of pages for users, and the most bytes of such a page, code of tutorials apart.
FOR_USERS, LONGEST = ("start", "tutorials", "howto", "understand", "evidence", "help"), 8192
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))
RESULTS = DOCS / "tutorials" / "results"


def name(path):
    return str(path.relative_to(ROOT))


def without_code(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(path):
    """Return the anchors of a page's headings, as Sphinx and code hosts make them."""
    headings = re.findall(r"^#+ (.*)$", without_code(path.read_text(encoding="utf-8")), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", DOCS / "index.md", *PAGES], ids=name)
def test_links_lead_somewhere(page):
    missing = []
    for target, anchor in re.findall(r"\]\(([^)\s#]*)#?([^)\s]*)\)", without_code(page.read_text(encoding="utf-8"))):
        path = page.parent / target if target else page
        if "://" in target:
            continue
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
            missing.append(f"{target}#{anchor}")
    assert not missing


def test_every_page_is_in_a_menu():
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```\{toctree\}(.*?)```", index, re.DOTALL)
    # A line is a page, or a title and a page in angle brackets.
    menu = {line.strip().rpartition("<")[2].rstrip(">") for block in blocks for line in block.splitlines()}
    pages = {str(path.relative_to(DOCS).with_suffix("")) for path in PAGES}
    assert pages <= menu


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name in FOR_USERS], ids=name)
def test_pages_for_users_are_short(page):
    text = page.read_text(encoding="utf-8")
    if page.parent.name == "tutorials":
        text = without_code(text)
    assert len(text.encode()) <= LONGEST


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_texts_of_links_to_pages_are_titles(page):
    links = re.findall(r"\[([\w/-]+\.md)\]\(([^)\s#]+)", page.read_text(encoding="utf-8"))
    assert not [text for text, target in links if DOCS in (page.parent / target).resolve().parents]


def code_cells(text):
    """Return the code of a tutorial's cells, without their options."""
    cells = re.findall(r"^```\{code-cell\}[^\n]*\n((?::[^\n]*\n)*)(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    return [code.strip() for _, code in cells]


@pytest.mark.parametrize("page", TUTORIALS, ids=name)
def test_kept_results_are_those_of_the_code(page):
    results = RESULTS / f"{page.stem}.ipynb"
    cells = json.loads(results.read_text(encoding="utf-8"))["cells"]
    kept = ["".join(cell["source"]).strip() for cell in cells]
    way = f"run: python3 noxfile.py -s tutorials -- {page.stem}"
    assert code_cells(page.read_text(encoding="utf-8")) == kept, way
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert outputs and not [output for output in outputs if output["output_type"] == "error"], way
    # Whoever ran them has folders of their own, and other packages.
    assert not re.search(r"/(home|root|tmp|work|site-packages)/|cuequivariance", json.dumps(outputs))


def test_kept_results_are_small():
    results = list(RESULTS.glob("*.ipynb"))
    assert {path.stem for path in results} == {page.stem for page in TUTORIALS}
    assert sum(path.stat().st_size for path in results) < 1_500_000
