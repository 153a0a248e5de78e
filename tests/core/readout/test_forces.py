"""Forces of energies against single backward passes and differences."""

import pytest
import torch

from e2ip_plugins.readout.forces import forces_of

F64 = torch.float64


def energies_of(positions):
    """Atoms' shares of four smooth energies."""
    distance = (positions.unsqueeze(0) - positions.unsqueeze(1)).square().sum(-1)
    density = torch.exp(-distance.unsqueeze(-1) * torch.tensor([0.3, 0.5, 0.9], dtype=F64)).sum(1)
    weights = torch.linspace(-1.0, 1.0, 12, dtype=F64).reshape(3, 4)
    return torch.tanh(density) @ weights


@pytest.fixture
def positions():
    return torch.randn(5, 3, dtype=F64, generator=torch.Generator().manual_seed(0)).requires_grad_()


@pytest.mark.parametrize("create_graph", [False, True])
def test_forces_are_those_of_single_backward_passes(positions, create_graph):
    energies = energies_of(positions)
    forces = forces_of(energies, positions, create_graph)
    assert forces.shape == (5, 12) and forces.requires_grad == create_graph
    for k in range(4):
        (gradient,) = torch.autograd.grad(energies[:, k].sum(), positions, retain_graph=True)
        assert torch.equal(forces[:, 3 * k : 3 * k + 3], -gradient)
    # Not freed: the host's forces come from the same graph.
    energies.sum().backward()


def test_forces_are_differences_of_energies(positions):
    forces, step = forces_of(energies_of(positions), positions, False), 1e-5
    for atom, axis in ((0, 0), (3, 1), (4, 2)):
        moved = [positions.detach().clone() for _ in range(2)]
        moved[0][atom, axis] += step
        moved[1][atom, axis] -= step
        up, down = (energies_of(x).sum(0) for x in moved)
        torch.testing.assert_close(forces[atom, axis::3], (down - up) / (2 * step), rtol=1e-8, atol=1e-9)


def test_scripted(positions):
    energies = energies_of(positions)
    scripted = torch.jit.script(forces_of)(energies, positions, False)
    assert torch.equal(scripted, forces_of(energies, positions, False))
