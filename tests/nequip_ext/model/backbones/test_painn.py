"""PaiNN: numbers of its tables, and what its equations say beyond symmetry."""

import pytest
import torch
from ase import Atoms
from hydra.utils import get_method

from e2ip_plugins.errors import InputError
from nequip_ext import PaiNNModel
from nequip_ext.model.backbones.geometry import CosineCutoff
from nequip_ext.model.backbones.layers import Mixing

NAME = "nequip_ext.PaiNNModel"


@pytest.mark.parametrize(
    ("sizes", "expected"), [({}, 589_057), ({"num_layers": 6, "num_radial": 128}, 1_405_825)], ids=["20", "128"]
)
def test_numbers_of_weights(default_dtype, sizes, expected):
    types = [f"X{i}" for i in range(100)]
    model = PaiNNModel(seed=1, model_dtype="float32", type_names=types, r_max=5.0, **sizes)
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


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


BAD = [
    ({"preset": "smooth"}, "unknown preset 'smooth'; choose from: default, paper"),
    ({"num_layers": 0}, "num_layers is 0"),
    ({"num_layers": 2.5}, "num_layers is 2.5: give a whole number"),
    ({"num_features": 7}, "num_features is 7: give an even number"),
    ({"num_features": -2}, "num_features is -2: give a whole number from 1 on"),
    ({"numlayers": 2}, "PaiNNModel: unknown option numlayers; it has: seed, .* num_layers, .* pair_potential"),
    ({"r_max": -1.0}, "r_max is -1.0: give the cutoff in Å"),
    ({"type_names": ["H", "C_1"]}, "letters and digits only; found: C_1"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=lambda value: next(iter(value), "") if value is dict else "")
def test_bad_options(default_dtype, backbone_config, changes, message):
    config = backbone_config(NAME, **changes)
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        get_method(config.pop("_target_"))(**config)
