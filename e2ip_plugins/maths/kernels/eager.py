r"""Value and gradients in one pass of few torch operations, for the 10 to 10⁴ atoms of a training step.

There an operation costs its launch, not its arithmetic. So atoms run along the last axis of stacked
rows, the series of exp(B) and of its derivatives are one product of monomials in (p, q) with a constant
matrix, and nothing is recorded for autograd. The work is done in float64 whatever the input: at these
sizes it costs the same, no later digit is lost, and autocast, TF32 and reduced-precision matrix products
leave float64 alone.
"""

import functools
import math
from typing import Iterator, NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor

from e2ip_plugins.maths.kernels.constants import (
    DOUBLE_GAMMA_REST,
    DOUBLE_LOG_TERMS,
    DOUBLE_TERMS,
    LOG_2PI,
    ROOT3,
    SINGLE_GAMMA_REST,
    SINGLE_TERMS,
    SMALL_Z,
    Constants,
    exp_polynomials,
)
from e2ip_plugins.maths.spd import sym6_to_matrix, tangent_to_sym6
from e2ip_plugins.maths.student import MIN_KAPPA, MIN_NU

#: Rows of this many atoms stay in the processor's cache.
CHUNK = 8192


class _Tables(NamedTuple):
    """Constant tensors. S = s Q0 + T with T = Σ t_k Q_k; the loss needs exp(B) with B = -T/2, Σ0 exp(T/2)."""

    undamped_up_to: Tensor  # (8,): s, t, raw ν, raw κ that are all below this are finite and below their knees
    knee: Tensor  # (2, 1): of s and t
    width: Tensor  # (2, 1): from knee to ceiling
    slope: Tensor  # (2, 1): 1/width
    basis: Tensor  # (9, 5): t to B
    log: Tensor  # (7, 6): (s, t) to S as sym6, and a third of its trace
    diagonal: Tensor  # (7, 1): what a multiple of the unit matrix adds to these rows
    is_s: Tensor  # (6, 1)
    lift: Tensor  # (19, 36): (1, t) ⊗ (1, t) to coordinates (1, 2e) of I, T/2, (T/2)², and to ‖t‖² = 8p
    square: Tensor  # (6, 36): outer product of a matrix' coordinates to its square as sym6
    project: Tensor  # (5, 9): ∂/∂B to twice ∂/∂t
    grad_q: Tensor  # (5, 25): t ⊗ t to ∂q/∂t
    exponential: Tensor  # (9, i·j): monomials (8p)^i (3q)^j to a, ½ ∂a/∂p, 2 ∂a/∂q
    powers: Tuple[int, int]
    gamma_rest: Tensor  # (2, k): powers of (ν-3/2)^-2 to R and -(ν-3/2) ∂R/∂ν
    log_series: Tensor  # (k,): powers z² … to log1p(x) - z
    minimum: Tensor  # (2, 1): of ν and κ
    zero: Tensor
    one: Tensor


@functools.lru_cache(maxsize=16)
def _tables(double: bool, work: torch.dtype, device: torch.device, constants: Constants) -> _Tables:
    eye = torch.eye(5, dtype=torch.float64, device="cpu")
    basis6 = tangent_to_sym6(eye.new_zeros(5), eye)
    q = sym6_to_matrix(basis6)
    triple = torch.einsum("iab,jbc,kca->ijk", q, q, q)
    # Q_i Q_j, made symmetric, is δ_ij/3 I + Σ_k triple_ijk Q_k.
    lift = eye.new_zeros(19, 6, 6)
    lift[0, 0, 0] = 1.0
    lift[7:12, 0, 1:] = 0.5 * eye
    lift[12, 1:, 1:], lift[13:18, 1:, 1:], lift[18, 1:, 1:] = eye / 12.0, triple / 4.0, eye
    with_unit = torch.cat([torch.eye(3, dtype=torch.float64, device="cpu").unsqueeze(0), q])
    products = torch.einsum("iab,jbc->acij", with_unit, with_unit)
    square = [0.5 * (products[a, c] + products[c, a]) for a, c in ((0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1))]
    log = eye.new_zeros(7, 6)
    log[[0, 1, 2, 6], 0] = 1.0 / ROOT3
    log[:6, 1:] = basis6.T

    polynomials = exp_polynomials(DOUBLE_TERMS if double else SINGLE_TERMS)
    rows, columns = (1 + max(key[axis] for poly in polynomials for key in poly) for axis in (0, 1))
    exponential = eye.new_zeros(9, rows, columns)
    # Variables are ‖t‖² = 8p and t·∂q/∂t = 3q; ∂p/∂t = t/4, and both gradients come doubled.
    for n, poly in enumerate(polynomials):
        factor = (1.0, 0.5, 2.0)[n // 3]
        for (i, j), value in poly.items():
            exponential[n, i, j] = factor * value / (8.0**i * 3.0**j)
    gamma_rest = DOUBLE_GAMMA_REST if double else SINGLE_GAMMA_REST
    rest = [value * 4.0 ** (k + 1) for k, value in enumerate(gamma_rest)]
    slope = [2.0 * (k + 1) * value for k, value in enumerate(rest)]
    log_series = [1.0 / k for k in range(2, DOUBLE_LOG_TERMS + 1)]
    width = [constants.scalar_ceiling - constants.scalar_knee, constants.tensor_ceiling - constants.tensor_knee]

    def put(x: Union[Tensor, list]) -> Tensor:
        return torch.as_tensor(x, dtype=torch.float64, device="cpu").to(device, work).contiguous()

    def column(x: list) -> Tensor:
        return put(x).unsqueeze(1)

    largest = torch.finfo(work).max
    return _Tables(
        undamped_up_to=put([constants.scalar_knee] + 5 * [constants.tensor_knee / math.sqrt(5.0)] + 2 * [largest]),
        knee=column([constants.scalar_knee, constants.tensor_knee]),
        width=column(width),
        slope=column([1.0 / x for x in width]),
        basis=put(-0.5 * q.reshape(5, 9).T),
        log=put(log),
        diagonal=column([1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0]),
        is_s=torch.arange(6, device=device).unsqueeze(1) == 0,
        lift=put(lift.view(19, 36)),
        square=put(torch.stack(square).view(6, 36)),
        project=put(-q.reshape(5, 9)),
        grad_q=put(-triple.reshape(5, 25) / 8.0),
        exponential=put(exponential.view(9, -1)),
        powers=(rows, columns),
        gamma_rest=put([rest, slope]),
        log_series=put(log_series),
        minimum=column([MIN_NU, MIN_KAPPA]),
        zero=put([0.0])[0],
        one=put([1.0])[0],
    )


def _setup(out: torch.dtype, device: torch.device, constants: Constants) -> Tuple[torch.dtype, _Tables]:
    # MPS has no float64.
    work = out if device.type == "mps" else torch.float64
    return work, _tables(out == torch.float64, work, device, constants)


def _float_where_known(force_unit: Union[float, Tensor]) -> Union[float, Tensor]:
    """σ_ref as a float, where it is one for all atoms and reading it does not make the host wait."""
    if isinstance(force_unit, Tensor) and force_unit.device.type == "cpu" and force_unit.dim() == 0:
        return force_unit.item()
    return force_unit


class _Damped(NamedTuple):
    """Damped (s̃, t̃) (6, N), and what the gradient needs unless it is the identity."""

    value: Tensor
    plateau: Tensor  # (1, N): 1 where past a knee
    direction: Optional[Tensor] = None  # (5, N): of t, shorter than 1 below the knee
    ratio: Optional[Tensor] = None  # (2, N): φ(|s|)/|s|, φ(‖t‖)/‖t‖
    slope: Optional[Tensor] = None  # (2, N): φ'


def _damp(rows: Tensor, tables: _Tables, widened: bool, gradients: bool) -> _Damped:
    """Both dampers on (s, t) out of s, t, raw ν, raw κ (K, N); NaN where one of these is not finite.

    Up to the knee the ratio is exactly 1. ``widened``: these are float32 numbers in float64, no square overflows.
    """
    n = rows.shape[1]
    may_overflow = not widened
    if rows.device.type == "cpu" and n > 0:
        # The usual case, at half the cost. Elsewhere asking would make the host wait.
        largest = torch.linalg.vector_norm(rows, math.inf, dim=1)
        if (largest <= tables.undamped_up_to[: len(rows)]).all().item():
            return _Damped(rows[:6], tables.zero.expand(1, n))
        may_overflow = may_overflow and not (largest[:6] < 1e18).all().item()
    coefficients = rows[:6].clone()
    coefficients[0] += (rows - rows).sum(0)
    t, knee, width, slope = coefficients[1:], tables.knee, tables.width, tables.slope
    if may_overflow:
        largest = t.abs().amax(0, keepdim=True).clamp_(min=1.0)
        scale = torch.cat([torch.ones_like(largest), largest])
        t, knee, width, slope = t / largest, knee / scale, width / scale, slope * scale
    size = torch.cat([coefficients[:1].abs(), (t * t).sum(0, keepdim=True).sqrt_()])
    plateau = (size > knee).any(0, keepdim=True)
    norm = torch.maximum(size, knee)
    th = ((norm - knee) * slope).tanh_()
    ratio = (th * width).add_(knee).div_(norm)
    value = torch.cat([coefficients[:1] * ratio[0], coefficients[1:] * ratio[1]])
    if not gradients:
        return _Damped(value, plateau)
    return _Damped(value, plateau, t / norm[1], ratio, 1.0 - th * th)


def _monomials(variables: Tensor, tables: _Tables) -> Tensor:
    """Monomials x^i y^j (i·j, N) of two variables (2, N)."""
    n, (rows, columns) = variables.shape[1], tables.powers
    powers = torch.cat([tables.one.expand(1, 2, n), variables.expand(rows - 1, 2, n)]).cumprod(0)
    return (powers[:, :1] * powers[:columns, 1]).view(rows * columns, n)


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
    as in `e2ip_plugins.maths.kernels.nll_terms`, all of one dtype (float32 or float64).
    """
    n = s.shape[0]
    if n <= CHUNK or s.device.type != "cpu":
        return _loss_and_gradients(s, t, raw_nu, raw_kappa, residual, force_unit, constants, gradients)
    nll, regulariser = s.new_empty(n), s.new_empty(n)
    rows = s.new_empty(10 if raw_kappa is None else 11, n) if gradients else None
    for part, *inputs in _chunks(n, s, t, raw_nu, raw_kappa, residual, force_unit):
        done = _loss_and_gradients(*inputs, constants, gradients)
        nll[part], regulariser[part] = done[0], done[1]
        if rows is not None:
            rows[:, part] = done[2]
    return nll, regulariser, rows


def _chunks(n: int, *inputs: Union[float, Tensor, None]) -> Iterator[tuple]:
    """Slices of at most `CHUNK` atoms, each with the inputs of these atoms; what has no atoms goes to all."""
    for start in range(0, n, CHUNK):
        part = slice(start, start + CHUNK)
        yield part, *(x[part] if isinstance(x, Tensor) and x.dim() else x for x in inputs)


def _loss_and_gradients(s, t, raw_nu, raw_kappa, residual, force_unit, constants, gradients):
    out, n = s.dtype, s.shape[0]
    work, tables = _setup(out, s.device, constants)
    evidence_rows = [raw_nu.unsqueeze(0)] if raw_kappa is None else [raw_nu.unsqueeze(0), raw_kappa.unsqueeze(0)]
    rows = torch.cat([s.unsqueeze(0), t.t(), *evidence_rows, residual.t()]).to(work)
    raw, residual = rows[6:-3], rows[-3:]
    force_unit = _float_where_known(force_unit)
    if isinstance(force_unit, Tensor):
        force_unit = force_unit.to(work)
        constant = 3.0 * force_unit.log() + 1.5 * LOG_2PI
    else:
        constant = 3.0 * math.log(force_unit) + 1.5 * LOG_2PI

    damped = _damp(rows[:-3], tables, work != out, gradients)
    s, t = damped.value[0], damped.value[1:]

    # M = vᵀ exp(-S) v = e^{-s/√3} ‖y‖² with y = exp(B) v.
    grad_q = tables.grad_q @ (t.unsqueeze(1) * t).view(25, n)
    series_of = tables.exponential @ _monomials(torch.stack([t, grad_q]).mul_(t).sum(1), tables)
    a = series_of[:3]
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
    # log1p(x) - z loses digits at small z; where float64 becomes float32 enough of them are left.
    if work == out:
        series_rows = z.expand(len(tables.log_series) + 1, n).cumprod(0)[1:]
        difference = torch.where(z < SMALL_Z, tables.log_series @ series_rows, difference)
    by_nu = difference.mul_(0.5).sub_(z.mul_(0.5).add_(inverse, alpha=2.25).div_(nu)).addcmul_(inverse, rest[1])
    by_kappa = (pull_z - 1.5).div_(kappa * (kappa + 1.0))
    by_evidence = (by_nu + by_kappa).unsqueeze(0) if raw_kappa is None else torch.stack([by_nu, by_kappa])
    by_evidence = by_evidence.mul_(raw.sigmoid())
    by_s = 0.5 * ROOT3 - pull_z * (1.0 / ROOT3)

    # ∂NLL/∂‖y‖² and from there to t through (p, q) and through the B in y = (a0 + a1 B + a2 B²) v.
    pull = half.mul_(z_over_m).mul_(shrink)
    by = (b * y).sum(1)
    by_pq = (series_of[3:].view(2, 3, n) * (krylov * y).sum(1)).sum(1)
    outer = (a[1] * v).addcmul_(a[2], bv).unsqueeze(1) * y
    outer = outer.addcmul_(v.unsqueeze(1), a[2] * by).view(9, n)
    by_t = (tables.project @ outer).addcmul_(by_pq[0], t).addcmul_(by_pq[1], grad_q).mul_(pull)
    if damped.ratio is not None:
        by_s = by_s.mul_(damped.slope[0])
        along = (damped.direction * by_t).sum(0).mul_(damped.slope[1] - damped.ratio[1])
        by_t = by_t.mul_(damped.ratio[1]).addcmul_(damped.direction, along)

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
) -> Tuple[Tensor, ...]:
    """log Σ0, Σ0 (N, 6), ν, κ, plateau (N,); as `e2ip_plugins.maths.kernels.distribution`, arguments of one dtype."""
    n = s.shape[0]
    if n <= CHUNK or s.device.type != "cpu":
        done = _distribution(s, t, raw_nu, raw_kappa, force_unit, constants)
    else:
        done = s.new_empty(15, n)
        for part, *inputs in _chunks(n, s, t, raw_nu, raw_kappa, force_unit):
            done[:, part] = _distribution(*inputs, constants)
    return done[:6].t(), done[6:12].t(), done[12], done[13], done[14]


def _distribution(s, t, raw_nu, raw_kappa, force_unit, constants) -> Tensor:
    """Rows (15, N)."""
    out, n = s.dtype, s.shape[0]
    work, tables = _setup(out, s.device, constants)
    evidence_rows = [raw_nu.unsqueeze(0)] if raw_kappa is None else [raw_nu.unsqueeze(0), raw_kappa.unsqueeze(0)]
    rows = torch.cat([s.unsqueeze(0), t.t(), *evidence_rows]).to(work)
    damped, plateau, *_ = _damp(rows, tables, work != out, gradients=False)
    force_unit = _float_where_known(force_unit)
    log_unit = 2.0 * (force_unit.to(work).log() if isinstance(force_unit, Tensor) else math.log(force_unit))
    log_sigma0 = (tables.log @ damped).add_(tables.diagonal * log_unit)

    # exp(T/2) = a0 I + a1 T/2 + a2 (T/2)², squared, in coordinates in which both products are linear in outer products.
    lifted = damped.masked_fill(tables.is_s, 1.0)
    powers = tables.lift @ (lifted.unsqueeze(1) * lifted).view(36, n)
    matrices = powers[:18].view(3, 6, n)
    a = tables.exponential[:3] @ _monomials(torch.stack([powers[18], (matrices[1] * matrices[2]).sum(0)]), tables)
    root = (a.unsqueeze(1) * matrices).sum(0)
    sigma0 = (tables.square @ (root.unsqueeze(1) * root).view(36, n)).mul_(log_sigma0[6].exp())

    evidence = torch.logaddexp(rows[6:], tables.zero) + tables.minimum
    return torch.cat([log_sigma0[:6], sigma0, evidence, plateau]).to(out)
