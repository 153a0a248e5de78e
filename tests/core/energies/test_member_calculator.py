"""A member as a calculator: energies as `members` gives them, forces that are their slopes, averages as reweighted."""

import numpy as np
import pytest
import torch
from ase import Atoms, units
from ase.calculators.calculator import Calculator, all_changes

from e2ip_plugins.energies import MemberCalculator, random_directions, reweight
from e2ip_plugins.errors import InputError

K, M = 1.0, 3


class Spring(Calculator):
    """One atom on a spring of 1 eV/Å², whose error vector is (a x, a y, b x²)."""

    implemented_properties = ["energy", "forces", "energy_error_vector"]  # noqa: RUF012, as in ASE

    def __init__(self, a=0.02, b=0.03, with_vector=True):
        super().__init__()
        self.a, self.b, self.with_vector = a, b, with_vector

    def vector(self, x):
        return torch.stack([self.a * x[0, 0], self.a * x[0, 1], self.b * x[0, 0] ** 2]).unsqueeze(0)

    def calculate(self, atoms=None, properties=None, system_changes=all_changes):
        super().calculate(atoms, properties, system_changes)
        x = self.atoms.positions
        self.results = {"energy": 0.5 * K * float((x**2).sum()), "forces": -K * x}
        if self.with_vector:
            self.results["energy_error_vector"] = self.vector(torch.tensor(x)).numpy()[0]

    def uncertainty_gradient(self, atoms, uncertainty):
        x = torch.tensor(atoms.positions, requires_grad=True)
        value = uncertainty({"energy_error_vector": self.vector(x)})
        (gradient,) = torch.autograd.grad(value.sum(), x)
        return value.detach().numpy(), gradient.numpy()


def at(position, calculator):
    atoms = Atoms("H", [position])
    atoms.calc = calculator
    return atoms


@pytest.mark.parametrize("member", [0, 4])
def test_energy_is_that_of_the_member_and_forces_are_its_slope(member):
    calculator = MemberCalculator(Spring(), member)
    atoms = at([0.3, -0.2, 0.5], calculator)
    r = random_directions(5, M)[member]
    vector = Spring().vector(torch.tensor(atoms.positions)).numpy()[0]
    assert atoms.get_potential_energy() == pytest.approx(0.5 * 0.38 + vector @ r, rel=1e-12)
    forces, step = atoms.get_forces(), 1e-5
    for axis in range(3):
        shift = step * np.eye(3)[axis]
        up, down = (at(atoms.positions[0] + sign * shift, calculator).get_potential_energy() for sign in (1, -1))
        assert forces[0, axis] == pytest.approx((down - up) / (2 * step), abs=1e-8)


def test_reweighted_average_agrees_with_one_sampled_from_the_member():
    """Both of the mean of x, whose exact value the member's harmonic energy gives."""
    temperature, rng = 300.0, np.random.default_rng(0)
    kT = units.kB * temperature
    x = np.sqrt(kT / K) * rng.standard_normal((200_000, 3))
    directions = random_directions(4, M)
    vectors = np.stack([0.02 * x[:, 0], 0.02 * x[:, 1], 0.03 * x[:, 0] ** 2], 1)
    energies = 0.5 * K * (x**2).sum(1)
    result = reweight(x[:, 0], energies[:, None] + vectors @ directions.T, energies, temperature)
    for k, (linear, _, square) in enumerate(directions):
        # E = K x²/2 + 0.02 r₁ x + 0.03 r₃ x²
        exact = -0.02 * linear / (K + 2 * 0.03 * square)
        assert result.direct.members[k] == pytest.approx(exact, abs=3e-3)
        samples = exact + np.sqrt(kT / (K + 2 * 0.03 * square)) * rng.standard_normal(200_000)
        assert samples.mean() == pytest.approx(result.direct.members[k], abs=3e-3)


def test_models_without_error_bars_are_refused():
    with pytest.raises(InputError, match="no error bars of energies"):
        at([0.1, 0.0, 0.0], MemberCalculator(Spring(with_vector=False), 0)).get_potential_energy()
    with pytest.raises(InputError, match="from 0"):
        MemberCalculator(Spring(), -1)
