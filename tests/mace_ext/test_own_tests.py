"""MACE's own unit tests have the same outcomes with the plugin and without it.

The folder of these tests, of MACE's repository, is named by the environment variable E2IP_MACE_TESTS. Tests that
download models fail where there is no network, both times.
"""

import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import mace
import pytest

FOLDER = os.environ.get("E2IP_MACE_TESTS", "")
FILES = sorted(path.name for path in Path(FOLDER).glob("test_*.py")) if FOLDER else []

#: Tests of downloaded models and of GPU libraries.
LEFT_OUT = "not foundation and not cueq and not oeq"


def outcomes(folder: Path, name: str, disabled: str) -> dict:
    """Return what became of every test of a file, by its name."""
    report = folder / f"{name}-{disabled}.xml"
    command = [sys.executable, "-m", "pytest", f"tests/{name}", "-q", "-p", "no:cacheprovider", "-k", LEFT_OUT]
    environment = {**os.environ, "E2IP_DISABLE": disabled}
    done = subprocess.run(
        [*command, f"--junitxml={report}"], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert report.is_file(), done.stdout + done.stderr
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        results = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        found[f"{case.get('classname')}.{case.get('name')}"] = results[0] if results else "passed"
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("name", FILES or [""])
def test_outcomes_are_those_without_the_plugin(tmp_path, name):
    if not FILES:
        pytest.skip("E2IP_MACE_TESTS is not set, or has no tests: it names the folder `tests` of MACE's repository")
    shutil.copytree(FOLDER, tmp_path / "tests")
    # The tests start commands by their place beside this folder.
    (tmp_path / "mace").symlink_to(Path(mace.__file__).parent)
    without, found = (outcomes(tmp_path, name, disabled) for disabled in ("1", "0"))
    assert found == without
