"""References and their weights are read in one place of core and adapters: a second opinion is a silent fault."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

#: Where references are read: of files, of what MACE has loaded, of what NequIP has loaded.
READERS = {
    "e2ip_plugins/predictions/labelled.py",
    "mace_ext/training/labels.py",
    "nequip_ext/training/labels.py",
}

#: Other modules that may name references or weights, and why.
EXCEPTIONS = {
    "e2ip_plugins/keys.py": "defines the names",
    "e2ip_plugins/predictions/reference_names.py": "lists the names",
    "e2ip_plugins/predictions/columns.py": "renames references to make room for predictions",
    "e2ip_plugins/active/label.py": "writes references",
    "e2ip_plugins/bench/data.py": "gives the references of data sets one name",
    "e2ip_plugins/report/ensemble.py": "writes the references that its members had",
    "nequip_ext/training/fetch.py": "writes the references of a published data set",
    "mace_ext/training/loss.py": "is given batches by MACE",
}

#: Names of references and of their weights in files.
NAMES = re.compile(r"REF_?|(REF|ref|dft|DFT|original_dataset)_(energy|forces|stress|virials)|config_(\w+_)?weight")

#: Attributes and keys of batches and configurations, and the variables that hold these.
LABELS = {
    "forces",
    "energy",
    "total_energy",
    "stress",
    "virials",
    "weight",
    "forces_weight",
    "energy_weight",
    "stress_weight",
}
HOLDERS = {"batch", "ref", "config", "configuration", "properties", "property_weights", "target", "data"}

#: NequIP's names of these keys.
FIELDS = {"FORCE_KEY", "TOTAL_ENERGY_KEY", "STRESS_KEY", "VIRIAL_KEY"}


def modules():
    rooms = ("e2ip_plugins", "mace_ext", "nequip_ext")
    return sorted(str(path.relative_to(ROOT)) for room in rooms for path in ROOT.glob(f"{room}/**/*.py"))


def holder(node):
    """Name of a variable, or last attribute, that something is taken from."""
    return getattr(node, "id", getattr(node, "attr", ""))


def docstrings(tree):
    places = (ast.Module, ast.ClassDef, ast.FunctionDef)
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, places) and node.body]
    return {id(body[0].value) for body in bodies if isinstance(body[0], ast.Expr)}


def opinions(source):
    """Return what a module names of references and their weights, with the lines."""
    tree = ast.parse(source)
    ignored, lines = docstrings(tree), []
    for node in ast.walk(tree):
        text = ""
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in ignored:
            text = node.value if NAMES.fullmatch(node.value) else ""
        elif isinstance(node, ast.Attribute) and node.attr in LABELS and holder(node.value) in HOLDERS:
            text = f"{holder(node.value)}.{node.attr}"
        elif isinstance(node, ast.Subscript) and holder(node.value) in HOLDERS:
            key = node.slice.value if isinstance(node.slice, ast.Constant) else holder(node.slice)
            text = f"{holder(node.value)}[{key}]" if key in LABELS | FIELDS else ""
        if text:
            lines.append(f"line {node.lineno}: {text}")
    return lines


@pytest.mark.parametrize("module", modules())
def test_references_are_read_in_one_place(module):
    if module in READERS or module in EXCEPTIONS:
        return
    lines = opinions((ROOT / module).read_text())
    assert not lines, f"{module} has an opinion on references of its own ({lines}): take it from the reader of its room"


def test_exceptions_are_still_needed():
    for module in EXCEPTIONS:
        assert opinions((ROOT / module).read_text()), f"{module} is no exception any more: take it out of the list"


@pytest.mark.parametrize(
    "line",
    [
        "batch.forces - forces",
        "ref['forces']",
        "config.properties['energy']",
        "self.batch.forces_weight > 0",
        "target[AtomicDataDict.FORCE_KEY]",
        "atoms.arrays['REF_forces']",
        "atoms.info.get('config_forces_weight', 1.0)",
        "atoms.info['config_weight']",
    ],
)
def test_what_counts_as_an_opinion(line):
    assert opinions(line)
    assert not opinions(f'"""{line}"""') and not opinions("batch.positions; outputs['forces']; frame.counted_forces")
