"""Logarithm by quadrature against eigenvectors, and where those have no derivative."""

import pytest
import torch

from e2ip_plugins.maths.log import SymmetricLog
from e2ip_plugins.maths.spd import sym6_to_matrix

F64 = torch.float64
ROWS, COLUMNS = (0, 1, 2, 1, 0, 0), (0, 1, 2, 2, 2, 1)


def matrices(condition, middle, count=200):
    """SPD matrices as sym6 and their logarithms; the middle eigenvalue is the smallest one times condition^middle."""
    generator = torch.Generator().manual_seed(0)
    axes = torch.linalg.qr(torch.randn(count, 3, 3, dtype=F64, generator=generator))[0]
    powers = torch.tensor([0.0, middle, 1.0], dtype=F64)
    logs = powers * torch.log(torch.tensor(condition, dtype=F64)) - 12.0 * torch.rand(count, 1, generator=generator)
    matrix, log = (axes @ torch.diag_embed(values) @ axes.mT for values in (logs.exp(), logs))
    return matrix[:, ROWS, COLUMNS], log


@pytest.mark.parametrize("condition", [1.0, 10.0, 1e3])
@pytest.mark.parametrize("middle", [0.0, 0.5, 1.0])
def test_logarithm(condition, middle):
    matrix, log = matrices(condition, middle)
    torch.testing.assert_close(sym6_to_matrix(SymmetricLog()(matrix)), log, rtol=0, atol=1e-11)
    torch.testing.assert_close(torch.jit.script(SymmetricLog())(matrix), SymmetricLog()(matrix), rtol=0, atol=1e-12)
    single = SymmetricLog().float()(matrix.float())
    assert single.dtype == torch.float32
    torch.testing.assert_close(sym6_to_matrix(single).double(), log, rtol=0, atol=3e-7 * condition + 3e-6)


@pytest.mark.parametrize("middle", [0.0, 0.5])
def test_derivatives_at_equal_eigenvalues(middle):
    matrix = torch.cat([matrices(10.0, middle, 2)[0], torch.tensor([[2.0, 2.0, 2.0, 0.0, 0.0, 0.0]], dtype=F64)])
    matrix = (matrix / matrix[:, :1]).requires_grad_()
    assert torch.autograd.gradcheck(SymmetricLog(), matrix)
    assert torch.autograd.gradgradcheck(SymmetricLog(), matrix)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_spoils_its_own_matrix_only(bad):
    matrix = matrices(10.0, 0.5, 3)[0]
    matrix[1, 4] = bad
    log = SymmetricLog()(matrix)
    assert log[1].isnan().all() and log[[0, 2]].isfinite().all()
