"""AlphaNet: numbers of its tables, and what its equations say beyond symmetry."""

import math

import pytest
import torch
from ase import Atoms

from nequip_ext import AlphaNetModel
from nequip_ext.model.backbones import alphanet
from nequip_ext.model.backbones.frames import edge_frames

NAME = "nequip_ext.AlphaNetModel"


def test_radial_functions(build, to_data):
    data = to_data(Atoms("CO", [[0, 0, 0], [0, 0, 2.5]]))
    model = build(NAME, r_max=5.0, num_radial=3)
    with torch.no_grad():
        model.model.func.radial.bessel_weights.copy_(torch.tensor([[1.0, 2.0, 3.0]]))
    expected = 0.85546875 * torch.tensor([[0.16, 0.0, -0.16]]).expand(2, 3)
    assert torch.allclose(model(dict(data))["edge_embedding"], expected, atol=1e-15)
    radial = build(NAME, "paper", r_max=5.0, num_radial=64).model.func.radial
    assert radial.beta == pytest.approx(1037.94, abs=5e-3)
    assert radial.centres[[0, -1]].tolist() == pytest.approx([math.exp(-5.0), 1.0])
    value = build(NAME, "paper", r_max=5.0, num_radial=64)(dict(data))["edge_embedding"][0, 7].item()
    assert value == pytest.approx(0.5 * math.exp(-1037.94 * (math.exp(-2.5) - radial.centres[7].item()) ** 2), rel=1e-4)


def test_angles_count_from_the_start(default_dtype, to_data):
    """What an untrained network makes of the angle between two neighbours that do not see each other."""
    options = {"seed": 1, "model_dtype": "float64", "r_max": 4.0, "avg_num_neighbors": 8.0}
    model = AlphaNetModel(type_names=["H", "C", "O"], **options)

    def energy(length, angle):
        second = [3.0 * math.cos(angle), 3.0 * math.sin(angle), 0.0]
        atoms = Atoms("CHH", [[0.0, 0.0, 0.0], [length, 0.0, 0.0], second])
        return float(model(to_data(atoms))["total_energy"].detach())

    bent = energy(3.0, math.pi / 2.0)
    # From the published initial values it is 4e-5.
    assert abs(bent - energy(3.0, math.pi)) > 4e-3 * abs(bent - energy(2.8, math.pi / 2.0))


def test_frames():
    """Of the origin's edge to (1, 0, 0), beside a neighbour at (0, 1, 0); and of collinear ones."""
    edge, mean = torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[0.5, 0.5, 0.0]])
    expected = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.5], [0.0, -0.5, 0.0]])
    assert torch.equal(edge_frames(edge, mean)[0], expected)
    three = edge_frames(edge.expand(3, 3), mean.expand(3, 3))
    assert torch.equal(three, expected.expand(3, 3, 3))
    assert torch.equal(edge_frames(edge, 0.3 * edge)[0, 1:], torch.zeros(2, 3))


def test_two_numbers_an_edge_are_the_full_contraction(build):
    phases = build(NAME).model.func.layer0_message.sum.phases
    generator = torch.Generator().manual_seed(0)
    messages = torch.randn(5, 16, generator=generator, dtype=torch.float64)
    filters = torch.randn(5, 48, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        kernel = torch.complex(*phases.kernel) / math.sqrt(16 // 16)
        q = torch.complex(*phases.into(messages).chunk(2, dim=1)).reshape(5, 16, 1)
        c = kernel[0].sum(0) + torch.einsum("egl,glk->ek", q, kernel[1:])
        gates = torch.nn.functional.silu(phases.gates(filters))
        weighed = phases.weigh(gates.unsqueeze(2) * phases.delta + 1.0)
        g = torch.einsum("ek,ekp->ep", c, weighed.to(c.dtype))
        w = torch.complex(phases.out(g.real), phases.out(g.imag))
        got = phases.contract(messages, filters)
    assert torch.allclose(got[:, 0], w.real, rtol=1e-12) and torch.allclose(got[:, 1], w.imag, rtol=1e-12)


def test_state_is_a_complex_product(build):
    state = build(NAME).model.func.layer0_mixing.state
    scalars, before = torch.randn(3, 16, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    with torch.no_grad():
        kernel = torch.complex(state.kernel[:, 0], state.kernel[:, 1])
        psi = torch.complex(before[:, :4], before[:, 4:])
        psi = torch.einsum("hkl,nh,nl->nk", kernel, scalars.to(kernel.dtype), psi) / math.sqrt(16 * 4)
        psi = psi / (psi.abs().square() + 0.01).sqrt()
        assert torch.allclose(state(scalars, before), torch.cat([psi.real, psi.imag], dim=1), rtol=1e-12)


def test_what_its_parts_do(build, frames, to_data):
    model, data = build(NAME), to_data(frames[1])
    func = model.model.func

    def energy():
        return float(model(dict(data))["total_energy"].detach())

    expected = energy()
    angles, states = func.layer0_message.angles, func.per_atom_energy_readout.energies.of_state
    angles.requires_grad_(False).weight.zero_()
    angles.bias.zero_()
    unturned = energy()
    assert abs(unturned - expected) > 1e-6 * abs(expected)
    func.layer0_message.angles = None
    assert energy() == pytest.approx(unturned, rel=1e-13), "angles of 0 turn nothing"
    states.requires_grad_(False).weight.zero_()
    without_state = energy()
    func.embedding.states.data.mul_(-3.0)
    func.layer1_mixing.state.kernel.data.mul_(-0.5)
    assert energy() == pytest.approx(without_state, rel=1e-13)


def test_angles_between_bonds_come_through_the_frames(build, to_data, monkeypatch):
    """Without t the first layer's scalars know distances alone: bent and straight molecules have the same."""
    model = build(NAME, num_layers=1)
    seen = []
    monkeypatch.setattr(type(model.model.func.layer0_mixing), "forward", lambda self, data: seen.append(data) or data)
    chains = [Atoms("HCO", [[1.0, 0, 0], [0, 0, 0], [1.1 * math.cos(a), 1.1 * math.sin(a), 0]]) for a in (2.0, 3.0)]

    def scalars():
        seen.clear()
        for atoms in chains:
            data = to_data(atoms)
            # The two ends are no neighbours.
            ends = (data["edge_index"].sum(0) == 2) & (data["edge_index"] != 1).all(0)
            kept = {"edge_index": data["edge_index"][:, ~ends], "edge_cell_shift": data["edge_cell_shift"][~ends]}
            model.model.func({**data, **kept})
        return [data["node_features"][1, :16].detach() for data in seen]

    bent, straight = scalars()
    assert (bent - straight).abs().max() > 1e-6
    monkeypatch.setattr(alphanet.Scalarisation, "forward", lambda self, frames, q: torch.zeros_like(q[:, 0]))
    bent, straight = scalars()
    assert torch.allclose(bent, straight, atol=1e-13)


def test_the_published_norm_would_break_rotations(build, frames, to_data, monkeypatch):
    """Power of the test of symmetry: a copy with Σ|V| over x, y, z fails it, and passes under inversion."""
    model, data = build(NAME, "paper"), to_data(frames[1])
    monkeypatch.setattr(alphanet, "invariants", lambda vectors: vectors.abs().sum(1))
    move = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    energies = []
    for turn in (torch.eye(3), -torch.eye(3), move):
        turned = {**data, "pos": data["pos"] @ turn.T, "cell": data["cell"] @ turn.T}
        energies.append(float(model(turned)["total_energy"].detach()))
    assert energies[1] == pytest.approx(energies[0], rel=1e-12)
    assert abs(energies[2] - energies[0]) > 1e-6 * abs(energies[0])
