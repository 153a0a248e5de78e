"""Reference data outside the repository, for both hosts' tests."""

import os
import shutil
import sys
from pathlib import Path

import pytest


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


TOY_FAMILY = Path(__file__).parent / "families" / "isotropic.py"


@pytest.fixture
def toy_family(monkeypatch, tmp_path):
    """The family of tests/families/isotropic.py, as if it lay in ``e2ip_plugins/families``; in this process."""
    from e2ip_plugins import families

    shutil.copy(TOY_FAMILY, tmp_path)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    families.table.cache_clear()
    yield families.get("isotropic")
    families.table.cache_clear()
    sys.modules.pop("e2ip_plugins.families.isotropic", None)


@pytest.fixture(scope="session")
def toy_family_environment(tmp_path_factory):
    """Environment variables for commands: a copy of the core with that one file added comes first on PYTHONPATH."""
    import e2ip_plugins

    root = tmp_path_factory.mktemp("with_toy_family")
    installed = Path(e2ip_plugins.__file__).parent
    shutil.copytree(installed, root / "e2ip_plugins", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(TOY_FAMILY, root / "e2ip_plugins" / "families")
    return {**os.environ, "PYTHONPATH": str(root)}


@pytest.fixture(scope="session")
def energy_slope():
    """Function that gives the derivative of the energy in eV/Å as atoms move along ``direction`` (N, 3), by finite
    differences of fourth order."""

    def slope(atoms, direction):
        energies = {}
        for step in (-2, -1, 1, 2):
            moved = atoms.copy()
            moved.positions += 1e-4 * step * direction
            moved.calc = atoms.calc
            energies[step] = moved.get_potential_energy()
        return (8 * (energies[1] - energies[-1]) - (energies[2] - energies[-2])) / 12e-4

    return slope
