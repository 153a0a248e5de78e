"""A calculator with uncertainties that are as large as they are told to be, and held-out frames."""

import ase.io
import numpy as np
import pytest
from ase import Atoms
from ase.calculators.calculator import Calculator, all_changes


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


class Uncertain(Calculator):
    """Family ``e2ip``; ``forces_epistemic_std`` of the last atom is one of ``stds`` after another, of others 0.01 eV/Å.

    The leverage is 100 times as large. Forces are those of a spring (eV/Å²) to the centre.
    """

    def __init__(self, stds=(0.01,), uncertain=True, fitted=True, spring=0.0, extra=None):
        super().__init__()
        self.stds, self.spring, self.extra = list(stds), spring, extra or {}
        self.uncertain, self.fitted, self.evaluations = uncertain, fitted, 0
        self.implemented_properties = ["energy", "free_energy", "forces", "forces_cov", "e2ip_leverage"]

    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes):
        super().calculate(atoms, properties, system_changes)
        # The first evaluation is that of the monitor before the run, which the run's first step shares.
        std = np.full(len(atoms), 0.01)
        std[-1] = self.stds[min(self.evaluations, len(self.stds) - 1)]
        self.evaluations += 1
        away = atoms.positions - atoms.positions.mean(0)
        energy = 1.0 + 0.5 * self.spring * np.square(away).sum()
        self.results = {"energy": energy, "free_energy": energy, "forces": -self.spring * away, "stress": np.zeros(6)}
        if self.uncertain:
            self.results.update(outputs(std, self.fitted))
        self.results.update(self.extra)


def outputs(std, fitted=True):
    """What a model of family ``e2ip`` puts out whose covariances are isotropic; ν = 8, κ = 1."""
    import torch

    from e2ip_plugins import families

    family = families.get("e2ip")
    log_sigma0 = np.zeros((len(std), 6))
    # forces_epistemic_cov = ν/(ν-4)/κ Σ0 = 2 Σ0
    log_sigma0[:, :3] = np.log(std**2 / 2.0)[:, None]
    parameters = {"e2ip_log_sigma0": log_sigma0, "e2ip_nu": np.full(len(std), 8.0), "e2ip_kappa": np.ones(len(std))}
    tensors = {name: torch.as_tensor(values, dtype=torch.float64) for name, values in parameters.items()}
    views = {name: values.numpy() for name, values in family.derive(tensors).items()}
    leverage = 100.0 * std if fitted else np.full(len(std), -1.0)
    return {**parameters, **views, "e2ip_leverage": leverage, "uq_family": "niw"}


@pytest.fixture
def make_atoms():
    """Function that makes CO₂H with an `Uncertain` calculator and momenta, so that dynamics moves it."""

    def make(*stds, **settings):
        atoms = Atoms("CO2H", [[0, 0, 0], [1.2, 0, 0], [-1.2, 0, 0], [0, 1.1, 0]])
        atoms.set_momenta(np.full((4, 3), 0.1))
        atoms.calc = Uncertain(stds or (0.01,), **settings)
        return atoms

    return make


@pytest.fixture
def held_out(tmp_path, make_atoms):
    """Path of predictions for 40 frames with a largest ``forces_epistemic_std`` of 0.001, 0.002, … 0.04 (of H)."""
    frames = []
    rng = np.random.default_rng(0)
    for i in range(40):
        atoms = make_atoms()
        atoms.positions += rng.normal(scale=0.1, size=(4, 3))
        std = np.full(4, 0.0005)
        std[-1] = 0.001 * (i + 1)
        found = outputs(std)
        frame = Atoms(atoms.symbols, atoms.positions, info={"MACE_uq_family": found.pop("uq_family")})
        for name, values in found.items():
            frame.arrays[f"MACE_{name}"] = values.reshape(4, -1) if values.ndim > 1 else values
        frame.arrays["MACE_forces"] = np.zeros((4, 3))
        frame.arrays["REF_forces"] = rng.normal(scale=2.0 * std[:, None], size=(4, 3))
        frames.append(frame)
    path = tmp_path / "valid.xyz"
    ase.io.write(path, frames, format="extxyz")
    return path


@pytest.fixture
def calibrated(held_out):
    """Function that runs ``e2ip calibrate`` on them; returns the path of the calibration."""
    from typer.testing import CliRunner

    from e2ip_plugins.cli import app

    def calibrate(*methods):
        path = held_out.with_suffix(".json")
        options = [word for method in methods for word in ("--method", method)]
        result = CliRunner().invoke(app, ["calibrate", str(held_out), *options, "--output", str(path)])
        assert result.exit_code == 0, result.output
        return path

    return calibrate
