"""Error vectors: what they do to copies, unlike atoms, differences and stresses."""

import math

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from e2ip_plugins.leverage.energies import MAX_BLOCKS, EnergyErrors
from e2ip_plugins.leverage.form import Support
from e2ip_plugins.readout.layout import Layout
from e2ip_plugins.readout.readout import Readout
from e2ip_plugins.readout.settings import Settings, resolve_force_unit

F64 = torch.float64
SIZE = 6


def energies(species=3, heads=1, length=0.3, floor=0.01):
    module = EnergyErrors(SIZE, species, heads).to(F64)
    for head in range(heads):
        module.set_head(head, length, floor)
    return module


def support_of(features, distance=2.0):
    one = torch.ones(len(features), dtype=F64)
    return Support(one, distance * one, one, one, one, one, torch.tensor(True), features)


def draw(count, seed=0):
    return torch.randn(count, SIZE, dtype=F64, generator=torch.Generator().manual_seed(seed))


def vectors(module, features, species, std=0.1, distance=2.0, **frames):
    column = torch.full((len(features),), std, dtype=F64)
    return module(support_of(features, distance), column, torch.tensor(species), **frames)


def test_one_atom_by_hand():
    """σ = √(tr Σ/3); h = 8 with d = 16, to the power of a quarter."""
    u = vectors(energies(), draw(1), [1], std=0.3, distance=16.0)
    assert u.norm().item() == pytest.approx(0.3 * (0.3 / math.sqrt(3) * 8**0.25 + 0.01), rel=1e-12)
    coupled = vectors(energies(), draw(1), [1], std=0.3, distance=16.0, grows=False)
    assert coupled.norm().item() == pytest.approx(0.3 * (0.3 / math.sqrt(3) + 0.01), rel=1e-12)


def test_copies_add_up_and_species_do_not_mix():
    module, x = energies(), draw(4)
    one = vectors(module, x, [0, 1, 1, 0])
    three = vectors(module, x.repeat(3, 1), [0, 1, 1, 0] * 3)
    torch.testing.assert_close(three, 3 * one, rtol=1e-12, atol=1e-15)
    a, b = vectors(module, x, [0] * 4), vectors(module, draw(4, 1), [2] * 4)
    both = vectors(module, torch.cat([x, draw(4, 1)]), [0] * 4 + [2] * 4)
    assert both.norm().item() == pytest.approx(math.hypot(a.norm(), b.norm()), rel=1e-12)


def test_unlike_atoms_are_nearly_independent_and_like_ones_err_alike():
    module = energies(1)
    far = [vectors(module, 2.5 * draw(1, seed), [0]) for seed in range(40)]
    unit = torch.cat([u / u.norm() for u in far])
    products = (unit @ unit.T)[~torch.eye(40, dtype=torch.bool)]
    assert products.abs().mean() < 0.15 and abs(products.mean()) < 0.03
    x = draw(1)
    near = [vectors(module, x + step, [0]) for step in (1e-3, 1e-2, 1e-1)]
    differences = [(u - vectors(module, x, [0])).norm().item() for u in near]
    assert differences[0] < 0.15 * differences[1] < 0.15**2 * differences[2] * 1.5


def test_frames_of_a_batch_are_what_they_are_alone():
    module, x, species = energies(), draw(5), [0, 2, 1, 1, 0]
    frames = torch.tensor([0, 0, 1, 1, 1])
    batch = vectors(module, x, species, frames=frames, num_frames=2)
    torch.testing.assert_close(batch[:1], vectors(module, x[:2], species[:2]))
    torch.testing.assert_close(batch[1:], vectors(module, x[2:], species[2:]))
    order = torch.tensor([4, 2, 0, 1, 3])
    shuffled = vectors(module, x[order], [species[i] for i in order], frames=frames[order], num_frames=2)
    torch.testing.assert_close(shuffled, batch, rtol=1e-12, atol=1e-15)


def test_heads_have_their_lengths():
    module = energies(heads=2)
    module.set_head(0, 0.5, 0.01)
    module.set_head(1, 0.0, 0.01)
    x, frames = draw(4), torch.tensor([0, 0, 1, 1])
    u = vectors(module, x, [0, 1, 0, 1], heads=frames, frames=frames, num_frames=2)
    torch.testing.assert_close(u[:1], vectors(energies(length=0.5), x[:2], [0, 1]))
    assert not u[1].any()


def test_length_of_a_vector_is_bounded_whatever_the_number_of_species():
    assert vectors(energies(4), draw(1), [0]).shape == (1, 256)
    assert vectors(energies(89), draw(1), [88]).shape == vectors(energies(MAX_BLOCKS), draw(1), [0]).shape == (1, 512)


def test_scripted_module_gives_the_same():
    module, x = energies(), draw(3)
    torch.testing.assert_close(vectors(torch.jit.script(module), x, [0, 1, 2]), vectors(module, x, [0, 1, 2]))


def rotation(seed=0):
    return torch.linalg.qr(torch.randn(3, 3, dtype=F64, generator=torch.Generator().manual_seed(seed)))[0]


VOIGT = [(0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1)]


def test_stress_covariance_by_sampling_is_isotropic_and_has_its_two_parts():
    """Its draws, rotated, have the same covariance; trace and traceless part have their own size."""
    module = energies()
    module.stress_factors = torch.tensor([[2.0, 0.5]], dtype=F64)
    covariance = module.stress_covariance(torch.tensor([0.3], dtype=F64), torch.tensor([10.0], dtype=F64))[0]
    transform = torch.zeros(6, 6, dtype=F64)
    r = rotation()
    for i, (a, b) in enumerate(VOIGT):
        for j, (c, d) in enumerate(VOIGT):
            transform[i, j] = r[a, c] * r[b, d] + (r[a, d] * r[b, c] if c != d else 0.0)
    torch.testing.assert_close(transform @ covariance @ transform.T, covariance, rtol=1e-10, atol=1e-14)
    assert torch.linalg.eigvalsh(covariance).min() > 0
    trace = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0], dtype=F64) / 3
    assert (trace @ covariance @ trace).sqrt().item() == pytest.approx(2.0 * 0.03, rel=1e-12)
    assert covariance[3, 3].sqrt().item() == pytest.approx(0.5 * 0.03 / math.sqrt(2), rel=1e-12)


def test_state_with_and_without_stresses():
    with_stress, without = energies(heads=2), energies(heads=2)
    with_stress.make_stress_factors()
    without.load_state_dict(with_stress.state_dict())
    assert without.stress_factors.shape == (2, 2)
    with_stress.load_state_dict(energies(heads=2).state_dict())
    assert with_stress.stress_factors.shape == (0, 2)


def test_a_frame_costs_ten_more_operators():
    """Each costs microseconds, which on a molecule of twenty atoms are as many as those of the arithmetic."""
    layout = Layout([(0, 8)], [(8, 4)], [(20, 2)], num_species=4)
    readout = Readout(Settings.of("e2ip", {}, resolve_force_unit(None)), layout).eval()
    features, species = torch.randn(21, 40), torch.arange(21) % 4

    def operators(**frames):
        with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU]) as profiler:
            readout(features, features, species, **frames)
        return sum(event.name.startswith("aten::") and event.cpu_parent is None for event in profiler.events())

    operators()  # kernels are checked at their first call
    before = operators()
    assert 0 < operators(frames=torch.zeros(21, dtype=torch.long), num_frames=1) - before <= 10


def test_one_head_of_several():
    module, alone = energies(heads=2), energies()
    module.set_head(1, 0.7, 0.02)
    module.stress_factors = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=F64)
    alone.take_head(module, 1)
    x, species = draw(3), [0, 1, 2]
    expected = vectors(module, x, species, heads=torch.ones(3, dtype=torch.long))
    torch.testing.assert_close(vectors(alone, x, species), expected)
    std, volumes = torch.ones(1, dtype=F64), torch.full((1,), 2.0, dtype=F64)
    covariance = module.stress_covariance(
        std, volumes, torch.ones(3, dtype=torch.long), torch.zeros(3, dtype=torch.long)
    )
    torch.testing.assert_close(alone.stress_covariance(std, volumes), covariance)
