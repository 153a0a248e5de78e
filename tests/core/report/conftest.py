"""Prediction files of a known distribution, and ``e2ip`` run on them in a folder of its own."""

import json
from pathlib import Path

import ase
import ase.io
import numpy as np
import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from e2ip_plugins.cli import app


@pytest.fixture
def rendered():
    """Figures are rendered, too."""


@pytest.fixture(autouse=True)
def quick_figures(request, monkeypatch):
    """All panels are drawn; for PNG and PDF they are rendered, in seconds, only where a test asks for `rendered`."""
    if "rendered" not in request.fixturenames:
        monkeypatch.setattr(Figure, "savefig", lambda _, path, **options: Path(path).touch())


@pytest.fixture
def make_frames():
    """Function that gives frames of nine atoms with Σ0 = (0.1 eV/Å)² I, ν = 8, κ = 2, and errors ``inflate`` times as
    large as that; structures and references go by ``seed``, errors by ``noise`` as well."""

    def make(noise=0, uncertain=True, inflate=1.0, count=20, seed=0):
        rng, errors = np.random.default_rng(seed), np.random.default_rng([seed, noise])
        frames = []
        for _ in range(count):
            atoms = ase.Atoms("CH2O3CH2", rng.normal(size=(9, 3)), info={"REF_energy": 10.0, "MACE_energy": 10.09})
            atoms.arrays["REF_forces"] = rng.normal(size=(9, 3))
            t = errors.normal(size=(9, 3)) / np.sqrt(errors.chisquare(6, (9, 1)) / 6)
            atoms.arrays["MACE_forces"] = atoms.arrays["REF_forces"] - inflate * 0.1 * np.sqrt(8 * 3 / (2 * 6)) * t
            if uncertain:
                atoms.arrays["MACE_e2ip_log_sigma0"] = np.tile([2 * np.log(0.1)] * 3 + [0.0] * 3, (9, 1))
                atoms.arrays["MACE_e2ip_nu"] = np.full(9, 8.0)
                atoms.arrays["MACE_e2ip_kappa"] = np.full(9, 2.0)
                atoms.info["MACE_uq_family"] = "niw"
            frames.append(atoms)
        return frames

    return make


@pytest.fixture
def with_energies(make_frames):
    """Function that gives frames whose energies err as their error vectors say, ``size`` times as much."""

    def make(noise=0, size=1.0, vectors=True, prefix="MACE_", **options):
        frames = make_frames(noise, **options)
        rng = np.random.default_rng([noise, options.get("seed", 0), 7])
        shared = np.random.default_rng(noise).normal(size=8)
        for atoms in frames:
            vector = 0.02 * rng.normal(size=8)
            atoms.info["REF_energy"] = 10.0
            atoms.info[f"{prefix}energy"] = 10.0 - size * float(vector @ shared)
            atoms.info[f"{prefix}energy_uncertainty"] = float(np.linalg.norm(vector))
            if vectors:
                atoms.info[f"{prefix}energy_error_vector"] = vector
        return frames

    return make


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Working folder of the test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def write(folder):
    """Function that writes frames to a file and gives its path."""

    def written(name, frames):
        ase.io.write(folder / name, frames, format="extxyz")
        return folder / name

    return written


@pytest.fixture
def change(write):
    """Function that applies a function to every frame of a file, and writes them to another one, or to the same."""

    def changed(name, function, target=None):
        frames = ase.io.read(name, ":")
        for atoms in frames:
            function(atoms)
        return write(target or name, frames)

    return changed


@pytest.fixture
def run(folder):
    """Function that runs ``e2ip`` and gives its result."""
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def succeed(run):
    """Function that runs ``e2ip``, which must succeed."""

    def check(*arguments):
        result = run(*arguments)
        assert result.exit_code == 0, result.output
        return result

    return check


@pytest.fixture
def refuse(run):
    """Function that runs ``e2ip``, which must end with one line of error, and gives the line."""

    def check(*arguments):
        result = run(*arguments)
        assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.output
        (line,) = result.stderr.splitlines()
        assert line.startswith("e2ip: error: ")
        return line

    return check


@pytest.fixture
def compared(succeed):
    """Function that runs ``e2ip compare`` and gives its result, its JSON and its Markdown."""

    def check(*arguments):
        done = succeed("compare", *arguments)
        return (
            done,
            json.loads(Path("e2ip_compare/compare.json").read_text()),
            Path("e2ip_compare/compare.md").read_text(),
        )

    return check
