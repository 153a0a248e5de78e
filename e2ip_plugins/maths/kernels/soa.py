r"""The scheme in scalar form on structure-of-arrays inputs, for a compiler to turn into one vectorised loop.

Every name is one number per atom (N,); inductor does not vectorise loads with stride 3 or 5, so the
caller transposes. Uncompiled, it is launch-bound: about 600 operations.
"""

import math
from typing import List, Optional, Tuple

import torch
from torch import Tensor

from e2ip_plugins.maths.kernels import series
from e2ip_plugins.maths.kernels.plain import spoil
from e2ip_plugins.maths.kernels.settings import LOG_2PI, MIN_KAPPA, MIN_NU, ROOT3, Constants

_R2, _R6 = math.sqrt(2.0), math.sqrt(6.0)


def _damp(s: Tensor, knee: float, ceiling: float) -> Tuple[Tensor, Tensor]:
    """φ(s) and φ'(s)."""
    core = s.clamp(-knee, knee)
    th = torch.tanh((s - core) / (ceiling - knee))
    return core + (ceiling - knee) * th, 1.0 - th * th


def _damp_vector(t: List[Tensor], knee: float, ceiling: float) -> Tuple[List[Tensor], List[Tensor], Tensor, Tensor]:
    """t φ(‖t‖)/‖t‖, the direction t/max(‖t‖, τ), φ/‖t‖ and φ'."""
    largest = t[0].abs().clamp(min=knee)
    for x in t[1:]:
        largest = torch.maximum(largest, x.abs())
    # ‖t‖² overflows float32 from 1e19 on.
    scaled = [x / largest for x in t]
    norm2 = sum(x * x for x in scaled)
    floor2 = (knee / largest) * (knee / largest)
    inside = norm2 <= floor2
    inverse = torch.rsqrt(torch.maximum(norm2, floor2))
    norm = largest / inverse
    th = torch.tanh((norm - knee) / (ceiling - knee))
    direction = [x * inverse for x in scaled]
    phi = knee + (ceiling - knee) * th
    one = torch.ones_like(th)
    slope = torch.where(inside, one, 1.0 - th * th)
    ratio = torch.where(inside, one, phi / norm)
    value = [torch.where(inside, x, phi * d) for x, d in zip(t, direction, strict=True)]
    return value, direction, ratio, slope


def _half_matrix(t: List[Tensor]) -> Tuple[Tensor, ...]:
    """B = -½ Σ t_k Q_k as xx, yy, zz, yz, xz, xy (see `e2ip_plugins.maths.spd.tangent_to_sym6`)."""
    xz, xy, diagonal, yz, difference = (-0.5 / _R2 * t[0], -0.5 / _R2 * t[1], -0.5 / _R6 * t[2], t[3], t[4])
    yz, difference = -0.5 / _R2 * yz, -0.5 / _R2 * difference
    return -diagonal - difference, 2.0 * diagonal, difference - diagonal, yz, xz, xy


def _project(xx: Tensor, yy: Tensor, zz: Tensor, yz: Tensor, xz: Tensor, xy: Tensor) -> List[Tensor]:
    """-2 ∂/∂t from ∂/∂B, whose off-diagonal entries count twice (yz = G_yz + G_zy)."""
    return [xz / _R2, xy / _R2, (2.0 * yy - xx - zz) / _R6, yz / _R2, (zz - xx) / _R2]


def _apply(b: Tuple[Tensor, ...], v: List[Tensor]) -> List[Tensor]:
    xx, yy, zz, yz, xz, xy = b
    x, y, z = v
    return [xx * x + xy * y + xz * z, xy * x + yy * y + yz * z, xz * x + yz * y + zz * z]


def _square(b: Tuple[Tensor, ...]) -> Tuple[Tensor, ...]:
    xx, yy, zz, yz, xz, xy = b
    return (
        xx * xx + xy * xy + xz * xz,
        xy * xy + yy * yy + yz * yz,
        xz * xz + yz * yz + zz * zz,
        xy * xz + yy * yz + yz * zz,
        xx * xz + xy * yz + xz * zz,
        xx * xy + xy * yy + xz * yz,
    )


def _dot(a: List[Tensor], b: List[Tensor]) -> Tensor:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


def _combine(a: List[Tensor], x: List[Tensor], y: List[Tensor], z: List[Tensor]) -> List[Tensor]:
    return [a[0] * x[i] + a[1] * y[i] + a[2] * z[i] for i in range(3)]


def _exponential(p: Tensor, q: Tensor, double: bool) -> Tuple[List[Tensor], List[Tensor], List[Tensor]]:
    """a, ∂a/∂p and ∂a/∂q of exp(B) = a0 I + a1 B + a2 B²: Horner's rule X ← I/k! + B X with B³ = pB + qI."""
    terms = series.DOUBLE_TERMS if double else series.SINGLE_TERMS
    zero = torch.zeros_like(p)
    a0, a1, a2 = torch.full_like(p, 1.0 / math.factorial(terms)), zero, zero
    p0, p1, p2, q0, q1, q2 = zero, zero, zero, zero, zero, zero
    for k in range(terms - 1, -1, -1):
        p0, p1, p2 = q * p2, p0 + a2 + p * p2, p1
        q0, q1, q2 = a2 + q * q2, q0 + p * q2, q1
        a0, a1, a2 = 1.0 / math.factorial(k) + q * a2, a0 + p * a2, a1
    return [a0, a1, a2], [p0, p1, p2], [q0, q1, q2]


def _gamma_rest(inverse: Tensor, double: bool) -> Tuple[Tensor, Tensor]:
    """R(u) and ∂R/∂ν for u = 4/(ν-3/2)²."""
    u = 4.0 * inverse * inverse
    c = series.DOUBLE_GAMMA_REST if double else series.SINGLE_GAMMA_REST
    value, slope = torch.full_like(u, c[-1]), torch.full_like(u, len(c) * c[-1])
    for k in range(len(c) - 2, -1, -1):
        value = value * u + c[k]
        slope = slope * u + (k + 1) * c[k]
    return value * u, -2.0 * inverse * u * slope


def _log_minus_z(log_term: Tensor, z: Tensor, double: bool) -> Tensor:
    """log1p(x) - z without cancellation."""
    terms = series.DOUBLE_LOG_TERMS if double else series.SINGLE_LOG_TERMS
    total = torch.full_like(z, 1.0 / terms)
    for k in range(terms - 1, 1, -1):
        total = total * z + 1.0 / k
    return torch.where(z < series.SMALL_Z, total * z * z, log_term - z)


def _softplus(x: Tensor) -> Tuple[Tensor, Tensor]:
    """softplus and its derivative."""
    e = torch.exp(-x.abs())
    sigmoid = torch.where(x >= 0, torch.ones_like(e), e) / (1.0 + e)
    return x.clamp(min=0.0) + torch.log1p(e), sigmoid


def loss_and_gradients(
    s: Tensor,
    t: Tensor,
    raw_nu: Tensor,
    raw_kappa: Optional[Tensor],
    residual: Tensor,
    force_unit: Tensor,
    constants: Constants,
    double: bool,
) -> List[Tensor]:
    """NLL, regulariser, then the NLL's gradients in s, raw ν, (raw κ,) five of t, three of the residual.

    Parameters
    ----------
    s, raw_nu, raw_kappa : (N,)
    t, residual : (5, N), (3, N)
        Contiguous; the residual in eV/Å.
    force_unit : () or (N,)
    double : bool
        Whether all of that is float64; decides the number of terms.

    Returns
    -------
    list of (N,)
    """
    s, slope_s = _damp(spoil(s, raw_nu, raw_kappa), constants.scalar_knee, constants.scalar_ceiling)
    t, direction, ratio, slope_t = _damp_vector(
        [t[k] for k in range(5)], constants.tensor_knee, constants.tensor_ceiling
    )
    per_unit = 1.0 / force_unit
    v = [residual[k] * per_unit for k in range(3)]

    b = _half_matrix(t)
    xx, yy, zz, yz, xz, xy = b
    p = 0.5 * (xx * xx + yy * yy + zz * zz) + (yz * yz + xz * xz + xy * xy)
    q = xx * (yy * zz - yz * yz) - xy * (xy * zz - yz * xz) + xz * (xy * yz - yy * xz)
    a, a_p, a_q = _exponential(p, q, double)
    bv = _apply(b, v)
    bbv = _apply(b, bv)
    y = _combine(a, v, bv, bbv)
    shrink = torch.exp(s * (-1.0 / ROOT3))
    mahalanobis = shrink * _dot(y, y)

    excess, by_raw_nu = _softplus(raw_nu)
    nu, kappa = excess + MIN_NU, excess + MIN_KAPPA
    if raw_kappa is not None:
        excess, by_raw_kappa = _softplus(raw_kappa)
        kappa = excess + MIN_KAPPA
    inverse = 1.0 / (nu - 1.5)
    per_kappa = 1.0 / kappa
    scale = nu * (1.0 + per_kappa)
    rest, rest_slope = _gamma_rest(inverse, double)
    log_term = torch.log1p(mahalanobis / scale)
    half = 0.5 * (nu + 1.0)
    # 1.5 [log1p(3/(2m+1)) + log1p(1/κ)] = 1.5 log(ν (1 + 1/κ)/(ν - 3/2))
    nll = 1.5 * torch.log(scale * inverse) - rest + 0.5 * ROOT3 * s + half * log_term
    nll = nll + (3.0 * torch.log(force_unit) + 1.5 * LOG_2PI)
    regulariser = (nu + kappa) * torch.sqrt(_dot(v, v))

    z_over_m = 1.0 / (scale + mahalanobis)
    z = mahalanobis * z_over_m
    by_nu = 0.5 * _log_minus_z(log_term, z, double) - (0.5 * z + 2.25 * inverse) / nu - rest_slope
    by_kappa = (half * z - 1.5) * per_kappa / (1.0 + kappa)
    by_s = (0.5 * ROOT3 - half * z * (1.0 / ROOT3)) * slope_s
    rows = [nll, regulariser, by_s]
    if raw_kappa is None:
        rows.append((by_nu + by_kappa) * by_raw_nu)
    else:
        rows += [by_nu * by_raw_nu, by_kappa * by_raw_kappa]

    # ½ ∂‖y‖²/∂B: through (p, q), with ∂p/∂B = B and ∂q/∂B = B² up to a trace, and through B itself.
    pull = 2.0 * half * z_over_m * shrink
    by = _apply(b, y)
    dots = [_dot(v, y), _dot(bv, y), _dot(bbv, y)]
    by_p, by_q = _dot(a_p, dots), _dot(a_q, dots)
    left = [a[1] * v[i] + a[2] * bv[i] for i in range(3)]
    right = [a[2] * by[i] for i in range(3)]
    square = _square(b)
    grad = [by_p * b[i] + by_q * square[i] + left[i] * y[i] + v[i] * right[i] for i in range(3)]
    for k, i, j in ((3, 1, 2), (4, 0, 2), (5, 0, 1)):
        cross = left[i] * y[j] + left[j] * y[i] + v[i] * right[j] + v[j] * right[i]
        grad.append(2.0 * (by_p * b[k] + by_q * square[k]) + cross)
    by_t = [-0.5 * pull * x for x in _project(*grad)]
    along = (slope_t - ratio) * sum(d * g for d, g in zip(direction, by_t, strict=True))
    rows += [ratio * g + along * d for g, d in zip(by_t, direction, strict=True)]

    # exp(2B) v = exp(B) y
    bby = _apply(b, by)
    if constants.pull_ceiling is not None:
        variance = scale / ((nu - 2.0) * shrink)
        pull = pull * (variance * constants.pull_ceiling**-2).clamp(min=1.0)
    pull = pull * per_unit
    rows += [pull * x for x in _combine(a, y, by, bby)]
    return rows


def distribution(
    s: Tensor,
    t: Tensor,
    raw_nu: Tensor,
    raw_kappa: Optional[Tensor],
    force_unit: Tensor,
    constants: Constants,
    double: bool,
) -> List[Tensor]:
    """log Σ0 and Σ0 as six rows each, ν, κ, plateau; arguments as in `loss_and_gradients`."""
    s, t = spoil(s, raw_nu, raw_kappa), [t[k] for k in range(5)]
    past_knee = (s.abs() > constants.scalar_knee) | (sum(x * x for x in t) > constants.tensor_knee**2)
    plateau = torch.where(past_knee, torch.ones_like(s), torch.zeros_like(s))
    s, _ = _damp(s, constants.scalar_knee, constants.scalar_ceiling)
    t = _damp_vector(t, constants.tensor_knee, constants.tensor_ceiling)[0]
    b = [-x for x in _half_matrix(t)]
    xx, yy, zz, yz, xz, xy = b
    p = 0.5 * (xx * xx + yy * yy + zz * zz) + (yz * yz + xz * xz + xy * xy)
    q = xx * (yy * zz - yz * yz) - xy * (xy * zz - yz * xz) + xz * (xy * yz - yy * xz)
    a = _exponential(p, q, double)[0]
    root = [a[1] * x + a[2] * y for x, y in zip(b, _square(tuple(b)), strict=True)]
    root[:3] = [x + a[0] for x in root[:3]]
    mean = s * (1.0 / ROOT3)
    scale = torch.exp(mean) * force_unit * force_unit
    mean = mean + 2.0 * torch.log(force_unit)
    log_sigma0 = [2.0 * x + mean for x in b[:3]] + [2.0 * x for x in b[3:]]
    nu = _softplus(raw_nu)[0]
    kappa = nu if raw_kappa is None else _softplus(raw_kappa)[0]
    return [*log_sigma0, *(scale * x for x in _square(tuple(root))), nu + MIN_NU, kappa + MIN_KAPPA, plateau]
