"""Sources of anisotropy, one at a time; the trunk in its readout is tested in test_readout.py."""

import math

import pytest
import torch

from e2ip_plugins.errors import InputError
from e2ip_plugins.readout.trunk import EdgePool, Trunk

F64 = torch.float64


def test_edge_pool_is_equivariant_and_sums_neighbours(wigner2):
    """Summed over neighbours channel by channel, and only then over channels: Σ_c (W g)_c Σ_j w_jc Y2(r̂_j)."""
    torch.manual_seed(0)
    pool = EdgePool(5, 4, channels=3)
    trunk = Trunk(5, 0, 3, 1, 1, (0.0,))
    sender, receiver = torch.tensor([1, 2, 0, 3]), torch.tensor([0, 0, 1, 2])
    edges, radial, h = torch.randn(4, 3), torch.randn(4, 4), torch.randn(4, 5)

    def coefficients(vectors, read_out=trunk):
        return read_out(h, h, h, pool(vectors, radial, h, sender, receiver))

    out = coefficients(edges)
    unit = edges / edges.norm(dim=1, keepdim=True)
    weights = pool.from_radial(radial) * pool.from_sender(h)[sender]
    products = trunk.traceless_part(unit[:, :, None] * unit[:, None, :])
    tensors = torch.zeros(4, 3, 5).index_add(0, receiver, weights[:, :, None] * products[:, None, :])
    torch.testing.assert_close(out, trunk(h, h, tensors))
    assert torch.equal(out[3, 1:], torch.zeros(5)) and out[:3, 1:].abs().max() > 1e-3
    q, _ = torch.linalg.qr(torch.randn(3, 3))
    turned = coefficients(edges @ q.T)
    torch.testing.assert_close(turned, torch.cat([out[:, :1], out[:, 1:] @ wigner2(q).T], dim=1))
    # Y2 is even: reversed edges give the same.
    torch.testing.assert_close(coefficients(-edges), out)
    torch.testing.assert_close(coefficients(edges, torch.jit.script(trunk)), out)


@pytest.mark.parametrize(("vectors", "tensors"), [(4, 0), (0, 3), (4, 3)])
def test_trunk_is_equivariant_and_scripts(vectors, tensors, wigner2):
    torch.manual_seed(0)
    trunk = Trunk(6, vectors, tensors, 2, 1, (0.5, -0.5))
    h, v, t = torch.randn(10, 6), torch.randn(10, vectors, 3), torch.randn(10, tensors, 5)
    out = trunk(h, v, t)
    assert out.shape == (10, 7) and out[:, 2:].abs().max() > 1e-3
    q, _ = torch.linalg.qr(torch.randn(3, 3))
    turned = trunk(h, -v @ q.T, t @ wigner2(q).T)
    torch.testing.assert_close(turned, torch.cat([out[:, :2], out[:, 2:] @ wigner2(q).T], dim=1))
    torch.testing.assert_close(torch.jit.script(trunk)(h, v, t), out)


def test_trunk_for_scalars_alone_reads_nothing_else():
    trunk = Trunk(6, 4, 3, 2, 0, (0.5, -0.5))
    h = torch.randn(10, 6)
    assert trunk(h, h, h).shape == (10, 2) and trunk.out.out_features == 2
    with torch.no_grad():
        trunk.out.weight.zero_()
    assert torch.equal(trunk(h, h, h)[0], torch.tensor([0.5, -0.5]))


def test_trunk_without_constants_starts_from_none():
    """What is differentiated has no constants: every weight matters, and the size is one of them."""
    trunk = Trunk(6, 0, 0, 3, 0, ())
    h = torch.randn(10, 6, requires_grad=True)
    (slopes,) = torch.autograd.grad(trunk(h, h, h)[:, 0].sum(), h, create_graph=True)
    slopes.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in trunk.parameters())
    before = trunk(h, h, h)
    with torch.no_grad():
        trunk.log_size.add_(0.1)
    torch.testing.assert_close(trunk(h, h, h), math.exp(0.3) * before)
    torch.testing.assert_close(torch.jit.script(trunk)(h, h, h), trunk(h, h, h))
    with pytest.raises(InputError, match="nothing without a training"):
        trunk.make_constant()


def test_needs_something_anisotropic():
    with pytest.raises(ValueError, match="1o or 2e"):
        Trunk(4, 0, 0, 1, 1, (0.0,))
    Trunk(4, 0, 0, 1, 0, (0.0,))
