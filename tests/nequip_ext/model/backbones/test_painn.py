"""PaiNN: numbers of its tables, and what its equations say beyond symmetry."""

import pytest
import torch
from ase import Atoms

from nequip_ext.model.backbones.geometry import CosineCutoff
from nequip_ext.model.backbones.layers import Mixing

NAME = "nequip_ext.PaiNNModel"


@pytest.mark.parametrize(("preset", "envelope"), [("default", 0.85546875), ("paper", 0.5)])
def test_radial_functions(build, to_data, preset, envelope):
    model = build(NAME, preset, r_max=5.0, num_radial=3)
    output = model(to_data(Atoms("CO", [[0, 0, 0], [0, 0, 2.5]])))
    assert output["edge_cutoff"].tolist() == [[pytest.approx(envelope)]] * 2
    # sin(nπ/2) / 2.5 Å
    expected = envelope * torch.tensor([[0.4, 0.0, -0.4]]).expand(2, 3)
    assert torch.allclose(output["edge_embedding"], expected, atol=1e-15)
    assert torch.equal(output["edge_attrs"].abs(), torch.tensor([[0.0, 0.0, 1.0]]).expand(2, 3).double())


def test_envelope_without_a_tail():
    x = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0])
    assert torch.allclose(CosineCutoff()(x), torch.tensor([1.0, 0.5, 0.0, 0.0, 0.0]))


def test_sign_of_the_directions_is_free(build, frames, to_data, monkeypatch):
    """Vectors appear in pairs."""
    model, data = build(NAME), to_data(frames[1])
    expected = model(dict(data))
    forward = type(model.model.func.directions).forward

    def reversed_(self, data):
        data = forward(self, data)
        data["edge_attrs"] = -data["edge_attrs"]
        return data

    monkeypatch.setattr(type(model.model.func.directions), "forward", reversed_)
    got = model(dict(data))
    assert torch.allclose(got["total_energy"], expected["total_energy"], rtol=1e-13)
    channels = 8
    assert torch.allclose(got["node_features"][:, channels:], -expected["node_features"][:, channels:], atol=1e-12)


def test_a_bias_on_vectors_would_break_rotations(build, frames, to_data, monkeypatch):
    """Power of the test of symmetry: a copy with the biased matrices of another published form fails it."""
    model, data = build(NAME), to_data(frames[1])
    forward = Mixing.forward

    def biased(self, vectors):
        left, right = forward(self, vectors)
        return left + 0.1, right + 0.1

    monkeypatch.setattr(Mixing, "forward", biased)
    move = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    turned = {**data, "pos": data["pos"] @ move.T, "cell": data["cell"] @ move.T}
    energies = [float(model(dict(d))["total_energy"].detach()) for d in (data, turned)]
    assert abs(energies[0] - energies[1]) > 1e-4 * abs(energies[0])


def test_layers_differ_by_their_directions(build, frames, to_data):
    """Without m_r there are no vectors, and the energy is another."""
    model, data = build(NAME), to_data(frames[0])
    expected = float(model(dict(data))["total_energy"].detach())
    with torch.no_grad():
        for layer in range(2):
            message = getattr(model.model.func, f"layer{layer}_message")
            message.filters.weight[8:16] = 0.0
            message.filters.bias[8:16] = 0.0
    output = model(dict(data))
    assert (output["node_features"][:, 8:] == 0).all()
    assert abs(float(output["total_energy"].detach()) - expected) > 1e-3


def test_edge_type_cutoffs(build, to_data):
    model = build(NAME, per_edge_type_cutoff={"H": 2.0, "C": {"H": 4.0, "C": 3.5, "O": 3.7}, "O": 3.9})
    for symbols, distance, acts in (("HO", 2.1, True), ("HH", 2.1, False), ("CC", 3.6, False), ("CC", 3.4, True)):
        forces = model(to_data(Atoms(symbols, [[0, 0, 0], [distance, 0, 0]])))["forces"]
        assert bool((forces != 0).any()) == acts, (symbols, distance)
