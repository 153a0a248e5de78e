"""SPD map and damper: exactness, smoothness at degenerate points, behaviour at any magnitude."""

import pytest
import torch

from e2ip_plugins.maths import spd

F64 = torch.float64


def rotations(count: int, seed: int = 0) -> torch.Tensor:
    """Random orthogonal matrices, reflections included."""
    gen = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(count, 3, 3, dtype=F64, generator=gen))
    return q


def coefficients(count: int, norm: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    t = torch.randn(count, 5, dtype=F64, generator=gen)
    return torch.randn(count, dtype=F64, generator=gen), norm * t / t.norm(dim=-1, keepdim=True)


def test_basis_is_the_pinned_one_and_orthonormal():
    s, t = torch.eye(6, dtype=F64)[:, 0], torch.eye(6, dtype=F64)[:, 1:]
    basis = spd.sym6_to_matrix(spd.tangent_to_sym6(s, t))
    gram = torch.einsum("aij,bij->ab", basis, basis)
    torch.testing.assert_close(gram, torch.eye(6, dtype=F64), atol=1e-15, rtol=0)
    r2, r6 = 2**-0.5, 6**-0.5
    expected = torch.zeros(6, 3, 3, dtype=F64)
    expected[0] = torch.eye(3, dtype=F64) * 3**-0.5
    expected[1, 0, 2] = expected[1, 2, 0] = r2
    expected[2, 0, 1] = expected[2, 1, 0] = r2
    expected[3] = torch.diag(torch.tensor([-r6, 2 * r6, -r6], dtype=F64))
    expected[4, 1, 2] = expected[4, 2, 1] = r2
    expected[5] = torch.diag(torch.tensor([-r2, 0, r2], dtype=F64))
    torch.testing.assert_close(basis, expected, atol=1e-15, rtol=0)


def test_basis_matches_e3nn(monkeypatch):
    # e3nn 0.4.4 loads its constants with a pickle that newer torch refuses; `import mace` sets the same.
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    io = pytest.importorskip("e3nn.io")
    z = torch.eye(6, dtype=F64)
    theirs = io.CartesianTensor("ij=ji").to_cartesian(z)
    torch.testing.assert_close(
        spd.sym6_to_matrix(spd.tangent_to_sym6(z[:, 0], z[:, 1:])), theirs.to(F64), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("norm", [0.0, 1e-9, 1.0, 4.0, 5.0])
def test_exponential_matches_matrix_exp(norm):
    s, t = coefficients(200, norm)
    log = spd.tangent_to_sym6(s, t)
    reference = torch.linalg.matrix_exp(spd.sym6_to_matrix(log))
    ours = spd.sym6_to_matrix(spd.exp_sym6(log))
    torch.testing.assert_close(ours, reference, rtol=1e-13, atol=1e-13 * float(reference.abs().max()))
    in_single = spd.sym6_to_matrix(spd.exp_sym6(log.float())).double()
    assert ((in_single - reference).norm(dim=(1, 2)) / reference.norm(dim=(1, 2))).max() < 2e-6


def test_half_exponential_is_the_inverse_square_root():
    s, t = coefficients(200, 5.0)
    log = spd.tangent_to_sym6(s, t)
    v = torch.randn(200, 3, dtype=F64, generator=torch.Generator().manual_seed(2))
    reference = torch.einsum("ni,nij,nj->n", v, torch.linalg.matrix_exp(-spd.sym6_to_matrix(log)), v)
    torch.testing.assert_close(spd.half_exp_matvec(log, v, -1.0).square().sum(-1), reference, rtol=1e-12, atol=0)
    back = spd.half_exp_matvec(log, spd.half_exp_matvec(log, v, -1.0), 1.0)
    torch.testing.assert_close(back, v, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("norm", [5.0, 6.0, 19.0])
def test_larger_exponents_are_squared_or_applied_in_steps(norm):
    s, t = coefficients(100, norm)
    log = spd.tangent_to_sym6(s, t)
    squarings = spd.squarings_for(log)
    assert squarings == {5.0: 0, 6.0: 1, 19.0: 2}[norm]
    reference = torch.linalg.matrix_exp(spd.sym6_to_matrix(log))
    ours = spd.sym6_to_matrix(spd.exp_sym6(log, squarings))
    assert ((ours - reference).norm(dim=(1, 2)) / reference.norm(dim=(1, 2))).max() < 1e-13
    v = torch.randn(100, 3, dtype=F64, generator=torch.Generator().manual_seed(2))
    root = torch.linalg.matrix_exp(-0.5 * spd.sym6_to_matrix(log))
    expected = torch.einsum("nij,nj->ni", root, v)
    assert (
        (spd.half_exp_matvec(log, v, -1.0, 2**squarings) - expected).norm(dim=1) / expected.norm(dim=1)
    ).max() < 1e-12


def test_log_determinant_is_the_trace():
    s, t = coefficients(100, 3.0)
    log = spd.tangent_to_sym6(s, t)
    determinant = torch.linalg.det(spd.sym6_to_matrix(spd.exp_sym6(log)))
    torch.testing.assert_close(determinant.log(), 3**0.5 * s, rtol=1e-11, atol=1e-11)


def test_damper_scalar():
    x = torch.tensor([-1e30, -14.5, -14.0, -3.0, 0.0, 2.0, 14.0, 14.5, 1e30], dtype=F64, requires_grad=True)
    y = spd.damp(x, 14.0, 15.0)
    inside = x.abs() <= 14
    assert torch.equal(y[inside], x[inside])
    assert torch.equal(y, -spd.damp(-x, 14.0, 15.0))
    assert y[-1] == 15.0
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad[inside], torch.ones(5, dtype=F64)) and torch.isfinite(grad).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_damper_vector_any_magnitude(dtype):
    """SPD and ‖t̃‖ = c for 10⁷ coefficients of any finite magnitude (a tenth of them in float64), five for an atom."""
    total = 2_000_000 if dtype == torch.float32 else 200_000
    gen = torch.Generator().manual_seed(3)
    top = torch.finfo(dtype).max
    smallest = 1.0
    for _ in range(total // 100_000):
        # Magnitudes log-uniform from denormal to the largest finite number.
        exponents = torch.rand(100_000, 1, generator=gen, dtype=F64) * 2 - 1
        t = (torch.rand(100_000, 5, generator=gen, dtype=F64) * 2 - 1) * 10 ** (
            exponents * (38.5 if dtype == torch.float32 else 308.2)
        )
        t = t.clamp(-top, top).to(dtype)
        s = spd.damp((torch.randn(100_000, generator=gen) * 10).to(dtype), 14.0, 15.0)
        damped = spd.damp_vector(t, 4.0, 5.0)
        norm = t.double().norm(dim=-1)
        norm = torch.where(norm.isinf(), torch.full_like(norm, 1e300), norm)
        below, above = norm < 4.0 * (1 - 1e-6), norm > 30.0
        assert torch.equal(damped[below], t[below])
        damped_norm = damped[above].double().norm(dim=-1)
        assert (damped_norm - 5.0).abs().max() < 8 * torch.finfo(dtype).eps * 5
        # SPD by Sylvester's criterion, on the matrix scaled by its own trace.
        matrix = spd.sym6_to_matrix(spd.exp_sym6(spd.tangent_to_sym6(s, damped))).double()
        assert torch.equal(matrix, matrix.mT)
        matrix = matrix / matrix.diagonal(dim1=1, dim2=2).sum(-1)[:, None, None]
        minor2 = matrix[:, 0, 0] * matrix[:, 1, 1] - matrix[:, 0, 1] ** 2
        determinant = torch.linalg.det(matrix)
        assert (matrix[:, 0, 0] > 0).all() and (minor2 > 0).all() and (determinant > 0).all()
        smallest = min(smallest, float(determinant.min()))
    assert smallest > 1e-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_damper_vector_gradients_finite_everywhere(dtype):
    top = torch.finfo(dtype).max
    t = torch.tensor([0.0, 1e-30, 4.0, 4.5, 100.0, 1e19, top], dtype=F64)[:, None].to(dtype) * torch.tensor(
        [1.0, -1.0, 0.5, 1.0, 0.25], dtype=dtype
    )
    t.requires_grad_()
    (grad,) = torch.autograd.grad((spd.damp_vector(t, 4.0, 5.0) * torch.arange(5.0).to(dtype)).sum(), t)
    assert torch.isfinite(grad).all()
    # The identity at the origin, where the paper's form φ(‖t‖)/(‖t‖+ε) has a zero Jacobian.
    assert torch.equal(grad[0], torch.arange(5.0).to(dtype))


def test_nan_stays_with_its_own_atom():
    t = torch.randn(4, 5, dtype=F64)
    t[2, 1] = float("nan")
    out = spd.exp_sym6(spd.tangent_to_sym6(torch.zeros(4, dtype=F64), spd.damp_vector(t, 4.0, 5.0)))
    assert torch.isnan(out[2]).any() and torch.isfinite(out[[0, 1, 3]]).all()


def test_no_atoms():
    log = spd.tangent_to_sym6(torch.zeros(0), spd.damp_vector(torch.zeros(0, 5), 4.0, 5.0))
    assert spd.exp_sym6(log).shape == (0, 6) and spd.half_exp_matvec(log, torch.zeros(0, 3), -1.0).shape == (0, 3)


def special_points() -> torch.Tensor:
    """t = 0, two equal eigenvalues (both signs), inside, across the knee, on the plateau."""
    points = torch.zeros(6, 5, dtype=F64)
    points[1, 2], points[2, 2] = 2.0, -2.0
    points[3] = torch.tensor([0.3, -0.7, 0.2, 1.1, -0.4])
    points[4] = torch.tensor([2.0, 2.0, 2.0, 2.0, 2.0])
    points[5] = torch.tensor([30.0, -10.0, 5.0, 7.0, 1.0])
    return points


@pytest.mark.parametrize("index", range(6))
def test_gradcheck_and_gradgradcheck(index):
    t = special_points()[index : index + 1].requires_grad_()
    s = torch.tensor([0.7], dtype=F64, requires_grad=True)
    v = torch.tensor([[0.3, -0.2, 0.5]], dtype=F64, requires_grad=True)

    def both(s, t, v):
        log = spd.tangent_to_sym6(spd.damp(s, 14.0, 15.0), spd.damp_vector(t, 4.0, 5.0))
        return spd.exp_sym6(log), spd.half_exp_matvec(log, v, -1.0).square().sum(-1)

    assert torch.autograd.gradcheck(both, (s, t, v), rtol=1e-6, atol=1e-7)
    assert torch.autograd.gradgradcheck(both, (s, t, v), rtol=1e-5, atol=1e-6)


def test_symmetric_traceless_part_is_that_of_the_matrix():
    m = torch.randn(7, 3, 3, dtype=F64, generator=torch.Generator().manual_seed(2))
    symmetric = 0.5 * (m + m.mT)
    expected = symmetric - symmetric.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None] * torch.eye(3, dtype=F64)
    # ⟨Q_k, m⟩ are the coefficients: the orthonormal basis gives the projection back.
    part = spd.SymmetricTracelessPart().float().double()  # the way there must not cost digits
    ours = spd.sym6_to_matrix(spd.tangent_to_sym6(torch.zeros(7, dtype=F64), part(m)))
    torch.testing.assert_close(ours, expected, rtol=1e-14, atol=1e-14)


# A factor and a floor


def test_widened_matrix_matches_its_definition_and_turns_with_it():
    s, t = coefficients(200, 4.0)
    log = spd.tangent_to_sym6(s, t)
    factor, floor = torch.rand(2, 200, dtype=F64, generator=torch.Generator().manual_seed(1)) + 0.05
    wide = spd.sym6_to_matrix(spd.log_of_widened(log, factor, floor))
    expected = factor[:, None, None] * torch.linalg.matrix_exp(spd.sym6_to_matrix(log)) + torch.diag_embed(
        floor[:, None].expand(200, 3)
    )
    torch.testing.assert_close(torch.linalg.matrix_exp(wide), expected, rtol=1e-12, atol=1e-13 * expected.abs().max())
    rotation = rotations(200)
    turned = rotation @ spd.sym6_to_matrix(log) @ rotation.mT
    turned = torch.stack([turned[:, i, j] for i, j in ((0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1))], dim=-1)
    found = spd.sym6_to_matrix(spd.log_of_widened(turned, factor, floor))
    torch.testing.assert_close(found, rotation @ wide @ rotation.mT, rtol=0, atol=1e-13)


@pytest.mark.parametrize("log", [torch.zeros(1, 6), torch.tensor([[-20.0, -20.0, -20.0, 0.0, 0.0, 0.0]])])
def test_widened_degenerate_matrices(log):
    one, floor = torch.ones(1, dtype=F64), torch.tensor([1e-6], dtype=F64)
    found = spd.log_of_widened(log.to(F64), 3.0 * one, floor)
    expected = torch.log(3.0 * torch.exp(log[0, 0].to(F64)) + 1e-6)
    torch.testing.assert_close(found[0, :3], expected.expand(3), rtol=1e-14, atol=0)
    assert found[0, 3:].abs().max() < 1e-15


def test_a_tiny_floor_keeps_its_digits():
    """Added to the matrix itself it would drown in rounding."""
    log = torch.zeros(1, 6, dtype=F64)
    added = spd.log_of_widened(log, torch.ones(1, dtype=F64), torch.tensor([1e-18], dtype=F64)) - log
    torch.testing.assert_close(added[0, :3], torch.full((3,), 1e-18, dtype=F64), rtol=1e-14, atol=0)


@pytest.mark.parametrize("condition", [1.0, 1e3, 1e8, 1e13])
def test_logarithm_and_exponential_of_any_conditioning(condition):
    generator = torch.Generator().manual_seed(0)
    axes = torch.linalg.qr(torch.randn(20, 3, 3, dtype=torch.float64, generator=generator))[0]
    values = 0.01 * torch.tensor([1.0, condition**-0.3, 1.0 / condition], dtype=torch.float64)
    matrix = (axes * values) @ axes.mT
    full = matrix[:, [0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]]
    log = spd.log_spd(full)
    found = torch.linalg.eigvalsh(spd.sym6_to_matrix(log))
    # The smallest eigenvalue of a matrix in floating point is known to the size of the largest.
    error = (found - values.sort().values.log()).abs()
    assert (error < 1e-14 * condition + 1e-12).all()
    assert (spd.exp_log_spd(log) - matrix).abs().max() < 1e-14


def test_logarithm_of_what_has_none():
    singular = torch.tensor([[1.0, 1.0, 0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    assert torch.allclose(spd.log_spd(singular).exp()[0, :3], torch.tensor([1.0, 1.0, 1e-14], dtype=torch.float64))
    bad = torch.tensor([[1.0, 1.0, 1.0, 0.0, 0.0, 0.0], [float("nan")] * 6], dtype=torch.float64)
    assert torch.equal(spd.log_spd(bad)[0], torch.zeros(6, dtype=torch.float64)) and spd.log_spd(bad)[1].isnan().all()


@pytest.mark.parametrize("eigenvalues", [(1.0, 2.0, 5.0), (2.0, 2.0, 2.0), (1e-3, 1.0, 1.0), (1.0, 1.0 + 1e-9, 3.0)])
def test_derivative_of_the_logarithm(eigenvalues):
    axes = torch.linalg.qr(torch.randn(3, 3, dtype=F64, generator=torch.Generator().manual_seed(3)))[0]
    matrix = (axes * torch.tensor(eigenvalues, dtype=F64)) @ axes.mT
    full = matrix[[0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]].unsqueeze(0).requires_grad_()
    assert torch.autograd.gradcheck(spd.log_spd, full, eps=1e-6, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(spd.log_spd(full).detach(), spd.log_spd(full.detach()), rtol=0, atol=0)
