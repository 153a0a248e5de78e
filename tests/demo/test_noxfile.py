"""The two README commands: what can be checked of them without a network."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def clone(tmp_path):
    """A folder with the noxfile alone and a stand-in for the environment it would make."""
    (tmp_path / "noxfile.py").write_bytes((ROOT / "noxfile.py").read_bytes())
    return tmp_path


def test_noxfile_needs_the_standard_library_only():
    """Everything imported before nox is known to be there is in the standard library."""
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    imported = {a.name.split(".")[0] for n in tree.body if isinstance(n, ast.Import) for a in n.names}
    imported |= {n.module.split(".")[0] for n in tree.body if isinstance(n, ast.ImportFrom)}
    assert imported <= set(sys.stdlib_module_names)


@pytest.mark.skipif(os.name == "nt", reason="the stand-in is a shell script")
def test_noxfile_runs_its_own_nox(clone):
    """Without nox, arguments and exit status pass through the nox of .venv-nox."""
    python = clone / ".venv-nox" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\n[ "$1" = -c ] || echo "$@"\n[ "$1" = -c ] || exit 3\n')
    python.chmod(0o755)
    # -S: no site-packages, hence no nox.
    run = [sys.executable, "-S", clone / "noxfile.py", "-s", "lint", "--", "a b"]
    result = subprocess.run(run, capture_output=True, text=True)
    assert result.returncode == 3, result.stderr
    assert result.stdout.strip() == f"-m nox -f {clone / 'noxfile.py'} -s lint -- a b"


def test_sessions_of_the_readme_exist():
    text = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    functions = {n.name for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)}
    assert {"demo", "tests", "tests_nequip", "tests_mace", "lint", "make_data"} <= functions


def test_no_registry_is_named():
    """Where packages come from is the machine's affair."""
    for name in ("noxfile.py", "constraints.txt", "pyproject.toml", ".ci/run"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert "://" not in text.replace("https://github.com/", ""), name
        assert "index-url" not in text, name
