"""Reference data outside the repository, for both hosts' tests."""

import importlib.util
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from frozen_files import check_predicted, check_saved, unpack, unpack_all  # noqa: F401
from lammps_fixtures import by_id, check_observer, follow_ase, start_lammps  # noqa: F401
from model_fixtures import (  # noqa: F401
    check_calibrated,
    check_continuation,
    check_features,
    check_gradient,
    check_labels_of_fits,
    check_refused_calibrations,
    check_written,
    energy_slope,
    write_calibration,
)

# Before torch is imported: threads cost more than they bring on molecules of three atoms, and the last bits of sums
# depend on their number, which is one in the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def reference_frames(tmp_path):
    """Function that writes the first ``count`` frames of a reference data file, verbatim, to a file of its own.

    The folder of the data is named by the environment variable E2IP_DATA; the test is skipped without it.
    """
    root = os.environ.get("E2IP_DATA")

    def take(name: str, count: int) -> Path:
        if root is None:
            pytest.skip("E2IP_DATA is not set: it names the folder of reference DFT frames")
        source = Path(root) / name
        if not source.exists():
            pytest.skip(f"{source} is missing")
        lines = source.read_text().splitlines(keepends=True)
        end = 0
        for _ in range(count):
            end += int(lines[end]) + 2
        target = tmp_path / source.name
        target.write_text("".join(lines[:end]))
        return target

    return take


@pytest.fixture(scope="session")
def run_tool():
    """Function that runs a command of this environment, asserts that it went well, and gives what it printed."""

    from forked_commands import run_command

    def run(name, *arguments, **options):
        done = run_command([Path(sys.executable).parent / name, *arguments], **options)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout + done.stderr

    return run


#: As every command does in a process of its own.
ONE_AFTER_ANOTHER = """
import runpy, sys
from pathlib import Path
for command in eval(sys.argv[1]):
    sys.argv = [str(Path(sys.executable).parent / command[0]), *command[1:]]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        assert not end.code, (command, end.code)
"""


@pytest.fixture(scope="session")
def run_one_after_another(run_tool):
    """Function that runs commands in one process, which imports but once; gives what they printed."""

    def run(commands, **options):
        return run_tool(
            Path(sys.executable).name, "-c", ONE_AFTER_ANOTHER, repr([list(map(str, c)) for c in commands]), **options
        )

    return run


@pytest.fixture(scope="session")
def load_script():
    """Function that returns a script as a module: its path, from the root of the repository."""

    def load(path):
        script = Path(__file__).parents[1] / path
        spec = importlib.util.spec_from_file_location(script.stem, script)
        module = importlib.util.module_from_spec(spec)
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(script.parent)  # as for a script that is run
            spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def energy_checks(load_script):
    """What holds of energies' error bars in both hosts."""
    return load_script("tests/energy_checks.py")


@pytest.fixture(scope="session")
def request_checks(load_script):
    """What holds in both hosts of uncertainties on request."""
    return load_script("tests/request_checks.py")


WITHOUT_PLUGIN = """
import importlib.metadata, sys

OURS = ("e2ip_plugins", "nequip_ext", "mace_ext")
entry_points = importlib.metadata.entry_points

def without_ours(**chosen):
    found = entry_points(**chosen)
    return [entry for entry in found if not entry.value.startswith(OURS)] if chosen else found

importlib.metadata.entry_points = without_ours

class Hide:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in OURS else self.finder.find_spec(name, path, target)

for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
    del sys.modules[name]
sys.meta_path[:] = [Hide(f) for f in sys.meta_path if not type(f).__module__.startswith(OURS)]
"""

LEFT_OUT = """
assert not [name for name in sys.modules if name.split(".")[0] in OURS], "the plugin is here"
"""


@pytest.fixture(scope="session")
def without_plugin():
    """Function that runs code with arguments in a Python of its own as if this plugin had not been installed: no module
    of it can be imported, its entry points are not there, and MACE is not patched. Returns the finished process."""

    def run(code: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
        script = f"{WITHOUT_PLUGIN}\n{textwrap.dedent(code)}\n{LEFT_OUT}"
        command = [sys.executable, "-c", script, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})

    return run


TOY_FAMILY = Path(__file__).parent / "families" / "isotropic.py"


#: What else a new family takes, in ``e2ip_plugins/families/__init__.py``.
LISTED = """
from e2ip_plugins.families.isotropic import Isotropic
FAMILIES = (*FAMILIES, Isotropic)
"""


@pytest.fixture
def toy_family(monkeypatch):
    """The family of tests/families/isotropic.py, as if it lay in ``e2ip_plugins/families``; in this process."""
    from e2ip_plugins import families

    monkeypatch.setattr(families, "__path__", [*families.__path__, str(TOY_FAMILY.parent)])
    monkeypatch.setattr(families, "FAMILIES", families.FAMILIES)
    exec(LISTED, vars(families))
    yield families.get("isotropic")
    sys.modules.pop("e2ip_plugins.families.isotropic", None)


@pytest.fixture(scope="session")
def toy_family_environment(tmp_path_factory):
    """Environment variables for commands: a copy of the core with that family added comes first on PYTHONPATH."""
    import e2ip_plugins

    root = tmp_path_factory.mktemp("with_toy_family")
    installed = Path(e2ip_plugins.__file__).parent
    shutil.copytree(installed, root / "e2ip_plugins", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(TOY_FAMILY, root / "e2ip_plugins" / "families")
    with (root / "e2ip_plugins" / "families" / "__init__.py").open("a") as file:
        file.write(LISTED)
    return {**os.environ, "PYTHONPATH": str(root)}


@pytest.fixture(scope="module")
def source(tmp_path_factory, frames):
    """Off-symmetry frames of different sizes, one of them periodic, and two atoms without neighbours."""
    import ase.io

    path = tmp_path_factory.mktemp("frames") / "in.xyz"
    ase.io.write(path, [*frames, ase.Atoms("O"), ase.Atoms("H", cell=[9, 9, 9], pbc=True)], format="extxyz")
    return path
