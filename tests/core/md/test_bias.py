"""`BiasedCalculator` on a calculator whose uncertainty is known in closed form; with models: the tests of the hosts."""

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.calculators.calculator import CalculationFailed, Calculator, PropertyNotImplementedError, all_changes
from ase.calculators.mixing import SumCalculator
from ase.io.trajectory import Trajectory

from e2ip_plugins.md import BiasedCalculator, with_results


class Far(Calculator):
    """A spring to the origin; u is 0.3 eV/Å² times the distance from there, the leverage ten times the distance."""

    def __init__(self, leverage=True):
        super().__init__()
        self.leverage = leverage
        self.implemented_properties = ["energy", "free_energy", "forces", "stress", "energies", "forces_epistemic_std"]

    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes):
        super().calculate(atoms, properties, system_changes)
        energies = np.square(atoms.positions).sum(-1)
        self.results = {"energy": energies.sum(), "free_energy": energies.sum(), "energies": energies}
        self.results.update(
            {name: value.numpy() for name, value in self.outputs(torch.as_tensor(atoms.positions)).items()}
        )
        self.results.update(forces=-2.0 * atoms.positions, stress=np.ones(6), uq_family="niw")

    def outputs(self, positions):
        distance = positions.norm(dim=-1)
        leverage = 10.0 * distance if self.leverage else torch.full_like(distance, -1.0)
        return {"forces_epistemic_std": 0.3 * distance, "e2ip_leverage": leverage}

    def uncertainty_gradient(self, atoms, uncertainty):
        positions = torch.tensor(atoms.positions, requires_grad=True)
        value = uncertainty(self.outputs(positions))
        return value.detach().numpy(), torch.autograd.grad(value.sum(), positions)[0].numpy()


@pytest.fixture
def atoms():
    return Atoms("H3", np.random.default_rng(0).normal(size=(3, 3)))


def test_the_published_form(atoms):
    atoms.calc = BiasedCalculator(Far(), strength=2.0, width=0.4)
    energy, forces = atoms.get_potential_energy(), atoms.get_forces()
    mean = 0.09 * np.square(atoms.positions).sum() / 3
    share = np.exp(-mean / 0.16)
    results = atoms.calc.results
    assert results["energy_bias"] == pytest.approx(2.0 * (share - 1.0), rel=1e-12)
    assert energy == pytest.approx(results["energy_unbiased"] + results["energy_bias"], rel=1e-12)
    assert results["energy_unbiased"] == pytest.approx(np.square(atoms.positions).sum())
    np.testing.assert_array_equal(results["forces_unbiased"], -2.0 * atoms.positions)
    # Outwards, to where u is larger.
    np.testing.assert_allclose(forces, (-2.0 + 2.0 * share * 2.0 * 0.09 / 3 / 0.16) * atoms.positions, rtol=1e-12)
    assert atoms.get_potential_energy(force_consistent=True) == energy and results["uq_family"] == "niw"


@pytest.mark.parametrize("key, width", [("forces_epistemic_std", 0.4), ("e2ip_leverage", 12.0)])
@pytest.mark.parametrize("strength", [2.0, -1.0])
def test_forces_are_those_of_the_energy(atoms, key, width, strength):
    atoms.calc = BiasedCalculator(Far(), strength, width, key)
    forces = atoms.get_forces()
    for i, j in np.ndindex(3, 3):
        ends = []
        for sign in (1.0, -1.0):
            moved = atoms.copy()
            moved.positions[i, j] += sign * 1e-5
            moved.calc = atoms.calc
            ends.append(moved.get_potential_energy())
        assert forces[i, j] == pytest.approx(-(ends[0] - ends[1]) / 2e-5, rel=1e-6)


def test_a_sum_of_two_has_no_sum_of_uncertainties(atoms):
    one, two = BiasedCalculator(Far(), 1.0, 0.4), BiasedCalculator(Far(), 2.0, 0.4)
    assert one.get_property("forces_epistemic_std", atoms).shape == (3,)
    atoms.calc = SumCalculator([one, two])
    assert atoms.get_potential_energy() == pytest.approx(one.results["energy"] + two.results["energy"])
    assert "energy_bias" in atoms.calc.results
    assert not [name for name in atoms.calc.results if name.startswith(("forces_epistemic", "e2ip_"))]


def test_what_the_bias_has_no_part_of(atoms, tmp_path):
    atoms.calc = BiasedCalculator(Far(), 1.0, 0.4)
    with pytest.raises(
        PropertyNotImplementedError, match="has no stress: its bias has forces alone; run at constant vol"
    ):
        atoms.get_stress()
    atoms.get_forces()
    names = atoms.calc.implemented_properties
    assert not {"stress", "energies"} & {*atoms.calc.results, *names, *names.uncertainties}
    # Files keep what the uncertainties belong to.
    frame = with_results(atoms)
    assert frame.get_potential_energy() == atoms.calc.results["energy_unbiased"]
    assert frame.info["energy_bias"] == atoms.calc.results["energy_bias"] < 0.0
    with Trajectory(tmp_path / "run.traj", "w", atoms) as trajectory:
        trajectory.write()


def test_what_cannot_bias(atoms, refused):
    refused("Calculator has no uncertainty_gradient: take a MACECalculator", BiasedCalculator, Calculator(), 1.0, 0.1)
    for settings, message in (
        ((1.0, 0.0), "width=0"),
        ((1.0, -1.0), "width=-1"),
        ((1.0, float("nan")), "width=nan"),
        ((float("inf"), 1.0), "strength=inf"),
        (("0.1", 1.0), "strength='0.1'"),
        ((0.1, "1"), "width='1'"),
        ((1.0, 1.0, "forces_cov"), r"key='forces_cov': choose from forces_epistemic_std \(eV/Å\), e2ip_leverage"),
    ):
        refused(message, BiasedCalculator, Far(), *settings)
    atoms.calc = BiasedCalculator(Far(leverage=False), 1.0, 9.0, "e2ip_leverage")
    refused("leverage has not been fitted", atoms.get_forces)
    atoms.calc = BiasedCalculator(Far(), 1.0, 0.4)
    atoms.positions[0] = np.nan
    with pytest.raises(CalculationFailed, match="bias of forces_epistemic_std is not finite"):
        atoms.get_forces()
