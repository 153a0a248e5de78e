r"""Tangent coefficients (0e + 2e) to symmetric positive definite 3×3 matrices, in closed form.

A symmetric matrix S = s Q0 + Σ_k t_k Q_k is the matrix logarithm of Σ0/σ_ref² (paper,
Eq. 10). Its exponential needs no eigenvectors: the traceless part T obeys the
Cayley-Hamilton relation T³ = pT + qI, so that exp(T) = a0 I + a1 T + a2 T² with a_k entire in
p = tr(T²)/2 and q = det T. It is therefore smooth at degenerate eigenvalues, T = 0 included.

Symmetric matrices travel as six numbers in the order xx, yy, zz, yz, xz, xy ("sym6").
"""

import math
from typing import List, Tuple

import torch
from torch import Tensor, nn

# TorchScript folds math.sqrt of a literal but refuses module-level floats.


def damp(x: Tensor, knee: float, ceiling: float) -> Tensor:
    """Linear-tanh damper φ_high: x up to the knee τ, then saturating at the ceiling c; odd and C².

    Paper, appendix "Damping functions"; applied once, it is floor and ceiling.
    """
    core = x.clamp(-knee, knee)
    return core + (ceiling - knee) * torch.tanh((x - core) / (ceiling - knee))


def damp_vector(t: Tensor, knee: float, ceiling: float) -> Tensor:
    """Damp the magnitude of t (..., 5) and keep its direction: t φ(‖t‖)/‖t‖, exactly t up to the knee.

    Value and gradient are finite and right at t = 0 and wherever t itself is finite: the norm is
    formed of t/max|t|, because ‖t‖² overflows float32 from 1e19 on.
    """
    # A constant as far as gradients go: the result does not depend on it.
    largest = t.abs().amax(dim=-1, keepdim=True).detach().clamp(min=knee)
    unit = t / largest
    floor2 = (knee / largest).square()
    norm2 = unit.square().sum(dim=-1, keepdim=True)
    norm = torch.maximum(norm2, floor2).sqrt()
    excess = (largest * norm - knee) / (ceiling - knee)
    damped = unit * ((knee + (ceiling - knee) * torch.tanh(excess)) / norm)
    return torch.where(norm2 <= floor2, t, damped)


def tangent_to_sym6(s: Tensor, t: Tensor) -> Tensor:
    """S = s Q0 + Σ t_k Q_k as sym6 (..., 6) from s (...,) and t (..., 5) in e3nn's 2e component order.

    The basis is orthonormal and pinned by value: Q0 = I/√3, Q1 = (xz+zx)/√2, Q2 = (xy+yx)/√2,
    Q3 = (2yy-xx-zz)/√6, Q4 = (yz+zy)/√2, Q5 = (zz-xx)/√2, so that ‖S‖_F² = s² + ‖t‖².
    """
    iso = s / math.sqrt(3.0)
    t1, t2, t3, t4, t5 = t.unbind(-1)
    return torch.stack(
        [
            iso - t3 / math.sqrt(6.0) - t5 / math.sqrt(2.0),
            iso + t3 * (2.0 / math.sqrt(6.0)),
            iso - t3 / math.sqrt(6.0) + t5 / math.sqrt(2.0),
            t4 / math.sqrt(2.0),
            t1 / math.sqrt(2.0),
            t2 / math.sqrt(2.0),
        ],
        dim=-1,
    )


class SymmetricTracelessPart(nn.Module):
    """2e part (..., 5) of a matrix (..., 3, 3), in the basis of `tangent_to_sym6`."""

    basis: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("basis", _traceless_basis().to(torch.get_default_dtype()), persistent=False)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        # A float32 model that becomes a float64 one would keep its rounded constants.
        self.basis = _traceless_basis().to(self.basis)
        return self

    def forward(self, m: Tensor) -> Tensor:
        # No matrix product: TF32 and autocast would round it, and with it the geometry.
        return (m.flatten(-2).unsqueeze(-1) * self.basis).sum(-2)


def _traceless_basis() -> Tensor:
    """Q1 … Q5 as columns (9, 5)."""
    eye = torch.eye(5, dtype=torch.float64)
    return sym6_to_matrix(tangent_to_sym6(torch.zeros_like(eye[0]), eye)).flatten(-2).t().contiguous()


def sym6_to_matrix(x: Tensor) -> Tensor:
    """sym6 (..., 6) to (..., 3, 3)."""
    xx, yy, zz, yz, xz, xy = x.unbind(-1)
    return torch.stack([xx, xy, xz, xy, yy, yz, xz, yz, zz], -1).view(list(x.shape[:-1]) + [3, 3])  # noqa: RUF005 (TorchScript)


def matrix_to_sym6(matrix: Tensor) -> Tensor:
    """sym6 (..., 6) of symmetric matrices (..., 3, 3)."""
    xx, xy, xz, _, yy, yz, _, _, zz = matrix.flatten(-2).unbind(-1)
    return torch.stack([xx, yy, zz, yz, xz, xy], dim=-1)


def sym6_matvec(x: Tensor, v: Tensor) -> Tensor:
    """Product of a sym6 matrix (..., 6) with a vector (..., 3)."""
    xx, yy, zz, yz, xz, xy = x.unbind(-1)
    v0, v1, v2 = v.unbind(-1)
    return torch.stack([xx * v0 + xy * v1 + xz * v2, xy * v0 + yy * v1 + yz * v2, xz * v0 + yz * v1 + zz * v2], dim=-1)


def sym6_square(x: Tensor) -> Tensor:
    """Square of a symmetric matrix, sym6 in and out; symmetric by construction."""
    xx, yy, zz, yz, xz, xy = x.unbind(-1)
    return torch.stack(
        [
            xx * xx + xy * xy + xz * xz,
            xy * xy + yy * yy + yz * yz,
            xz * xz + yz * yz + zz * zz,
            xy * xz + yy * yz + yz * zz,
            xx * xz + xy * yz + xz * zz,
            xx * xy + xy * yy + xz * yz,
        ],
        dim=-1,
    )


def split_trace(x: Tensor) -> Tuple[Tensor, Tensor]:
    """Mean eigenvalue (...,) and traceless part (..., 6) of a sym6 matrix."""
    diagonal = x[..., :3]
    mean = diagonal.sum(-1) / 3.0
    return mean, torch.cat([diagonal - mean.unsqueeze(-1), x[..., 3:]], dim=-1)


def flattened(log_matrix: Tensor, flattening: Tensor) -> Tensor:
    """sym6 (..., 6) with its traceless part T made T/√(1 + f ‖T‖²), f = ``flattening`` (...,) ≥ 0; the trace stays.

    >>> flattened(torch.tensor([[3.0, 1.0, 2.0, 0.0, 0.0, 0.0]]), torch.tensor([1.5]))
    tensor([[2.5000, 1.5000, 2.0000, 0.0000, 0.0000, 0.0000]])
    """
    mean, traceless = split_trace(log_matrix)
    norm2 = 2.0 * traceless.square().sum(-1) - traceless[..., :3].square().sum(-1)
    scaled = traceless * torch.rsqrt(1.0 + flattening * norm2).unsqueeze(-1)
    return torch.cat([scaled[..., :3] + mean.unsqueeze(-1), scaled[..., 3:]], dim=-1)


def exp_terms(double: bool) -> int:
    """Highest power of B in the series of exp(B): rounding level for ‖B‖_F ≤ 2.5, half the damper's ceiling."""
    return 24 if double else 14


def exp_coefficients(p: Tensor, q: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    """a0, a1, a2 of exp(B) = a0 I + a1 B + a2 B² for traceless B with p = tr(B²)/2, q = det B.

    Horner's rule on the power series with B³ = pB + qI; callers exponentiate B = ±T/2 and square.
    """
    terms = exp_terms(p.dtype == torch.float64)
    a0, a1, a2 = torch.ones_like(p), torch.zeros_like(p), torch.zeros_like(p)
    for j in range(terms):
        k = float(terms - j)
        a0, a1, a2 = 1.0 + q * a2 / k, (a0 + p * a2) / k, a1 / k
    return a0, a1, a2


def _invariants(b: Tensor) -> Tuple[Tensor, Tensor]:
    """p = tr(B²)/2 and q = det B of a traceless sym6 matrix."""
    xx, yy, zz, yz, xz, xy = b.unbind(-1)
    p = 0.5 * (xx * xx + yy * yy + zz * zz) + (yz * yz + xz * xz + xy * xy)
    q = xx * (yy * zz - yz * yz) - xy * (xy * zz - yz * xz) + xz * (xy * yz - yy * xz)
    return p, q


def half_exp_matvec(log_matrix: Tensor, v: Tensor, sign: float, steps: int = 1) -> Tensor:
    """exp(± L/2) v for sym6 L (..., 6) and v (..., 3): the symmetric square root applied to a vector.

    With ``sign=-1`` its squared norm is the Mahalanobis form vᵀ exp(-L) v, non-negative by
    construction, with an error that grows with the square root of the condition number.

    Accurate while the traceless part of L has Frobenius norm ≤ 5 · ``steps``: exp(± L/2) is then applied in so many
    equal steps.
    """
    mean, traceless = split_trace(log_matrix)
    b = traceless * (0.5 * sign / steps)
    p, q = _invariants(b)
    a0, a1, a2 = exp_coefficients(p, q)
    for _ in range(steps):
        bv = sym6_matvec(b, v)
        bbv = sym6_matvec(b, bv)
        v = a0.unsqueeze(-1) * v + a1.unsqueeze(-1) * bv + a2.unsqueeze(-1) * bbv
    return torch.exp(0.5 * sign * mean).unsqueeze(-1) * v


def exp_sym6(log_matrix: Tensor, squarings: int = 0) -> Tensor:
    """exp(L) as sym6 for sym6 L (..., 6), as the square of exp(L/2): SPD by construction.

    Accurate to rounding while the traceless part of L has Frobenius norm ≤ 5 · 2^``squarings``; with none, that is
    what the damper guarantees.

    >>> exp_sym6(torch.log(torch.tensor([[2.0, 3.0, 4.0, 1.0, 1.0, 1.0]])))
    tensor([[2., 3., 4., 0., 0., 0.]])
    """
    mean, traceless = split_trace(log_matrix)
    b = traceless * 0.5 ** (squarings + 1)
    p, q = _invariants(b)
    a0, a1, a2 = exp_coefficients(p, q)
    root = a1.unsqueeze(-1) * b + a2.unsqueeze(-1) * sym6_square(b)
    parts: List[Tensor] = [root[..., :3] + a0.unsqueeze(-1), root[..., 3:]]
    result = sym6_square(torch.cat(parts, dim=-1))
    for _ in range(squarings):
        result = sym6_square(result)
    return torch.exp(mean).unsqueeze(-1) * result


def squarings_for(log_matrix: Tensor) -> int:
    """How many squarings `exp_sym6` needs for sym6 L (..., 6); reads the numbers, hence not for traced code."""
    _, traceless = split_trace(log_matrix.detach())
    norm2 = 2.0 * traceless.square().sum(-1) - traceless[..., :3].square().sum(-1)
    largest = float(torch.nan_to_num(norm2, nan=0.0, posinf=0.0).amax().sqrt()) if norm2.numel() else 0.0
    return max(0, math.ceil(math.log2(largest / 5.0))) if largest > 5.0 * (1.0 + 1e-5) else 0


def log_spd(matrix: Tensor) -> Tensor:
    """Logarithm (N, 6) of symmetric positive matrices as sym6 (N, 6).

    Its first derivative is exact, also where eigenvalues coincide; it has no second one. Eigenvalues below 1e-14
    times the largest count as that: a sample covariance may be singular. A matrix that is not finite gives NaN.
    """
    given = sym6_to_matrix(matrix)
    full = given.detach()
    finite = torch.isfinite(full).flatten(1).all(1)
    # Eigensolvers raise at NaN.
    eye = torch.eye(3, dtype=full.dtype, device=full.device)
    values, axes = torch.linalg.eigh(torch.where(finite[:, None, None], full, eye))
    values = torch.maximum(values, 1e-14 * values[:, 2:])
    log = (axes * torch.log(values).unsqueeze(-2)) @ axes.transpose(-1, -2)
    log = torch.where(finite[:, None, None], log, torch.full_like(log, float("nan")))
    if matrix.requires_grad:
        # Along the axes, what changes is divided by the logarithmic mean of two eigenvalues (Daleckii and Krein).
        change = axes.transpose(-1, -2) @ (given - full) @ axes
        smaller = torch.minimum(values.unsqueeze(-1), values.unsqueeze(-2))
        excess = torch.maximum(values.unsqueeze(-1), values.unsqueeze(-2)) / smaller - 1.0
        ratio = torch.where(excess > 0.0, torch.log1p(excess) / torch.where(excess > 0.0, excess, 1.0), 1.0)
        log = log + axes @ (change * ratio / smaller) @ axes.transpose(-1, -2)
    return matrix_to_sym6(log)


def exp_log_spd(log_matrix: Tensor) -> Tensor:
    """exp(L) (..., 3, 3) for sym6 L (..., 6) of any conditioning, by eigenvectors; `exp_sym6` needs none."""
    values, axes = torch.linalg.eigh(sym6_to_matrix(log_matrix))
    return (axes * values.exp().unsqueeze(-2)) @ axes.transpose(-1, -2)


def log_of_widened(log_matrix: Tensor, factor: Tensor, floor: Tensor) -> Tensor:
    """log(factor · exp(L) + floor · I) as sym6 for sym6 L (..., 6), factor > 0 and floor ≥ 0 (...,).

    What the floor adds to L is computed by itself, in float64: it keeps its digits however small it is, and L those of
    its own. With a floor, eigenvectors are needed; gradients are then not to be trusted at degenerate eigenvalues.

    >>> log_of_widened(torch.zeros(1, 6), torch.tensor([2.0]), torch.tensor([1.0])).exp()
    tensor([[3., 3., 3., 1., 1., 1.]])
    """
    log_factor = torch.log(factor).unsqueeze(-1)
    widened = torch.cat([log_matrix[..., :3] + log_factor, log_matrix[..., 3:]], dim=-1)
    if not bool((floor > 0.0).any()):
        return widened
    eigenvalues, axes = torch.linalg.eigh(sym6_to_matrix(log_matrix.double()))
    added = torch.log1p((floor / factor).double().unsqueeze(-1) * torch.exp(-eigenvalues))
    matrix = (axes * added.unsqueeze(-2)) @ axes.transpose(-1, -2)
    return widened + matrix_to_sym6(matrix).to(widened.dtype)
