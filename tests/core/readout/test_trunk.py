"""The readout: equivariance including reflections, modes, seeds, scripting."""

import pytest
import torch

from e2ip_plugins.maths import spd
from e2ip_plugins.readout.trunk import EdgePool, EvidentialHead

F64 = torch.float64


@pytest.fixture(autouse=True)
def double_precision():
    before = torch.get_default_dtype()
    torch.set_default_dtype(F64)
    yield
    torch.set_default_dtype(before)


def wigner2(rotation: torch.Tensor) -> torch.Tensor:
    """Representation (5, 5) of an orthogonal matrix on 2e, from the pinned basis itself."""
    basis = spd.sym6_to_matrix(spd.tangent_to_sym6(torch.zeros(5), torch.eye(5)))
    return torch.einsum("aij,ik,bkl,jl->ab", basis, rotation, basis, rotation)


@pytest.mark.parametrize(("vectors", "tensors"), [(4, 0), (0, 3), (4, 3)])
@pytest.mark.parametrize("mode", ["coupled", "independent"])
def test_equivariant_with_reflections(vectors, tensors, mode):
    torch.manual_seed(0)
    head = EvidentialHead(6, vectors, tensors, mode, seed=1)
    with torch.no_grad():
        head.out.weight.normal_()
    h, v, t = torch.randn(10, 6), torch.randn(10, vectors, 3), torch.randn(10, tensors, 5)
    out = head(h, v, t)
    matrix = spd.sym6_to_matrix(out["e2ip_log_sigma0"])
    off = matrix - torch.diag_embed(matrix.diagonal(dim1=1, dim2=2))
    assert off.abs().max() > 0.1, "an isotropic head would make this test vacuous"
    for seed in range(100):
        q, _ = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(seed)))
        if seed % 2:
            q = -q
        turned = head(h, v @ q.T, t @ wigner2(q).T)
        expected = q @ matrix @ q.T
        actual = spd.sym6_to_matrix(turned["e2ip_log_sigma0"])
        assert (actual - expected).norm() / expected.norm() < 1e-13
        torch.testing.assert_close(turned["e2ip_nu"], out["e2ip_nu"], rtol=0, atol=0)


def test_edge_pool_is_equivariant_and_sums_neighbours():
    torch.manual_seed(0)
    pool = EdgePool(5, 4, channels=3)
    sender, receiver = torch.tensor([1, 2, 0, 3]), torch.tensor([0, 0, 1, 2])
    edges, radial, h = torch.randn(4, 3), torch.randn(4, 4), torch.randn(4, 5)
    out = pool(edges, radial, h, sender, receiver)
    assert out.shape == (4, 3, 5) and torch.equal(out[3], torch.zeros(3, 5))
    q, _ = torch.linalg.qr(torch.randn(3, 3))
    torch.testing.assert_close(pool(edges @ q.T, radial, h, sender, receiver), out @ wigner2(q).T)
    # Y2 is even: reversed edges give the same.
    torch.testing.assert_close(pool(-edges, radial, h, sender, receiver), out)


def test_initial_weights_leave_the_global_stream_alone():
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    first, second = EvidentialHead(4, 2, seed=7), EvidentialHead(4, 2, seed=7)
    EdgePool(4, 2, seed=7)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_every_parameter_gets_a_gradient_from_the_start():
    head = EvidentialHead(4, 2, 2, "independent")
    out = head(torch.randn(5, 4), torch.randn(5, 2, 3), torch.randn(5, 2, 5))
    weights = torch.arange(1.0, 7.0)
    ((out["e2ip_log_sigma0"] * weights).sum() + out["e2ip_nu"].sum() + out["e2ip_kappa"].sum()).backward()
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_plateau_flag_and_force_unit():
    head = EvidentialHead(2, 1, preset="default", force_unit=0.05)
    with torch.no_grad():
        head.out.weight.zero_()
        head.out.bias[0] = 14.5
    out = head(torch.zeros(3, 2), torch.zeros(3, 1, 3), torch.zeros(3, 0, 5))
    assert torch.equal(out["e2ip_plateau"], torch.ones(3)) and torch.equal(
        out["e2ip_force_unit"], torch.full((3,), 0.05)
    )
    paper = EvidentialHead(2, 1, preset="paper", force_unit=0.05)
    assert paper.scalar_damper == (4.0, 5.0)


def test_scripted_equals_eager_and_no_atoms():
    for vectors, tensors in ((4, 0), (0, 3), (4, 3)):
        head = EvidentialHead(6, vectors, tensors)
        scripted = torch.jit.script(head)
        for count in (0, 5):
            args = torch.randn(count, 6), torch.randn(count, vectors, 3), torch.randn(count, tensors, 5)
            for key, value in head(*args).items():
                torch.testing.assert_close(scripted(*args)[key], value)
                assert value.shape[0] == count
    torch.jit.script(EdgePool(6, 3))


def test_needs_something_anisotropic():
    with pytest.raises(ValueError, match="1o or 2e"):
        EvidentialHead(4)
