"""Forces, stresses and weight gradients of both backbones against finite differences."""

import pytest
import torch


def energy_of(model, data, **changes):
    return model.model.func({**data, **changes})["total_energy"].sum()


def derivative(function, step=2e-5):
    """Of a function of one number at 0: central differences, extrapolated, since these networks' weights are large."""
    wide, narrow = ((function(h) - function(-h)).detach() / (2 * h) for h in (step, step / 2))
    return (4 * narrow - wide) / 3


def test_forces_and_stress(any_model, frames, to_data):
    """Central differences, forces of every component of one molecule, and the stress of a crystal."""
    molecule, crystal = to_data(frames[2]), to_data(frames[1])
    forces = any_model(dict(molecule))["forces"]
    found = torch.zeros_like(forces)
    for index in range(forces.numel()):
        shift = torch.zeros(forces.numel(), dtype=forces.dtype)
        shift[index] = 1.0

        def moved(h, shift=shift):
            return energy_of(any_model, molecule, pos=molecule["pos"] + h * shift.view(-1, 3))

        found.view(-1)[index] = -derivative(moved)
    assert (found - forces).abs().max() < 1e-8 * max(1.0, float(forces.abs().max()))
    assert forces.sum(0).abs().max() < 1e-11
    assert torch.linalg.cross(molecule["pos"], forces, dim=1).sum(0).abs().max() < 1e-11

    stress = any_model(dict(crystal))["stress"][0]
    volume = torch.linalg.det(crystal["cell"]).abs()
    for i, j in ((0, 0), (1, 2)):

        def strained(h, i=i, j=j):
            strain = torch.eye(3, dtype=torch.float64)
            strain[i, j] += h / 2
            strain[j, i] += h / 2
            return energy_of(any_model, crystal, pos=crystal["pos"] @ strain, cell=crystal["cell"] @ strain)

        assert abs(derivative(strained) / volume - stress[i, j]) < 1e-8 * max(1.0, float(stress.abs().max()))


def test_second_derivatives(kind, build, frames, to_data):
    if kind[1] == "paper":
        pytest.skip("the same operations")
    any_model, data = build(*kind), to_data(frames[2])
    positions = data["pos"].clone().requires_grad_(True)

    def energy(pos):
        return energy_of(any_model, data, pos=pos)

    assert torch.autograd.gradgradcheck(energy, positions, rtol=1e-4, atol=1e-6, fast_mode=True)


def test_frozen_weights_change_no_bit(any_model, frames, to_data):
    """What `forces: fixed` promises; torch has two ways to multiply, by who wants a gradient."""
    found = []
    for learns in (True, False):
        any_model.requires_grad_(learns)
        found.append([any_model(to_data(atoms)) for atoms in frames])
    for before, after in zip(*found, strict=True):
        assert torch.equal(before["total_energy"], after["total_energy"])
        assert torch.equal(before["forces"], after["forces"])


def test_weight_gradients_of_a_force_loss(any_model, frames, to_data):
    """A step along the gradient and a random one, against differences of the loss; every weight has a gradient."""
    data = to_data(frames[2])
    any_model.train()
    target = torch.randn(data["pos"].shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def loss():
        return (any_model(dict(data))["forces"] - target).square().mean()

    any_model(dict(data))["total_energy"].sum().backward()
    assert not [name for name, parameter in any_model.named_parameters() if parameter.grad is None]
    any_model.zero_grad()
    loss().backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in any_model.parameters()]
    generator = torch.Generator().manual_seed(3)
    noise = [torch.randn(g.shape, generator=generator, dtype=torch.float64).to(g.dtype) for g in gradients]
    length = sum(g.square().sum() for g in gradients).sqrt()
    for direction in ([g / length for g in gradients], noise):
        expected = sum((g * d).sum() for g, d in zip(gradients, direction, strict=True))
        values = []
        for sign in (1, -2, 1):
            with torch.no_grad():
                for parameter, d in zip(any_model.parameters(), direction, strict=True):
                    parameter.add_(sign * 1e-6 * d)
            values.append(loss().detach())
        assert (values[0] - values[1]) / 2e-6 == pytest.approx(float(expected), rel=2e-5)
