"""`Monitor` and `BiasedCalculator` with NequIP; what they do in general is tested in tests/core/md."""

import ase.io
import numpy as np
import pytest
from ase import units
from ase.md.verlet import VelocityVerlet

from e2ip_plugins.errors import InputError
from e2ip_plugins.md import BiasedCalculator, Monitor, MonitorStop

STD = "forces_epistemic_std"


@pytest.fixture
def calculator(make_anisotropic, gnn_config, as_calculator):
    return as_calculator(make_anisotropic(gnn_config()))


@pytest.fixture
def atoms(frames, calculator):
    atoms = frames[2].copy()
    atoms.calc = calculator
    return atoms


def test_a_run_is_watched_and_stopped(atoms, tmp_path):
    largest = atoms.calc.get_property(STD, atoms).max()
    atoms.set_momenta(3.0 * np.random.default_rng(0).normal(size=(3, 3)))
    monitor = Monitor(atoms, {STD: 1.01 * largest}, action="stop", frames=tmp_path / "last.xyz")
    dynamics = VelocityVerlet(atoms, 0.5 * units.fs)
    dynamics.attach(monitor)
    with pytest.raises(MonitorStop, match="forces_epistemic_std of atom"):
        dynamics.run(200)
    last = ase.io.read(tmp_path / "last.xyz")
    results = atoms.calc.results
    np.testing.assert_allclose(last.arrays[STD], results[STD], atol=1e-7)
    np.testing.assert_allclose(last.arrays["forces_cov"], results["forces_cov"].reshape(3, 9), atol=1e-7)
    np.testing.assert_allclose(last.get_forces(), results["forces"], atol=1e-7)
    assert last.info["uq_family"] == "niw" and "e2ip_leverage" not in last.arrays


def test_lammps_follows_ase(frames, calculator, follow_ase):
    """In a periodic box without right angles, with pressure."""
    atoms = frames[1].copy()
    atoms.set_cell([[4.5, 0.0, 0.0], [1.2, 5.0, 0.0], [-0.8, 0.6, 5.5]])
    atoms.set_velocities(0.05 * np.random.default_rng(0).normal(size=(len(atoms), 3)))
    lmp = follow_ase(atoms, calculator, ["H", "C", "O"], [STD, "forces_cov", "e2ip_log_sigma0"], timestep=1.0)
    lmp.commands_string("compute virial all pressure NULL virial\nthermo_style custom c_virial[*]\nrun 0")
    found = [lmp.last_thermo()[f"c_virial[{i + 1}]"] for i in (0, 1, 2, 5, 4, 3)]
    np.testing.assert_allclose(found, -calculator.results["stress"] / (1e5 * units.Pascal), rtol=1e-6, atol=0.1)


def test_a_leverage_that_was_not_fitted(atoms):
    with pytest.raises(InputError, match="leverage has not been fitted"):
        Monitor(atoms, {"e2ip_leverage": 10.0})
    atoms.calc = BiasedCalculator(atoms.calc, 1.0, 10.0, "e2ip_leverage")
    with pytest.raises(InputError, match="leverage has not been fitted"):
        atoms.get_forces()


def test_biased_forces_are_those_of_the_biased_energy(atoms, energy_slope):
    std = atoms.calc.get_property(STD, atoms)
    atoms.calc = BiasedCalculator(atoms.calc, 5.0, float(np.sqrt(np.mean(std**2))))
    forces = atoms.get_forces()
    assert np.abs(forces - atoms.calc.results["forces_unbiased"]).max() > 1e-3
    direction = np.random.default_rng(1).normal(size=(3, 3))
    assert (forces * direction).sum() == pytest.approx(-energy_slope(atoms, direction), rel=1e-6)


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_an_observer_agrees_with_the_periodic_calculation(leverage_run, check_observer, processes):
    """In float32."""
    printed = check_observer("nequip", leverage_run / "best.ckpt", processes, tolerance=1e-4)
    # Two layers and the leverage of neighbours, of 3 Å each.
    assert printed["reach"] == pytest.approx(9.0)


@pytest.mark.nightly
def test_a_driver_on_several_processes_agrees_with_the_periodic_calculation(leverage_run, check_observer):
    check_observer("nequip", leverage_run / "best.ckpt", 2, "driver", 10.0, tilted=True, tolerance=1e-4)
