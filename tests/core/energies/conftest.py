"""Frames with error vectors, files of them, and ``e2ip`` run on these in a folder of its own."""

import ase
import ase.io
import numpy as np
import pytest
from typer.testing import CliRunner

from e2ip_plugins.cli import app

#: Names, formulas, energies in eV and error vectors of an adsorption.
ADSORPTION = (
    ("slab+CO", "Cu4CO", -20.5, (0.3, 0.2, 0.0)),
    ("slab", "Cu4", -8.0, (0.3, 0.0, 0.0)),
    ("CO", "CO", -11.75, (0.0, 0.2, 0.1)),
)


@pytest.fixture
def make_frame():
    """Function that gives a frame with a predicted energy and its error vector."""

    def make(energy, vector, formula="H2", uq_model="e2ip-1", prefix="", **info):
        symbols = ase.Atoms(formula).symbols
        atoms = ase.Atoms(symbols, np.arange(3.0 * len(symbols)).reshape(-1, 3), info=info)
        vector = np.asarray(vector, dtype=float)
        atoms.info |= {f"{prefix}energy": energy, f"{prefix}energy_error_vector": vector}
        atoms.info[f"{prefix}energy_uncertainty"] = float(np.linalg.norm(vector))
        if uq_model is not None:
            atoms.info[f"{prefix}uq_model"] = uq_model
        return atoms

    return make


@pytest.fixture
def adsorption(make_frame):
    """Three frames: a slab with CO, the slab, CO."""
    return [make_frame(energy, vector, formula, name=name) for name, formula, energy, vector in ADSORPTION]


@pytest.fixture
def random_frames(make_frame):
    """Function that gives frames of random energies and vectors of 64 numbers."""

    def make(count=6, seed=0, **options):
        rng = np.random.default_rng(seed)
        return [make_frame(rng.normal(-500.0, 1.0), 0.05 * rng.normal(size=64), **options) for _ in range(count)]

    return make


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Function that writes frames to a file in the working folder of the test, and gives its name."""
    monkeypatch.chdir(tmp_path)

    def written(name, frames):
        ase.io.write(name, frames, format="extxyz")
        return name

    return written


@pytest.fixture
def succeed(write):
    """Function that runs ``e2ip``, which must succeed."""

    def check(*arguments):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert result.exit_code == 0, result.output
        return result

    return check


@pytest.fixture
def refuse(write):
    """Function that runs ``e2ip``, which must end with one line of error, and gives the line."""

    def check(*arguments):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.output
        (line,) = result.stderr.splitlines()
        assert line.startswith("e2ip: error: ")
        return line

    return check
