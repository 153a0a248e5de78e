r"""Value and gradients in one pass of few torch operations, for the 10 to 10⁴ atoms of a training step.

There an operation costs its launch, not its arithmetic. So atoms run along the last axis of stacked
rows, the series of exp(B) and of its derivatives are one product of monomials in (p, q) with a constant
matrix, and nothing is recorded for autograd. The work is done in float64 whatever the input: at these
sizes it costs the same, no later digit is lost, and autocast, TF32 and reduced-precision matrix products
leave float64 alone.
"""

import functools
import math
from typing import NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor

from e2ip_plugins.fused import series
from e2ip_plugins.fused.settings import LOG_2PI, MIN_KAPPA, MIN_NU, ROOT3, Constants
from e2ip_plugins.spd import sym6_to_matrix, tangent_to_sym6

#: Rows of this many atoms stay in the processor's cache.
CHUNK = 8192


class _Tables(NamedTuple):
    """Constant tensors; for B = -T/2 with T = Σ t_k Q_k."""

    basis: Tensor  # (9, 5): t to B
    basis6: Tensor  # (6, 5): t to T as sym6
    project: Tensor  # (5, 9): ∂/∂B to twice ∂/∂t
    grad_q: Tensor  # (5, 25): t ⊗ t to ∂q/∂t
    exponential: Tensor  # (9, i·j): monomials ‖t‖^2i (t·∂q/∂t)^j to a, ½ ∂a/∂p, 2 ∂a/∂q
    powers: Tuple[int, int]
    gamma_rest: Tensor  # (2, k): powers of (ν-3/2)^-2 to R and -(ν-3/2) ∂R/∂ν
    log_series: Tensor  # (k,): powers z² … to log1p(x) - z
    zero: Tensor
    one: Tensor


@functools.lru_cache(maxsize=16)
def _tables(double: bool, work: torch.dtype, device: torch.device) -> _Tables:
    eye = torch.eye(5, dtype=torch.float64, device="cpu")
    basis6 = tangent_to_sym6(eye.new_zeros(5), eye)
    q = sym6_to_matrix(basis6)
    triple = torch.einsum("iab,jbc,kca->ijk", q, q, q)
    polynomials = series.exp_polynomials(series.DOUBLE_TERMS if double else series.SINGLE_TERMS)
    rows, columns = (1 + max(key[axis] for poly in polynomials for key in poly) for axis in (0, 1))
    exponential = eye.new_zeros(9, rows, columns)
    # The monomials are those of ‖t‖² = 8p and t·∂q/∂t = 3q; ∂p/∂t = t/4, and both gradients come doubled.
    for n, poly in enumerate(polynomials):
        factor = (1.0, 0.5, 2.0)[n // 3]
        for (i, j), value in poly.items():
            exponential[n, i, j] = factor * value / (8.0**i * 3.0**j)
    gamma_rest = series.DOUBLE_GAMMA_REST if double else series.SINGLE_GAMMA_REST
    rest = [value * 4.0 ** (k + 1) for k, value in enumerate(gamma_rest)]
    slope = [2.0 * (k + 1) * value for k, value in enumerate(rest)]
    log_series = [1.0 / k for k in range(2, series.DOUBLE_LOG_TERMS + 1)]

    def put(x: Union[Tensor, list]) -> Tensor:
        return torch.as_tensor(x, dtype=torch.float64, device="cpu").to(device, work).contiguous()

    return _Tables(
        basis=put(-0.5 * q.reshape(5, 9).T),
        basis6=put(basis6.T),
        project=put(-q.reshape(5, 9)),
        grad_q=put(-triple.reshape(5, 25) / 8.0),
        exponential=put(exponential.reshape(9, -1)),
        powers=(rows, columns),
        gamma_rest=put([rest, slope]),
        log_series=put(log_series),
        zero=put([0.0])[0],
        one=put([1.0])[0],
    )


def _setup(out: torch.dtype, device: torch.device) -> Tuple[torch.dtype, _Tables]:
    # MPS has no float64.
    work = out if device.type == "mps" else torch.float64
    return work, _tables(out == torch.float64, work, device)


class _Damped(NamedTuple):
    """Damped t̃ (5, N) and what its gradient needs: direction (5, N), φ/‖t‖ and φ' (N,)."""

    value: Tensor
    direction: Tensor
    ratio: Tensor
    slope: Optional[Tensor]


def _damp_vector(t: Tensor, constants: Constants, scale: bool, gradients: bool) -> _Damped:
    knee, width = constants.tensor_knee, constants.tensor_ceiling - constants.tensor_knee
    if scale:
        # float64 coefficients: ‖t‖² can overflow.
        largest = t.abs().amax(0).clamp(min=knee)
        scaled = t / largest
        norm = torch.maximum((scaled * scaled).sum(0).sqrt(), knee / largest)
        direction, norm = scaled / norm, largest * norm
    else:
        norm = (t * t).sum(0).sqrt().clamp(min=knee)
        direction = t / norm
    th = ((norm - knee) * (1.0 / width)).tanh()
    phi = th * width + knee
    slope = 1.0 - th * th if gradients else None
    return _Damped(direction * phi, direction, phi / norm, slope)


def _exponential(t: Tensor, tables: _Tables) -> Tuple[Tensor, Tensor]:
    """a, ½ ∂a/∂p, 2 ∂a/∂q (9, N) of exp(B), and ∂q/∂t (5, N), for damped t (5, N)."""
    n = t.shape[1]
    grad_q = tables.grad_q @ (t.unsqueeze(1) * t).view(25, n)
    variables = torch.stack([t, grad_q]).mul_(t).sum(1)
    rows, columns = tables.powers
    powers = torch.cat([tables.one.expand(1, 2, n), variables.expand(rows - 1, 2, n)]).cumprod(0)
    monomials = (powers[:, :1] * powers[:columns, 1]).view(rows * columns, n)
    return tables.exponential @ monomials, grad_q


def loss_and_gradients(
    s: Tensor,
    t: Tensor,
    raw_nu: Tensor,
    raw_kappa: Optional[Tensor],
    residual: Tensor,
    force_unit: Union[float, Tensor],
    constants: Constants,
    gradients: bool,
) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
    """NLL (N,), regulariser (N,) and the gradients of the NLL as rows (K, N).

    Rows are s, raw ν, raw κ (absent without ``raw_kappa``), five of t and three of the residual. Arguments
    as in `e2ip_plugins.fused.nll_terms`, all of one dtype (float32 or float64).
    """
    n = s.shape[0]
    if n <= CHUNK or s.device.type != "cpu":
        return _loss_and_gradients(s, t, raw_nu, raw_kappa, residual, force_unit, constants, gradients)
    nll, regulariser = s.new_empty(n), s.new_empty(n)
    rows = s.new_empty(10 if raw_kappa is None else 11, n) if gradients else None
    for start in range(0, n, CHUNK):
        part = slice(start, start + CHUNK)
        unit = force_unit[part] if isinstance(force_unit, Tensor) and force_unit.dim() else force_unit
        kappa = None if raw_kappa is None else raw_kappa[part]
        done = _loss_and_gradients(s[part], t[part], raw_nu[part], kappa, residual[part], unit, constants, gradients)
        nll[part], regulariser[part] = done[0], done[1]
        if rows is not None:
            rows[:, part] = done[2]
    return nll, regulariser, rows


def _loss_and_gradients(s, t, raw_nu, raw_kappa, residual, force_unit, constants, gradients):
    out, n = s.dtype, s.shape[0]
    work, tables = _setup(out, s.device)
    evidence_rows = [raw_nu.unsqueeze(0)] if raw_kappa is None else [raw_nu.unsqueeze(0), raw_kappa.unsqueeze(0)]
    rows = torch.cat([s.unsqueeze(0), *evidence_rows, t.t(), residual.t()]).to(work)
    s, raw, t, residual = rows.split([1, len(evidence_rows), 5, 3])
    if isinstance(force_unit, Tensor):
        force_unit = force_unit.to(work)
        constant = 3.0 * force_unit.log() + 1.5 * LOG_2PI
    else:
        constant = 3.0 * math.log(force_unit) + 1.5 * LOG_2PI

    knee, width = constants.scalar_knee, constants.scalar_ceiling - constants.scalar_knee
    s = s[0]
    core = s.clamp(-knee, knee)
    th = ((s - core) * (1.0 / width)).tanh()
    s = core.add_(th, alpha=width)
    damped = _damp_vector(t, constants, scale=out == torch.float64, gradients=gradients)
    t = damped.value

    # M = vᵀ exp(-S) v = e^{-s/√3} ‖y‖² with y = exp(B) v.
    coefficients, grad_q = _exponential(t, tables)
    a = coefficients[:3]
    v = residual / force_unit
    b = (tables.basis @ t).view(3, 3, n)
    bv = (b * v).sum(1)
    krylov = torch.stack([v, bv, (b * bv).sum(1)])
    y = (a.unsqueeze(1) * krylov).sum(0)
    shrink = (s * (-1.0 / ROOT3)).exp()
    mahalanobis = shrink * (y * y).sum(0)

    evidence = torch.logaddexp(raw, tables.zero)
    nu, kappa = evidence[0] + MIN_NU, evidence[-1] + MIN_KAPPA
    inverse = (nu - 1.5).reciprocal_()
    scale = nu * (kappa.reciprocal() + 1.0)
    rest = tables.gamma_rest @ (inverse * inverse).expand(tables.gamma_rest.shape[1], n).cumprod(0)
    log_term = (mahalanobis / scale).log1p_()
    half = (nu + 1.0).mul_(0.5)
    # 1.5 [log1p(3/(2m+1)) + log1p(1/κ)] = 1.5 log(ν (1 + 1/κ)/(ν - 3/2))
    nll = (half * log_term).add_((scale * inverse).log_(), alpha=1.5).add_(s, alpha=0.5 * ROOT3)
    nll = nll.sub_(rest[0]).add_(constant)
    total = nu + kappa
    regulariser = (v * v).sum(0).sqrt_().mul_(total)
    if not gradients:
        return nll.to(out), regulariser.to(out), None

    z_over_m = (scale + mahalanobis).reciprocal_()
    z = mahalanobis * z_over_m
    pull_z = half * z
    difference = log_term - z
    if out == torch.float64:
        series_rows = z.expand(len(tables.log_series) + 1, n).cumprod(0)[1:]
        difference = torch.where(z < series.SMALL_Z, tables.log_series @ series_rows, difference)
    by_nu = difference.mul_(0.5).sub_(z.mul_(0.5).add_(inverse, alpha=2.25).div_(nu)).addcmul_(inverse, rest[1])
    by_kappa = (pull_z - 1.5).div_(kappa * (kappa + 1.0))
    by_evidence = (by_nu + by_kappa).unsqueeze(0) if raw_kappa is None else torch.stack([by_nu, by_kappa])
    by_evidence = by_evidence.mul_(raw.sigmoid())
    by_s = (0.5 * ROOT3 - pull_z * (1.0 / ROOT3)).mul_(1.0 - th * th)

    # ∂NLL/∂‖y‖² and from there to t through (p, q) and through the B in y = (a0 + a1 B + a2 B²) v.
    pull = half.mul_(z_over_m).mul_(shrink)
    by = (b * y).sum(1)
    by_pq = (coefficients[3:].view(2, 3, n) * (krylov * y).sum(1)).sum(1)
    outer = (a[1] * v).addcmul_(a[2], bv).unsqueeze(1) * y
    outer = outer.addcmul_(v.unsqueeze(1), a[2] * by).view(9, n)
    by_t = (tables.project @ outer).addcmul_(by_pq[0], t).addcmul_(by_pq[1], grad_q).mul_(pull)
    along = (damped.direction * by_t).sum(0).mul_(damped.slope - damped.ratio)
    by_t = by_t.mul_(damped.ratio).addcmul_(damped.direction, along)

    # exp(2B) v = exp(B) y
    by_residual = (a[0] * y).addcmul_(a[1], by).addcmul_(a[2], (b * by).sum(1))
    if constants.pull_ceiling is not None:
        variance = scale / ((nu - 2.0) * shrink)
        pull = pull * (variance * constants.pull_ceiling**-2).clamp_(min=1.0)
    by_residual = by_residual.mul_(2.0 * pull).div_(force_unit)
    rows = torch.cat([by_s.unsqueeze(0), by_evidence, by_t, by_residual])
    return nll.to(out), regulariser.to(out), rows.to(out)


def distribution(
    s: Tensor,
    t: Tensor,
    raw_nu: Tensor,
    raw_kappa: Optional[Tensor],
    force_unit: Union[float, Tensor],
    constants: Constants,
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """log Σ0 (N, 6), Σ0 (N, 6), ν, κ (N,); arguments as in `e2ip_plugins.fused.distribution`, of one dtype."""
    out, n = s.dtype, s.shape[0]
    work, tables = _setup(out, s.device)
    s, t = s.to(work), t.t().to(work)
    knee, width = constants.scalar_knee, constants.scalar_ceiling - constants.scalar_knee
    core = s.clamp(-knee, knee)
    s = core + width * ((s - core) * (1.0 / width)).tanh()
    t = _damp_vector(t, constants, scale=out == torch.float64, gradients=False).value
    # exp(T/2) is exp(B) of -t.
    a = _exponential(-t, tables)[0][:3]
    half = (tables.basis @ -t).view(3, 3, n)
    root = a[1] * half + a[2] * _square(half)
    root.diagonal().add_(a[0].unsqueeze(-1))
    log_unit = 2.0 * (force_unit.to(work).log() if isinstance(force_unit, Tensor) else math.log(force_unit))
    mean = s * (1.0 / ROOT3) + log_unit
    sigma0 = (_square(root) * mean.exp()).view(9, n)[[0, 4, 8, 5, 2, 1]]
    log_sigma0 = tables.basis6 @ t
    log_sigma0[:3] += mean
    nu = torch.logaddexp(raw_nu.to(work), tables.zero)
    kappa = nu if raw_kappa is None else torch.logaddexp(raw_kappa.to(work), tables.zero)
    nu, kappa = nu + MIN_NU, kappa + MIN_KAPPA
    return log_sigma0.t().to(out).contiguous(), sigma0.t().to(out).contiguous(), nu.to(out), kappa.to(out)


def _square(x: Tensor) -> Tensor:
    """Square of symmetric matrices (3, 3, N)."""
    return (x.unsqueeze(1) * x.unsqueeze(0)).sum(2)
