"""What runs on the GPU: one fused kernel each way for the loss (the backward recomputes everything), one for the map.

One atom per thread, so that nothing but inputs and results touches memory: in float32 52 bytes an atom for the
loss, 96 for its gradients, 92 for the distribution. No kernel asks the host for anything. The maximum and minimum of
Triton drop NaN, hence the comparisons here. Tensors stand left of constants, because the interpreter takes a constant
times a tensor for a constant. `triton_launch` calls these kernels, `triton_operators` makes operators of them.
"""

import math

import triton
import triton.language as tl

from e2ip_plugins.maths.kernels.constants import (
    DOUBLE_GAMMA_REST,
    DOUBLE_LOG_TERMS,
    DOUBLE_TERMS,
    LOG_2PI,
    ROOT3,
    SINGLE_GAMMA_REST,
    SINGLE_LOG_TERMS,
    SINGLE_TERMS,
    SMALL_Z,
)
from e2ip_plugins.maths.student import MIN_KAPPA, MIN_NU

_SINGLE_TERMS = tl.constexpr(SINGLE_TERMS)
_DOUBLE_TERMS = tl.constexpr(DOUBLE_TERMS)
_PER_FACTORIAL = tl.constexpr(tuple(1.0 / math.factorial(k) for k in range(DOUBLE_TERMS + 1)))
_SINGLE_REST = tl.constexpr(SINGLE_GAMMA_REST)
_DOUBLE_REST = tl.constexpr(DOUBLE_GAMMA_REST)
_SINGLE_REST_TERMS = tl.constexpr(len(SINGLE_GAMMA_REST))
_DOUBLE_REST_TERMS = tl.constexpr(len(DOUBLE_GAMMA_REST))
_SINGLE_LOG_TERMS = tl.constexpr(SINGLE_LOG_TERMS)
_DOUBLE_LOG_TERMS = tl.constexpr(DOUBLE_LOG_TERMS)
_SMALL_Z = tl.constexpr(SMALL_Z)
_MIN_NU = tl.constexpr(MIN_NU)
_MIN_KAPPA = tl.constexpr(MIN_KAPPA)
_HALF_ROOT3 = tl.constexpr(0.5 * ROOT3)
_PER_ROOT3 = tl.constexpr(1.0 / ROOT3)
_CONSTANT = tl.constexpr(1.5 * LOG_2PI)
_PER_ROOT2 = tl.constexpr(1.0 / math.sqrt(2.0))
_PER_ROOT6 = tl.constexpr(1.0 / math.sqrt(6.0))


@triton.jit
def _log1p(x):
    # Kahan: the rounding error of 1 + x cancels in the quotient.
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def _softplus(x):
    """softplus and its derivative."""
    e = tl.exp(-tl.abs(x))
    per = 1.0 / (1.0 + e)
    return tl.where(x > 0.0, x, 0.0) + _log1p(e), tl.where(x > 0.0, per, e * per)


@triton.jit
def _saturate(excess, width: tl.constexpr):
    """width · tanh(excess/width) and its derivative, for excess ≥ 0."""
    e = tl.exp(excess * (-2.0 / width))
    per = 1.0 / (1.0 + e)
    return (1.0 - e) * per * width, 4.0 * e * per * per


@triton.jit
def _damp(s, KNEE: tl.constexpr, CEILING: tl.constexpr):
    """φ(s) and φ'(s)."""
    size = tl.abs(s)
    past = size > KNEE
    value, slope = _saturate(tl.where(past, size - KNEE, 0.0), CEILING - KNEE)
    value = tl.where(s > 0.0, value + KNEE, -(value + KNEE))
    return tl.where(past, value, s), tl.where(past, slope, 1.0)


@triton.jit
def _damp_vector(t1, t2, t3, t4, t5, KNEE: tl.constexpr, CEILING: tl.constexpr):
    """Damped t, direction t/max(‖t‖, τ), φ/‖t‖ and φ'."""
    largest = tl.maximum(tl.maximum(tl.maximum(tl.abs(t1), tl.abs(t2)), tl.maximum(tl.abs(t3), tl.abs(t4))), tl.abs(t5))
    largest = tl.maximum(largest, KNEE)
    per = 1.0 / largest
    # Divided, not multiplied by the reciprocal, which is denormal near the largest float32.
    n1, n2, n3, n4, n5 = t1 / largest, t2 / largest, t3 / largest, t4 / largest, t5 / largest
    norm2 = n1 * n1 + n2 * n2 + n3 * n3 + n4 * n4 + n5 * n5
    floor2 = (per * KNEE) * (per * KNEE)
    inside = norm2 <= floor2
    root = tl.sqrt(tl.where(inside, floor2, norm2))
    norm = largest * root
    value, slope = _saturate(tl.where(inside, 0.0, norm - KNEE), CEILING - KNEE)
    phi = value + KNEE
    per = 1.0 / root
    n1, n2, n3, n4, n5 = n1 * per, n2 * per, n3 * per, n4 * per, n5 * per
    t1 = tl.where(inside, t1, phi * n1)
    t2 = tl.where(inside, t2, phi * n2)
    t3 = tl.where(inside, t3, phi * n3)
    t4 = tl.where(inside, t4, phi * n4)
    t5 = tl.where(inside, t5, phi * n5)
    ratio = tl.where(inside, 1.0, phi / norm)
    return t1, t2, t3, t4, t5, n1, n2, n3, n4, n5, ratio, tl.where(inside, 1.0, slope)


@triton.jit
def _load_scalars(
    s_ptr, nu_ptr, kappa_ptr, atom, s_stride, nu_stride, kappa_stride, mask, COUPLED: tl.constexpr
):  # fmt: skip
    """s, raw ν and raw κ; s is NaN where one of them is not finite (see `plain.nan_where_not_finite`)."""
    s = tl.load(s_ptr + atom * s_stride, mask=mask, other=0.0)
    nu = tl.load(nu_ptr + atom * nu_stride, mask=mask, other=0.0)
    kappa = nu
    if not COUPLED:
        kappa = tl.load(kappa_ptr + atom * kappa_stride, mask=mask, other=0.0)
    return s + ((s - s) + (nu - nu) + (kappa - kappa)), nu, kappa


@triton.jit
def _half_matrix(t1, t2, t3, t4, t5, SIGN: tl.constexpr):
    """B = ½ SIGN Σ t_k Q_k as xx, yy, zz, yz, xz, xy, and its p and q."""
    h2: tl.constexpr = 0.5 * SIGN * _PER_ROOT2
    h6: tl.constexpr = 0.5 * SIGN * _PER_ROOT6
    xz, xy, yz = t1 * h2, t2 * h2, t4 * h2
    diagonal, difference = t3 * h6, t5 * h2
    xx, yy, zz = -diagonal - difference, 2.0 * diagonal, difference - diagonal
    p = 0.5 * (xx * xx + yy * yy + zz * zz) + (yz * yz + xz * xz + xy * xy)
    q = xx * (yy * zz - yz * yz) - xy * (xy * zz - yz * xz) + xz * (xy * yz - yy * xz)
    return xx, yy, zz, yz, xz, xy, p, q


@triton.jit
def _exponential(p, q, DOUBLE: tl.constexpr):
    """a0, a1, a2 of exp(B): Horner's rule X ← I/k! + B X with B³ = pB + qI."""
    terms: tl.constexpr = _DOUBLE_TERMS if DOUBLE else _SINGLE_TERMS
    a0, a1, a2 = p * 0.0 + _PER_FACTORIAL[terms], p * 0.0, p * 0.0
    for i in tl.static_range(terms):
        a0, a1, a2 = q * a2 + _PER_FACTORIAL[terms - 1 - i], a0 + p * a2, a1
    return a0, a1, a2


@triton.jit
def _exponential_gradients(p, q, DOUBLE: tl.constexpr):
    """a0, a1, a2 and their derivatives in p and in q."""
    terms: tl.constexpr = _DOUBLE_TERMS if DOUBLE else _SINGLE_TERMS
    zero = p * 0.0
    a0, a1, a2 = zero + _PER_FACTORIAL[terms], zero, zero
    p0, p1, p2, q0, q1, q2 = zero, zero, zero, zero, zero, zero
    for i in tl.static_range(terms):
        p0, p1, p2 = q * p2, p0 + a2 + p * p2, p1
        q0, q1, q2 = a2 + q * q2, q0 + p * q2, q1
        a0, a1, a2 = q * a2 + _PER_FACTORIAL[terms - 1 - i], a0 + p * a2, a1
    return a0, a1, a2, p0, p1, p2, q0, q1, q2


@triton.jit
def _gamma_rest(inverse, DOUBLE: tl.constexpr):
    """R(u) and ∂R/∂ν for u = 4/(ν-3/2)²."""
    c: tl.constexpr = _DOUBLE_REST if DOUBLE else _SINGLE_REST
    terms: tl.constexpr = _DOUBLE_REST_TERMS if DOUBLE else _SINGLE_REST_TERMS
    u = 4.0 * inverse * inverse
    value, slope = u * 0.0 + c[terms - 1], u * 0.0 + terms * c[terms - 1]
    for i in tl.static_range(1, terms):
        value = value * u + c[terms - 1 - i]
        slope = slope * u + (terms - i) * c[terms - 1 - i]
    return value * u, -2.0 * inverse * u * slope


@triton.jit
def _log_minus_z(log_term, z, DOUBLE: tl.constexpr):
    """log1p(x) - z without cancellation."""
    terms: tl.constexpr = _DOUBLE_LOG_TERMS if DOUBLE else _SINGLE_LOG_TERMS
    total = z * 0.0 + 1.0 / terms
    for i in tl.static_range(1, terms - 1):
        total = total * z + 1.0 / (terms - i)
    return tl.where(z < _SMALL_Z, total * z * z, log_term - z)


@triton.jit
def _load5(pointer, row, stride, mask):
    base = pointer + row
    t1 = tl.load(base, mask=mask, other=0.0)
    t2 = tl.load(base + stride, mask=mask, other=0.0)
    t3 = tl.load(base + 2 * stride, mask=mask, other=0.0)
    t4 = tl.load(base + 3 * stride, mask=mask, other=0.0)
    t5 = tl.load(base + 4 * stride, mask=mask, other=0.0)
    return t1, t2, t3, t4, t5


@triton.jit
def _apply(xx, yy, zz, yz, xz, xy, v0, v1, v2):
    return xx * v0 + xy * v1 + xz * v2, xy * v0 + yy * v1 + yz * v2, xz * v0 + yz * v1 + zz * v2


@triton.jit
def _square(xx, yy, zz, yz, xz, xy):
    return (
        xx * xx + xy * xy + xz * xz,
        xy * xy + yy * yy + yz * yz,
        xz * xz + yz * yz + zz * zz,
        xy * xz + yy * yz + yz * zz,
        xx * xz + xy * yz + xz * zz,
        xx * xy + xy * yy + xz * yz,
    )


@triton.jit
def forward_kernel(
    s_ptr, t_ptr, nu_ptr, kappa_ptr, residual_ptr, unit_ptr, nll_ptr, regulariser_ptr, n,
    s_stride, t_row, t_column, nu_stride, kappa_stride, r_row, r_column, unit_stride,
    S_KNEE: tl.constexpr, S_CEILING: tl.constexpr, T_KNEE: tl.constexpr, T_CEILING: tl.constexpr,
    COUPLED: tl.constexpr, DOUBLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    atom = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = atom < n
    s, raw_nu, raw_kappa = _load_scalars(
        s_ptr, nu_ptr, kappa_ptr, atom, s_stride, nu_stride, kappa_stride, mask, COUPLED
    )  # fmt: skip
    s, _ = _damp(s, S_KNEE, S_CEILING)
    t1, t2, t3, t4, t5 = _load5(t_ptr, atom * t_row, t_column, mask)
    t1, t2, t3, t4, t5, _, _, _, _, _, _, _ = _damp_vector(t1, t2, t3, t4, t5, T_KNEE, T_CEILING)
    unit = tl.load(unit_ptr + atom * unit_stride, mask=mask, other=1.0)
    r = residual_ptr + atom * r_row
    v0 = tl.load(r, mask=mask, other=0.0) / unit
    v1 = tl.load(r + r_column, mask=mask, other=0.0) / unit
    v2 = tl.load(r + 2 * r_column, mask=mask, other=0.0) / unit

    xx, yy, zz, yz, xz, xy, p, q = _half_matrix(t1, t2, t3, t4, t5, -1.0)
    a0, a1, a2 = _exponential(p, q, DOUBLE)
    u0, u1, u2 = _apply(xx, yy, zz, yz, xz, xy, v0, v1, v2)
    w0, w1, w2 = _apply(xx, yy, zz, yz, xz, xy, u0, u1, u2)
    y0, y1, y2 = a0 * v0 + a1 * u0 + a2 * w0, a0 * v1 + a1 * u1 + a2 * w1, a0 * v2 + a1 * u2 + a2 * w2
    mahalanobis = tl.exp(s * -_PER_ROOT3) * (y0 * y0 + y1 * y1 + y2 * y2)

    excess, _ = _softplus(raw_nu)
    nu = excess + _MIN_NU
    if not COUPLED:
        excess, _ = _softplus(raw_kappa)
    kappa = excess + _MIN_KAPPA
    inverse = 1.0 / (nu - 1.5)
    scale = nu * (1.0 + 1.0 / kappa)
    rest, _ = _gamma_rest(inverse, DOUBLE)
    nll = 1.5 * tl.log(scale * inverse) - rest + s * _HALF_ROOT3 + 0.5 * (nu + 1.0) * _log1p(mahalanobis / scale)
    tl.store(nll_ptr + atom, nll + (3.0 * tl.log(unit) + _CONSTANT), mask=mask)
    norm = tl.sqrt(v0 * v0 + v1 * v1 + v2 * v2)
    tl.store(regulariser_ptr + atom, (nu + kappa) * norm, mask=mask)


@triton.jit
def backward_kernel(
    s_ptr, t_ptr, nu_ptr, kappa_ptr, residual_ptr, unit_ptr, by_nll_ptr, by_regulariser_ptr,
    by_s_ptr, by_t_ptr, by_nu_ptr, by_kappa_ptr, by_residual_ptr, n,
    s_stride, t_row, t_column, nu_stride, kappa_stride, r_row, r_column, unit_stride, g_stride, h_stride,
    S_KNEE: tl.constexpr, S_CEILING: tl.constexpr, T_KNEE: tl.constexpr, T_CEILING: tl.constexpr,
    PULL_CEILING: tl.constexpr, COUPLED: tl.constexpr, REGULARISER: tl.constexpr,
    DOUBLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    atom = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = atom < n
    s, raw_nu, raw_kappa = _load_scalars(
        s_ptr, nu_ptr, kappa_ptr, atom, s_stride, nu_stride, kappa_stride, mask, COUPLED
    )  # fmt: skip
    s, slope_s = _damp(s, S_KNEE, S_CEILING)
    t1, t2, t3, t4, t5 = _load5(t_ptr, atom * t_row, t_column, mask)
    t1, t2, t3, t4, t5, n1, n2, n3, n4, n5, ratio, slope_t = _damp_vector(t1, t2, t3, t4, t5, T_KNEE, T_CEILING)
    per_unit = 1.0 / tl.load(unit_ptr + atom * unit_stride, mask=mask, other=1.0)
    r = residual_ptr + atom * r_row
    v0 = tl.load(r, mask=mask, other=0.0) * per_unit
    v1 = tl.load(r + r_column, mask=mask, other=0.0) * per_unit
    v2 = tl.load(r + 2 * r_column, mask=mask, other=0.0) * per_unit
    by_nll = tl.load(by_nll_ptr + atom * g_stride, mask=mask, other=0.0)

    xx, yy, zz, yz, xz, xy, p, q = _half_matrix(t1, t2, t3, t4, t5, -1.0)
    a0, a1, a2, p0, p1, p2, q0, q1, q2 = _exponential_gradients(p, q, DOUBLE)
    u0, u1, u2 = _apply(xx, yy, zz, yz, xz, xy, v0, v1, v2)
    w0, w1, w2 = _apply(xx, yy, zz, yz, xz, xy, u0, u1, u2)
    y0, y1, y2 = a0 * v0 + a1 * u0 + a2 * w0, a0 * v1 + a1 * u1 + a2 * w1, a0 * v2 + a1 * u2 + a2 * w2
    shrink = tl.exp(s * -_PER_ROOT3)
    mahalanobis = shrink * (y0 * y0 + y1 * y1 + y2 * y2)

    excess, slope_nu = _softplus(raw_nu)
    nu = excess + _MIN_NU
    slope_kappa = slope_nu
    if not COUPLED:
        excess, slope_kappa = _softplus(raw_kappa)
    kappa = excess + _MIN_KAPPA
    inverse = 1.0 / (nu - 1.5)
    per_kappa = 1.0 / kappa
    scale = nu * (1.0 + per_kappa)
    _, rest_slope = _gamma_rest(inverse, DOUBLE)
    z_over_m = 1.0 / (scale + mahalanobis)
    z = mahalanobis * z_over_m
    half = 0.5 * (nu + 1.0)
    difference = _log_minus_z(_log1p(mahalanobis / scale), z, DOUBLE)
    by_nu = by_nll * (0.5 * difference - (0.5 * z + 2.25 * inverse) / nu - rest_slope)
    by_kappa = by_nll * ((half * z - 1.5) * per_kappa / (1.0 + kappa))
    by_s = by_nll * (half * z * -_PER_ROOT3 + _HALF_ROOT3) * slope_s
    tl.store(by_s_ptr + atom, by_s, mask=mask)

    # ½ ∂‖y‖²/∂B: through (p, q), with ∂p/∂B = B and ∂q/∂B = B² up to a trace, and through B itself.
    pull = 2.0 * half * z_over_m * shrink * by_nll
    b0, b1, b2 = _apply(xx, yy, zz, yz, xz, xy, y0, y1, y2)
    vy, uy, wy = v0 * y0 + v1 * y1 + v2 * y2, u0 * y0 + u1 * y1 + u2 * y2, w0 * y0 + w1 * y1 + w2 * y2
    by_p = p0 * vy + p1 * uy + p2 * wy
    by_q = q0 * vy + q1 * uy + q2 * wy
    x0, x1, x2, x3, x4, x5 = _square(xx, yy, zz, yz, xz, xy)
    l0, l1, l2 = a1 * v0 + a2 * u0, a1 * v1 + a2 * u1, a1 * v2 + a2 * u2
    r0, r1, r2 = a2 * b0, a2 * b1, a2 * b2
    g0 = by_p * xx + by_q * x0 + l0 * y0 + v0 * r0
    g1 = by_p * yy + by_q * x1 + l1 * y1 + v1 * r1
    g2 = by_p * zz + by_q * x2 + l2 * y2 + v2 * r2
    g3 = 2.0 * (by_p * yz + by_q * x3) + l1 * y2 + l2 * y1 + v1 * r2 + v2 * r1
    g4 = 2.0 * (by_p * xz + by_q * x4) + l0 * y2 + l2 * y0 + v0 * r2 + v2 * r0
    g5 = 2.0 * (by_p * xy + by_q * x5) + l0 * y1 + l1 * y0 + v0 * r1 + v1 * r0
    h2 = pull * (-0.5 * _PER_ROOT2)
    h6 = pull * (-0.5 * _PER_ROOT6)
    d1, d2, d3, d4, d5 = h2 * g4, h2 * g5, h6 * (2.0 * g1 - g0 - g2), h2 * g3, h2 * (g2 - g0)
    along = (slope_t - ratio) * (n1 * d1 + n2 * d2 + n3 * d3 + n4 * d4 + n5 * d5)
    out = by_t_ptr + atom * 5
    tl.store(out, ratio * d1 + along * n1, mask=mask)
    tl.store(out + 1, ratio * d2 + along * n2, mask=mask)
    tl.store(out + 2, ratio * d3 + along * n3, mask=mask)
    tl.store(out + 3, ratio * d4 + along * n4, mask=mask)
    tl.store(out + 4, ratio * d5 + along * n5, mask=mask)

    # exp(2B) v = exp(B) y
    w0, w1, w2 = _apply(xx, yy, zz, yz, xz, xy, b0, b1, b2)
    if PULL_CEILING is not None:
        variance = scale / ((nu - 2.0) * shrink) * (1.0 / (PULL_CEILING * PULL_CEILING))
        pull = tl.where(variance > 1.0, pull * variance, pull)
    e0 = pull * (a0 * y0 + a1 * b0 + a2 * w0)
    e1 = pull * (a0 * y1 + a1 * b1 + a2 * w1)
    e2 = pull * (a0 * y2 + a1 * b2 + a2 * w2)
    if REGULARISER:
        weight = tl.load(by_regulariser_ptr + atom * h_stride, mask=mask, other=0.0)
        square = v0 * v0 + v1 * v1 + v2 * v2
        norm = tl.sqrt(square)
        # At zero residual the factor multiplies v = 0.
        positive = tl.where(square == 0.0, 1.0, norm)
        by_nu += weight * norm
        by_kappa += weight * norm
        factor = weight * (nu + kappa) / positive
        e0, e1, e2 = e0 + factor * v0, e1 + factor * v1, e2 + factor * v2
    out = by_residual_ptr + atom * 3
    tl.store(out, per_unit * e0, mask=mask)
    tl.store(out + 1, per_unit * e1, mask=mask)
    tl.store(out + 2, per_unit * e2, mask=mask)
    if COUPLED:
        tl.store(by_nu_ptr + atom, (by_nu + by_kappa) * slope_nu, mask=mask)
    else:
        tl.store(by_nu_ptr + atom, by_nu * slope_nu, mask=mask)
        tl.store(by_kappa_ptr + atom, by_kappa * slope_kappa, mask=mask)


@triton.jit
def distribution_kernel(
    s_ptr, t_ptr, nu_ptr, kappa_ptr, unit_ptr, log_ptr, sigma_ptr, out_nu_ptr, out_kappa_ptr, plateau_ptr, n,
    s_stride, t_row, t_column, nu_stride, kappa_stride, unit_stride,
    S_KNEE: tl.constexpr, S_CEILING: tl.constexpr, T_KNEE: tl.constexpr, T_CEILING: tl.constexpr,
    COUPLED: tl.constexpr, DOUBLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    atom = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = atom < n
    s, raw_nu, raw_kappa = _load_scalars(
        s_ptr, nu_ptr, kappa_ptr, atom, s_stride, nu_stride, kappa_stride, mask, COUPLED
    )  # fmt: skip
    t1, t2, t3, t4, t5 = _load5(t_ptr, atom * t_row, t_column, mask)
    past = (tl.abs(s) > S_KNEE) | (t1 * t1 + t2 * t2 + t3 * t3 + t4 * t4 + t5 * t5 > T_KNEE * T_KNEE)
    tl.store(plateau_ptr + atom, tl.where(past, 1.0, 0.0), mask=mask)
    s, _ = _damp(s, S_KNEE, S_CEILING)
    t1, t2, t3, t4, t5, _, _, _, _, _, _, _ = _damp_vector(t1, t2, t3, t4, t5, T_KNEE, T_CEILING)
    unit = tl.load(unit_ptr + atom * unit_stride, mask=mask, other=1.0)
    xx, yy, zz, yz, xz, xy, p, q = _half_matrix(t1, t2, t3, t4, t5, 1.0)
    a0, a1, a2 = _exponential(p, q, DOUBLE)
    x0, x1, x2, x3, x4, x5 = _square(xx, yy, zz, yz, xz, xy)
    x0, x1, x2, x3, x4, x5 = _square(
        a0 + a1 * xx + a2 * x0, a0 + a1 * yy + a2 * x1, a0 + a1 * zz + a2 * x2,
        a1 * yz + a2 * x3, a1 * xz + a2 * x4, a1 * xy + a2 * x5,
    )  # fmt: skip
    mean = s * _PER_ROOT3
    scale = tl.exp(mean) * unit * unit
    mean = mean + 2.0 * tl.log(unit)
    out = log_ptr + atom * 6
    tl.store(out, 2.0 * xx + mean, mask=mask)
    tl.store(out + 1, 2.0 * yy + mean, mask=mask)
    tl.store(out + 2, 2.0 * zz + mean, mask=mask)
    tl.store(out + 3, 2.0 * yz, mask=mask)
    tl.store(out + 4, 2.0 * xz, mask=mask)
    tl.store(out + 5, 2.0 * xy, mask=mask)
    out = sigma_ptr + atom * 6
    tl.store(out, scale * x0, mask=mask)
    tl.store(out + 1, scale * x1, mask=mask)
    tl.store(out + 2, scale * x2, mask=mask)
    tl.store(out + 3, scale * x3, mask=mask)
    tl.store(out + 4, scale * x4, mask=mask)
    tl.store(out + 5, scale * x5, mask=mask)
    excess, _ = _softplus(raw_nu)
    tl.store(out_nu_ptr + atom, excess + _MIN_NU, mask=mask)
    if not COUPLED:
        excess, _ = _softplus(raw_kappa)
    tl.store(out_kappa_ptr + atom, excess + _MIN_KAPPA, mask=mask)
