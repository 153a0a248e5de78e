"""What runs on the GPU: one fused kernel each way for the loss (the backward recomputes everything), one for the map.

One atom per thread, so that nothing but inputs and results touches memory: in float32 52 bytes an atom for the
loss, 96 for its gradients, 92 for the distribution. No kernel asks the host for anything. The maximum and minimum of
Triton drop NaN, hence the comparisons here. Tensors stand left of constants, because the interpreter takes a constant
times a tensor for a constant. `triton_launch` calls these kernels.
"""

import math

import triton
import triton.language as tl

from e2ip_plugins.maths.kernels.constants import EXP_TERMS, GAMMA_REST, LOG_2PI, LOG_TERMS, ROOT3, SMALL_Z
from e2ip_plugins.maths.student import MIN_KAPPA, MIN_NU

_SINGLE_TERMS, _DOUBLE_TERMS = (tl.constexpr(terms) for terms in EXP_TERMS)
_PER_FACTORIAL = tl.constexpr(tuple(1.0 / math.factorial(k) for k in range(EXP_TERMS[1] + 1)))
_SINGLE_REST, _DOUBLE_REST = (tl.constexpr(rest) for rest in GAMMA_REST)
_SINGLE_REST_TERMS, _DOUBLE_REST_TERMS = (tl.constexpr(len(rest)) for rest in GAMMA_REST)
_SINGLE_LOG_TERMS, _DOUBLE_LOG_TERMS = (tl.constexpr(terms) for terms in LOG_TERMS)
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
def _damp_vector(t, KNEE: tl.constexpr, CEILING: tl.constexpr):
    """Damped t, direction t/max(‖t‖, τ), φ/‖t‖ and φ'."""
    t1, t2, t3, t4, t5 = t
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
    t1, t2 = tl.where(inside, t1, phi * n1), tl.where(inside, t2, phi * n2)
    t3, t4 = tl.where(inside, t3, phi * n3), tl.where(inside, t4, phi * n4)
    t5 = tl.where(inside, t5, phi * n5)
    ratio = tl.where(inside, 1.0, phi / norm)
    return (t1, t2, t3, t4, t5), (n1, n2, n3, n4, n5), ratio, tl.where(inside, 1.0, slope)


@triton.jit
def _load3(pointer, stride, mask):
    return (
        tl.load(pointer, mask=mask, other=0.0),
        tl.load(pointer + stride, mask=mask, other=0.0),
        tl.load(pointer + 2 * stride, mask=mask, other=0.0),
    )


@triton.jit
def _store(pointer, values, mask, COUNT: tl.constexpr):
    for k in tl.static_range(COUNT):
        tl.store(pointer + k, values[k], mask=mask)


@triton.jit
def _load_atom(
    pointer, stride, mask,
    S_KNEE: tl.constexpr, S_CEILING: tl.constexpr, T_KNEE: tl.constexpr, T_CEILING: tl.constexpr, COUPLED: tl.constexpr,
):  # fmt: skip
    """An atom's damped s and t, ν and κ, whether a damper is past its knee, and what the gradients of all these need.

    s is NaN where it or the evidence is not finite (see `plain.split`).
    """
    s, raw_nu, raw_kappa = _load3(pointer, stride, mask)
    t1, t2, t3 = _load3(pointer + 3 * stride, stride, mask)
    t4 = tl.load(pointer + 6 * stride, mask=mask, other=0.0)
    t5 = tl.load(pointer + 7 * stride, mask=mask, other=0.0)
    return _atom(s, raw_nu, raw_kappa, (t1, t2, t3, t4, t5), S_KNEE, S_CEILING, T_KNEE, T_CEILING, COUPLED)


@triton.jit
def _atom(
    s, raw_nu, raw_kappa, t,
    S_KNEE: tl.constexpr, S_CEILING: tl.constexpr, T_KNEE: tl.constexpr, T_CEILING: tl.constexpr, COUPLED: tl.constexpr,
):  # fmt: skip
    """As `_load_atom`, of an atom's raw coefficients."""
    if COUPLED:
        raw_kappa = raw_nu
    s = s + ((s - s) + (raw_nu - raw_nu) + (raw_kappa - raw_kappa))
    t1, t2, t3, t4, t5 = t
    past = (tl.abs(s) > S_KNEE) | (t1 * t1 + t2 * t2 + t3 * t3 + t4 * t4 + t5 * t5 > T_KNEE * T_KNEE)
    s, slope_s = _damp(s, S_KNEE, S_CEILING)
    t, direction, ratio, slope_t = _damp_vector((t1, t2, t3, t4, t5), T_KNEE, T_CEILING)
    nu, slope_nu = _softplus(raw_nu)
    kappa, slope_kappa = _softplus(raw_kappa)
    slopes = (slope_s, slope_nu, slope_kappa, slope_t)
    return s, t, nu + _MIN_NU, kappa + _MIN_KAPPA, past, slopes, direction, ratio


@triton.jit
def _half_matrix(t, SIGN: tl.constexpr):
    """B = ½ SIGN Σ t_k Q_k as xx, yy, zz, yz, xz, xy, and its p and q."""
    h2: tl.constexpr = 0.5 * SIGN * _PER_ROOT2
    h6: tl.constexpr = 0.5 * SIGN * _PER_ROOT6
    xz, xy, yz = t[0] * h2, t[1] * h2, t[3] * h2
    diagonal, difference = t[2] * h6, t[4] * h2
    xx, yy, zz = -diagonal - difference, 2.0 * diagonal, difference - diagonal
    p = 0.5 * (xx * xx + yy * yy + zz * zz) + (yz * yz + xz * xz + xy * xy)
    q = xx * (yy * zz - yz * yz) - xy * (xy * zz - yz * xz) + xz * (xy * yz - yy * xz)
    return (xx, yy, zz, yz, xz, xy), p, q


@triton.jit
def _exponential(p, q, DOUBLE: tl.constexpr):
    """a0, a1, a2 of exp(B), by Horner's rule X ← I/k! + B X with B³ = pB + qI, their derivatives in p and in q."""
    terms: tl.constexpr = _DOUBLE_TERMS if DOUBLE else _SINGLE_TERMS
    zero = p * 0.0
    a0, a1, a2 = zero + _PER_FACTORIAL[terms], zero, zero
    p0, p1, p2, q0, q1, q2 = zero, zero, zero, zero, zero, zero
    for i in tl.static_range(terms):
        p0, p1, p2 = q * p2, p0 + a2 + p * p2, p1
        q0, q1, q2 = a2 + q * q2, q0 + p * q2, q1
        a0, a1, a2 = q * a2 + _PER_FACTORIAL[terms - 1 - i], a0 + p * a2, a1
    return (a0, a1, a2), (p0, p1, p2), (q0, q1, q2)


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
def _dot(u, v):
    return u[0] * v[0] + u[1] * v[1] + u[2] * v[2]


@triton.jit
def _combine(a, u, v, w):
    """a0 u + a1 v + a2 w."""
    return (
        a[0] * u[0] + a[1] * v[0] + a[2] * w[0],
        a[0] * u[1] + a[1] * v[1] + a[2] * w[1],
        a[0] * u[2] + a[1] * v[2] + a[2] * w[2],
    )


@triton.jit
def _apply(b, v):
    xx, yy, zz, yz, xz, xy = b
    return xx * v[0] + xy * v[1] + xz * v[2], xy * v[0] + yy * v[1] + yz * v[2], xz * v[0] + yz * v[1] + zz * v[2]


@triton.jit
def _square(b):
    xx, yy, zz, yz, xz, xy = b
    return (
        xx * xx + xy * xy + xz * xz,
        xy * xy + yy * yy + yz * yz,
        xz * xz + yz * yz + zz * zz,
        xy * xz + yy * yz + yz * zz,
        xx * xz + xy * yz + xz * zz,
        xx * xy + xy * yy + xz * yz,
    )


@triton.jit
def _mahalanobis(s, t, residual_ptr, stride, per_unit, mask, DOUBLE: tl.constexpr):
    """M = e^{-s/√3} ‖y‖² and e^{-s/√3}; v = residual/σ_ref, Bv, B²v and y = exp(B) v; B; what `_exponential` gives."""
    v0, v1, v2 = _load3(residual_ptr, stride, mask)
    v = (v0 * per_unit, v1 * per_unit, v2 * per_unit)
    b, p, q = _half_matrix(t, -1.0)
    a, a_by_p, a_by_q = _exponential(p, q, DOUBLE)
    bv = _apply(b, v)
    bbv = _apply(b, bv)
    y = _combine(a, v, bv, bbv)
    shrink = tl.exp(s * -_PER_ROOT3)
    return shrink * _dot(y, y), shrink, v, bv, bbv, y, b, a, a_by_p, a_by_q


@triton.jit
def forward_kernel(
    coefficients_ptr, residual_ptr, unit_ptr, nll_ptr, regulariser_ptr,
    n, c_row, c_column, r_row, r_column, unit_stride,
    S_KNEE: tl.constexpr, S_CEILING: tl.constexpr, T_KNEE: tl.constexpr, T_CEILING: tl.constexpr, COUPLED: tl.constexpr,
    DOUBLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    atom = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = atom < n
    s, t, nu, kappa, _, _, _, _ = _load_atom(
        coefficients_ptr + atom * c_row, c_column, mask, S_KNEE, S_CEILING, T_KNEE, T_CEILING, COUPLED
    )
    unit = tl.load(unit_ptr + atom * unit_stride, mask=mask, other=1.0)
    mahalanobis, _, v, _, _, _, _, _, _, _ = _mahalanobis(
        s, t, residual_ptr + atom * r_row, r_column, 1.0 / unit, mask, DOUBLE
    )
    inverse = 1.0 / (nu - 1.5)
    scale = nu * (1.0 + 1.0 / kappa)
    rest, _ = _gamma_rest(inverse, DOUBLE)
    nll = 1.5 * tl.log(scale * inverse) - rest + s * _HALF_ROOT3 + 0.5 * (nu + 1.0) * _log1p(mahalanobis / scale)
    tl.store(nll_ptr + atom, nll + (3.0 * tl.log(unit) + _CONSTANT), mask=mask)
    tl.store(regulariser_ptr + atom, (nu + kappa) * tl.sqrt(_dot(v, v)), mask=mask)


@triton.jit
def backward_kernel(
    coefficients_ptr, residual_ptr, unit_ptr, by_nll_ptr, by_regulariser_ptr, by_coefficients_ptr, by_residual_ptr,
    n, c_row, c_column, r_row, r_column, unit_stride, g_stride, h_stride,
    S_KNEE: tl.constexpr, S_CEILING: tl.constexpr, T_KNEE: tl.constexpr, T_CEILING: tl.constexpr, COUPLED: tl.constexpr,
    DOUBLE: tl.constexpr, BLOCK: tl.constexpr, REGULARISER: tl.constexpr,
):  # fmt: skip
    # More than 60 lines: a kernel is one function, whose values stay in registers.
    atom = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = atom < n
    s, t, nu, kappa, _, slopes, direction, ratio = _load_atom(
        coefficients_ptr + atom * c_row, c_column, mask, S_KNEE, S_CEILING, T_KNEE, T_CEILING, COUPLED
    )
    slope_s, slope_nu, slope_kappa, slope_t = slopes
    per_unit = 1.0 / tl.load(unit_ptr + atom * unit_stride, mask=mask, other=1.0)
    mahalanobis, shrink, v, bv, bbv, y, b, a, a_by_p, a_by_q = _mahalanobis(
        s, t, residual_ptr + atom * r_row, r_column, per_unit, mask, DOUBLE
    )
    by_nll = tl.load(by_nll_ptr + atom * g_stride, mask=mask, other=0.0)

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

    # ½ ∂‖y‖²/∂B: through (p, q), with ∂p/∂B = B and ∂q/∂B = B² up to a trace, and through B itself.
    pull = 2.0 * half * z_over_m * shrink * by_nll
    by = _apply(b, y)
    krylov = (_dot(v, y), _dot(bv, y), _dot(bbv, y))
    by_p, by_q = _dot(a_by_p, krylov), _dot(a_by_q, krylov)
    xx, yy, zz, yz, xz, xy = b
    x0, x1, x2, x3, x4, x5 = _square(b)
    v0, v1, v2 = v
    y0, y1, y2 = y
    l0, l1, l2 = a[1] * v0 + a[2] * bv[0], a[1] * v1 + a[2] * bv[1], a[1] * v2 + a[2] * bv[2]
    r0, r1, r2 = a[2] * by[0], a[2] * by[1], a[2] * by[2]
    g0 = by_p * xx + by_q * x0 + l0 * y0 + v0 * r0
    g1 = by_p * yy + by_q * x1 + l1 * y1 + v1 * r1
    g2 = by_p * zz + by_q * x2 + l2 * y2 + v2 * r2
    g3 = 2.0 * (by_p * yz + by_q * x3) + l1 * y2 + l2 * y1 + v1 * r2 + v2 * r1
    g4 = 2.0 * (by_p * xz + by_q * x4) + l0 * y2 + l2 * y0 + v0 * r2 + v2 * r0
    g5 = 2.0 * (by_p * xy + by_q * x5) + l0 * y1 + l1 * y0 + v0 * r1 + v1 * r0
    h2 = pull * (-0.5 * _PER_ROOT2)
    h6 = pull * (-0.5 * _PER_ROOT6)
    d1, d2, d3, d4, d5 = h2 * g4, h2 * g5, h6 * (2.0 * g1 - g0 - g2), h2 * g3, h2 * (g2 - g0)
    n1, n2, n3, n4, n5 = direction
    along = (slope_t - ratio) * (n1 * d1 + n2 * d2 + n3 * d3 + n4 * d4 + n5 * d5)
    out = by_coefficients_ptr + atom * 8
    tl.store(out, by_s, mask=mask)
    d = (d1, d2, d3, d4, d5)
    for k in tl.static_range(5):
        tl.store(out + 3 + k, ratio * d[k] + along * direction[k], mask=mask)

    # exp(2B) v = exp(B) y
    e0, e1, e2 = _combine(a, y, by, _apply(b, by))
    e0, e1, e2 = pull * e0, pull * e1, pull * e2
    if REGULARISER:
        weight = tl.load(by_regulariser_ptr + atom * h_stride, mask=mask, other=0.0)
        square = _dot(v, v)
        norm = tl.sqrt(square)
        # At zero residual the factor multiplies v = 0.
        positive = tl.where(square == 0.0, 1.0, norm)
        by_nu += weight * norm
        by_kappa += weight * norm
        factor = weight * (nu + kappa) / positive
        e0, e1, e2 = e0 + factor * v0, e1 + factor * v1, e2 + factor * v2
    _store(by_residual_ptr + atom * 3, (per_unit * e0, per_unit * e1, per_unit * e2), mask, 3)
    if COUPLED:
        tl.store(out + 1, (by_nu + by_kappa) * slope_nu, mask=mask)
        tl.store(out + 2, 0.0, mask=mask)
    else:
        tl.store(out + 1, by_nu * slope_nu, mask=mask)
        tl.store(out + 2, by_kappa * slope_kappa, mask=mask)


@triton.jit
def _spread(s, t, unit, flattening, DOUBLE: tl.constexpr):
    """log Σ0 and Σ0 as sym6 of damped coefficients."""
    t1, t2, t3, t4, t5 = t
    shape = 1.0 / tl.sqrt(1.0 + flattening * (t1 * t1 + t2 * t2 + t3 * t3 + t4 * t4 + t5 * t5))
    b, p, q = _half_matrix((shape * t1, shape * t2, shape * t3, shape * t4, shape * t5), 1.0)
    a, _, _ = _exponential(p, q, DOUBLE)
    xx, yy, zz, yz, xz, xy = b
    x0, x1, x2, x3, x4, x5 = _square(b)
    x0, x1, x2, x3, x4, x5 = _square((
        a[0] + a[1] * xx + a[2] * x0, a[0] + a[1] * yy + a[2] * x1, a[0] + a[1] * zz + a[2] * x2,
        a[1] * yz + a[2] * x3, a[1] * xz + a[2] * x4, a[1] * xy + a[2] * x5,
    ))  # fmt: skip
    mean = s * _PER_ROOT3
    scale = tl.exp(mean) * unit * unit
    mean = mean + 2.0 * tl.log(unit)
    log_sigma0 = (2.0 * xx + mean, 2.0 * yy + mean, 2.0 * zz + mean, 2.0 * yz, 2.0 * xz, 2.0 * xy)
    return log_sigma0, (scale * x0, scale * x1, scale * x2, scale * x3, scale * x4, scale * x5)


@triton.jit
def distribution_kernel(
    coefficients_ptr, flattening_ptr, unit_ptr, log_ptr, sigma_ptr, nu_ptr, kappa_ptr, plateau_ptr,
    n, c_row, c_column, flattening_stride, unit_stride,
    S_KNEE: tl.constexpr, S_CEILING: tl.constexpr, T_KNEE: tl.constexpr, T_CEILING: tl.constexpr, COUPLED: tl.constexpr,
    DOUBLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    atom = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = atom < n
    s, t, nu, kappa, past, _, _, _ = _load_atom(
        coefficients_ptr + atom * c_row, c_column, mask, S_KNEE, S_CEILING, T_KNEE, T_CEILING, COUPLED
    )
    unit = tl.load(unit_ptr + atom * unit_stride, mask=mask, other=1.0)
    flattening = tl.load(flattening_ptr + atom * flattening_stride, mask=mask, other=0.0)
    log_sigma0, sigma0 = _spread(s, t, unit, flattening, DOUBLE)
    _store(log_ptr + atom * 6, log_sigma0, mask, 6)
    _store(sigma_ptr + atom * 6, sigma0, mask, 6)
    tl.store(nu_ptr + atom, nu, mask=mask)
    tl.store(kappa_ptr + atom, kappa, mask=mask)
    tl.store(plateau_ptr + atom, tl.where(past, 1.0, 0.0), mask=mask)
