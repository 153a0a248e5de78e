"""Energies and forces of both backbones, in every preset, under all that must not change them."""

import pytest
import torch
from nequip.data import AtomicDataDict


def energy(model, data):
    return model(dict(data))["total_energy"].detach()


def random_turn(seed, determinant):
    generator = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64))[0]
    return q * torch.linalg.det(q) * determinant


def turned(data, move):
    return {**data, "pos": data["pos"] @ move.T, "cell": data["cell"] @ move.T}


def close(got, expected, tolerance=1e-12):
    scale = float(expected.detach().abs().max())
    assert float((got - expected).detach().abs().max()) <= tolerance * max(1.0, scale)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 2e-5)])
def test_rotations_and_reflections(kind, build, frames, to_data, dtype, tolerance):
    model = build(*kind, model_dtype=dtype)
    channels = model.irreps_out["node_features"][0].mul
    assert str(model.irreps_out["node_features"]) == f"{channels}x0e+{channels}x1o"
    data = to_data(frames[1])
    expected = model(dict(data))
    for seed, determinant in enumerate((1.0, -1.0)):
        move = random_turn(seed, determinant)
        got = model(turned(data, move))
        close(got["total_energy"], expected["total_energy"], tolerance)
        close(got["forces"], expected["forces"] @ move.T, 10 * tolerance)
        vectors = expected["node_features"][:, channels:].reshape(-1, channels, 3)
        close(got["node_features"][:, :channels], expected["node_features"][:, :channels], 10 * tolerance)
        assert vectors.abs().max() > 1e-3
        close(
            got["node_features"][:, channels:].reshape(-1, channels, 3),
            vectors @ move.T.to(vectors.dtype),
            10 * tolerance,
        )


def test_translation_permutation_wrapping_and_batches(any_model, frames, to_data):
    data = [to_data(atoms) for atoms in frames]
    expected = [any_model(dict(frame)) for frame in data]
    batch = any_model(AtomicDataDict.batched_from_list(data))
    close(batch["total_energy"], torch.cat([output["total_energy"] for output in expected]))
    close(batch["forces"], torch.cat([output["forces"] for output in expected]))

    periodic, output = data[1], expected[1]
    close(energy(any_model, {**periodic, "pos": periodic["pos"] + 3.21}), output["total_energy"])
    order = torch.randperm(len(frames[1]), generator=torch.Generator().manual_seed(1))
    close(any_model(to_data(frames[1][order.numpy()]))["forces"], output["forces"][order])
    wrapped = frames[1].copy()
    wrapped.positions[::2] += wrapped.cell.array @ [1, -2, 1]
    wrapped.positions[1] -= 2 * wrapped.cell.array[2]
    close(any_model(to_data(wrapped))["forces"], output["forces"])


def test_supercell_and_far_molecules(any_model, frames, to_data):
    crystal = frames[1]
    close(energy(any_model, to_data(crystal * (2, 2, 2))), 8 * energy(any_model, to_data(crystal)))
    far = frames[2].copy()
    far.positions += 30.0
    apart = energy(any_model, to_data(frames[0])) + energy(any_model, to_data(frames[2]))
    close(energy(any_model, to_data(frames[0] + far)), apart)
