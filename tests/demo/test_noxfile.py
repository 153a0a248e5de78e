"""The two README commands: what can be checked of them without a network."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

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


def sessions_of(text):
    return set(re.findall(r"noxfile\.py (?:-R )?-s \"?(\w+)", text))


def test_sessions_of_the_documents_exist():
    """Every session that a document, the CI or a hook names is a function of the noxfile."""
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    functions = {n.name for n in tree.body if isinstance(n, ast.FunctionDef) and n.decorator_list}
    hosted = (".github/workflows/ci.yml", ".readthedocs.yaml")
    for name in ("README.md", "CONTRIBUTING.md", "demo/README.md", ".ci/run", ".pre-commit-config.yaml", *hosted):
        named = sessions_of((ROOT / name).read_text(encoding="utf-8"))
        assert named and named <= functions, name


def test_the_ci_runs_the_command_of_the_readme():
    assert sessions_of((ROOT / ".ci" / "run").read_text(encoding="utf-8")) == {"tests"}


def test_a_code_host_runs_the_ci_and_builds_the_site():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    assert [step["run"] for step in workflow["jobs"]["tests"]["steps"] if "run" in step] == [".ci/run"]
    nightly = yaml.safe_load((ROOT / ".github" / "workflows" / "nightly.yml").read_text(encoding="utf-8"))
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    for arguments in nightly["jobs"]["nightly"]["strategy"]["matrix"]["arguments"]:
        assert arguments.split()[1] in [n.name for n in tree.body if isinstance(n, ast.FunctionDef)]
    site = yaml.safe_load((ROOT / ".readthedocs.yaml").read_text(encoding="utf-8"))
    assert site["version"] == 2 and "docs" in sessions_of(site["build"]["commands"][0])


def test_every_dependency_has_a_lower_bound():
    """The session `oldest` installs these bounds."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (dependencies,) = re.findall(r"^dependencies = \[$(.+?)^\]$", text, re.M | re.S)
    (extras,) = re.findall(r"^\[project.optional-dependencies\]$(.+?)^\[", text, re.M | re.S)
    hosts = re.findall(r"^(?:nequip|mace) = \[\"(.+?)\"", extras, re.M)
    requirements = [*re.findall(r'^  "(.+?)"', dependencies, re.M), *hosts]
    assert len(hosts) == 2 and "torch>=2.6" in requirements
    assert all(">=" in requirement for requirement in requirements)


def test_tools_of_the_checks_are_pinned_once():
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M)
    assert {"ruff", "import-linter", "mypy"} <= set(pinned)
    for name in (".pre-commit-config.yaml", "pyproject.toml"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert not [tool for tool in pinned if re.search(rf"(?<![\w-]){tool}==", text)], name


def test_no_registry_is_named():
    """Where packages come from is the machine's affair."""
    for name in ("noxfile.py", "constraints.txt", "pyproject.toml", ".pre-commit-config.yaml", ".ci/run"):
        text = (ROOT / name).read_text(encoding="utf-8")
        # The address of the project itself is no registry.
        text = re.sub(r'^address = ".+"$', "", text, flags=re.M)
        assert "://" not in text.replace("https://github.com/", ""), name
        assert "index-url" not in text, name


def test_releases_are_the_same_everywhere():
    """Those of the session `matrix`, of both contracts, of the extras and of the table."""
    from mace_ext import seams
    from nequip_ext import contract

    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    releases = next(
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "RELEASES"
    )
    tried = ast.literal_eval(releases)
    assert tried == {"mace": seams.TESTED, "nequip": contract.TESTED}
    page = (ROOT / "docs" / "reference" / "releases.md").read_text(encoding="utf-8")
    extras = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for name, written, of_host in (("mace-torch", "mace-torch", "mace"), ("nequip", "NequIP", "nequip")):
        assert f'"{name}>={tried[of_host][0]}"' in extras
        assert set(tried[of_host]) <= set(re.findall(rf"^\| {written} ([\d.]+) \|", page, re.M))
