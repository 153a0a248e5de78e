r"""Value and gradients in one pass of few torch operations, for the 10 to 10⁴ atoms of a training step.

There an operation costs its launch, not its arithmetic. So atoms run along the last axis of stacked
rows, the series of exp(B) and of its derivatives are one product of monomials in (p, q) with a constant
matrix, and nothing is recorded for autograd. The work is done in float64 whatever the input: at these
sizes it costs the same, no later digit is lost, and autocast, TF32 and reduced-precision matrix products
leave float64 alone.
"""

import functools
import math
from typing import Callable, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from e2ip_plugins.maths.kernels.constants import (
    EXP_TERMS,
    GAMMA_REST,
    LOG_2PI,
    LOG_TERMS,
    ROOT3,
    SMALL_Z,
    Constants,
    exp_polynomials,
)
from e2ip_plugins.maths.spd import sym6_to_matrix, tangent_to_sym6
from e2ip_plugins.maths.student import MIN_KAPPA, MIN_NU, evidence

#: Rows of this many atoms stay in the processor's cache.
CHUNK = 8192


class _Tables(NamedTuple):
    """Constant tensors. S = s Q0 + T with T = Σ t_k Q_k; the loss needs exp(B) with B = -T/2, Σ0 exp(T/2)."""

    order: Tensor  # (8,) or (7,): columns of the coefficients in the order s, t, raw ν, unless coupled raw κ
    undamped_up_to: Tensor  # (8, 1) or (7, 1): rows that are all below this are finite and below their knees
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

    polynomials = exp_polynomials(EXP_TERMS[double])
    rows, columns = (1 + max(key[axis] for poly in polynomials for key in poly) for axis in (0, 1))
    exponential = eye.new_zeros(9, rows, columns)
    # Variables are ‖t‖² = 8p and t·∂q/∂t = 3q; ∂p/∂t = t/4, and both gradients come doubled.
    for n, poly in enumerate(polynomials):
        factor = (1.0, 0.5, 2.0)[n // 3]
        for (i, j), value in poly.items():
            exponential[n, i, j] = factor * value / (8.0**i * 3.0**j)
    rest = [value * 4.0 ** (k + 1) for k, value in enumerate(GAMMA_REST[double])]
    slope = [2.0 * (k + 1) * value for k, value in enumerate(rest)]
    log_series = [1.0 / k for k in range(2, LOG_TERMS[True] + 1)]
    knees, ceilings = zip(constants.scalar_damper, constants.tensor_damper, strict=True)
    width = [ceiling - knee for knee, ceiling in zip(knees, ceilings, strict=True)]
    evidence_rows = 1 if constants.coupled else 2

    def put(x: Union[Tensor, Sequence]) -> Tensor:
        return torch.as_tensor(x, dtype=torch.float64, device="cpu").to(device, work).contiguous()

    def column(x: Sequence) -> Tensor:
        return put(x).unsqueeze(1)

    # Not the largest number there is, by which ordinary ones are divided: what comes out would be subnormal, and slow.
    largest = math.sqrt(torch.finfo(work).max)
    return _Tables(
        order=torch.tensor([0, 3, 4, 5, 6, 7, 1, 2][: 6 + evidence_rows], device=device),
        undamped_up_to=column([knees[0]] + 5 * [knees[1] / math.sqrt(5.0)] + evidence_rows * [largest]),
        knee=column(knees),
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


def _setup(constants: Constants, force_unit: Tensor, coefficients: Tensor, *further: Tensor) -> tuple:
    """Tables, σ_ref and its logarithm, and as rows s, t, raw ν, unless coupled raw κ, and what is further.

    All in the dtype of the work; σ_ref is a number where it is known to be the same for all atoms.
    """
    out, device = coefficients.dtype, coefficients.device
    # MPS has no float64.
    work = out if device.type == "mps" else torch.float64
    tables = _tables(out == torch.float64, work, device, constants)
    rows = coefficients.t().index_select(0, tables.order)
    if further:
        rows = torch.cat([rows, *(x.t() for x in further)])
    rows = rows.to(work)
    if device.type == "cpu" and force_unit.stride(0) == 0 and len(force_unit):
        # Elsewhere reading it would make the host wait.
        unit = force_unit[0].item()
        return tables, unit, math.log(unit), rows
    force_unit = force_unit.to(work)
    return tables, force_unit, force_unit.log(), rows


def _damp(
    rows: Tensor, tables: _Tables, widened: bool, gradients: bool
) -> Tuple[Tensor, Tensor, Optional[Tuple[Tensor, Tensor, Tensor]]]:
    """Damped (s, t) (6, N), NaN where one of the rows of `_setup` is not finite, and 1 where past a knee (1, N).

    With ``gradients``, unless damping is the identity, also t/max(‖t‖, τ) (5, N), and (2, N) of s and ‖t‖ the ratio
    φ(x)/x, exactly 1 up to the knee, and φ'. ``widened``: these are float32 numbers in float64, no square overflows.
    """
    n = rows.shape[1]
    may_overflow = not widened
    if rows.device.type == "cpu" and n > 0:
        # The usual case, at half the cost. Elsewhere asking would make the host wait.
        if torch.linalg.vector_norm(rows / tables.undamped_up_to, math.inf).item() <= 1.0:
            return rows[:6], rows.new_zeros(1, n), None
        may_overflow = may_overflow and not torch.linalg.vector_norm(rows[:6], math.inf).item() < 1e18
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
    return value, plateau, (t / norm[1], ratio, 1.0 - th * th) if gradients else None


def _monomials(variables: Tensor, tables: _Tables) -> Tensor:
    """Monomials x^i y^j (i·j, N) of two variables (2, N)."""
    n, (rows, columns) = variables.shape[1], tables.powers
    powers = torch.cat([tables.one.expand(1, 2, n), variables.expand(rows - 1, 2, n)]).cumprod(0)
    return (powers[:, :1] * powers[:columns, 1]).view(rows * columns, n)


def _by_chunks(function: Callable, *inputs: Tensor, **options) -> Tuple[Tensor, ...]:
    """Results of a function, which have atoms along their last axis, computed for at most `CHUNK` atoms at a time."""
    if len(inputs[0]) <= CHUNK or inputs[0].device.type != "cpu":
        return function(*inputs, **options)
    chunks = zip(*(x.split(CHUNK) for x in inputs), strict=True)
    return tuple(torch.cat(parts, -1) for parts in zip(*(function(*chunk, **options) for chunk in chunks), strict=True))


def forward(
    coefficients: Tensor, residual: Tensor, force_unit: Tensor, constants: Constants, gradients: bool = False
) -> Tuple[Tensor, ...]:
    """NLL and regulariser (N,); with ``gradients``, those of the NLL in coefficients and residual as rows (11, N), too.

    As `e2ip_plugins.maths.kernels.nll_terms`, with tensors of one dtype, float32 or float64, and σ_ref (N,).
    """
    return _by_chunks(_loss, coefficients, residual, force_unit, constants=constants, gradients=gradients)


def _loss(coefficients, residual, force_unit, constants: Constants, gradients: bool) -> Tuple[Tensor, ...]:
    out, n = coefficients.dtype, coefficients.shape[0]
    tables, force_unit, log_unit, rows = _setup(constants, force_unit, coefficients, residual)
    work, raw, residual = rows.dtype, rows[6:-3], rows[-3:]
    damped, _, slopes = _damp(rows[:-3], tables, work != out, gradients)
    s, t = damped[0], damped[1:]

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

    excess = torch.logaddexp(raw, tables.zero)
    nu, kappa = excess[0] + MIN_NU, excess[-1] + MIN_KAPPA
    inverse = (nu - 1.5).reciprocal_()
    scale = nu * (kappa.reciprocal() + 1.0)
    rest = tables.gamma_rest @ (inverse * inverse).expand(tables.gamma_rest.shape[1], n).cumprod(0)
    log_term = (mahalanobis / scale).log1p_()
    half = (nu + 1.0).mul_(0.5)
    # 1.5 [log1p(3/(2m+1)) + log1p(1/κ)] = 1.5 log(ν (1 + 1/κ)/(ν - 3/2))
    nll = (half * log_term).add_((scale * inverse).log_(), alpha=1.5).add_(s, alpha=0.5 * ROOT3)
    nll = nll.sub_(rest[0]).add_(3.0 * log_unit + 1.5 * LOG_2PI)
    total = nu + kappa
    regulariser = (v * v).sum(0).sqrt_().mul_(total)
    if not gradients:
        return nll.to(out), regulariser.to(out)

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
    by_evidence = torch.stack([by_nu + by_kappa] if constants.coupled else [by_nu, by_kappa]).mul_(raw.sigmoid())
    # In raw κ, where coupled.
    by_unused = tables.zero.expand(2 - len(raw), n)
    by_s = 0.5 * ROOT3 - pull_z * (1.0 / ROOT3)

    # ∂NLL/∂‖y‖² and from there to t through (p, q) and through the B in y = (a0 + a1 B + a2 B²) v.
    pull = half.mul_(z_over_m).mul_(shrink)
    by = (b * y).sum(1)
    by_pq = (series_of[3:].view(2, 3, n) * (krylov * y).sum(1)).sum(1)
    outer = (a[1] * v).addcmul_(a[2], bv).unsqueeze(1) * y
    outer = outer.addcmul_(v.unsqueeze(1), a[2] * by).view(9, n)
    by_t = (tables.project @ outer).addcmul_(by_pq[0], t).addcmul_(by_pq[1], grad_q).mul_(pull)
    if slopes is not None:
        direction, ratio, slope = slopes
        by_s = by_s.mul_(slope[0])
        along = (direction * by_t).sum(0).mul_(slope[1] - ratio[1])
        by_t = by_t.mul_(ratio[1]).addcmul_(direction, along)

    # exp(2B) v = exp(B) y
    by_residual = (a[0] * y).addcmul_(a[1], by).addcmul_(a[2], (b * by).sum(1))
    by_residual = by_residual.mul_(2.0 * pull).div_(force_unit)
    gradient_rows = torch.cat([by_s.unsqueeze(0), by_evidence, by_unused, by_t, by_residual])
    return nll.to(out), regulariser.to(out), gradient_rows.to(out)


def backward(
    coefficients: Tensor,
    residual: Tensor,
    force_unit: Tensor,
    by_nll: Optional[Tensor],
    by_regulariser: Optional[Tensor],
    rows: Tensor,
    constants: Constants,
) -> Tuple[Tensor, Tensor]:
    """Gradients in coefficients and residual from those in NLL and regulariser, and from the rows of `forward`."""
    rows = torch.zeros_like(rows) if by_nll is None else rows * by_nll
    if by_regulariser is not None:
        # Of (ν + κ) ‖v‖; zero in v where v = 0.
        v = residual.t() / force_unit
        norm = (v * v).sum(0).sqrt()
        raw = coefficients.t()[1 : 2 if constants.coupled else 3]
        nu, kappa = evidence(raw[0], None if constants.coupled else raw[1])
        slopes = raw.sigmoid().mul_(2.0 if constants.coupled else 1.0)
        rows[1 : 1 + len(raw)] += by_regulariser * norm * slopes
        rows[8:] += by_regulariser * (nu + kappa) / force_unit * torch.where(norm == 0, 0.0, v / norm)
    return rows[:8].t(), rows[8:].t()


def distribution(coefficients: Tensor, force_unit: Tensor, constants: Constants) -> Tuple[Tensor, ...]:
    """As `e2ip_plugins.maths.kernels.distribution`, arguments as in `forward`."""
    log_sigma0, sigma0, nu, kappa, plateau = _by_chunks(_distribution, coefficients, force_unit, constants=constants)
    return log_sigma0.t(), sigma0.t(), nu, kappa, plateau


def _distribution(coefficients, force_unit, constants: Constants) -> Tuple[Tensor, ...]:
    n = coefficients.shape[0]
    tables, _, log_unit, rows = _setup(constants, force_unit, coefficients)
    damped, plateau, _ = _damp(rows, tables, rows.dtype != coefficients.dtype, gradients=False)
    log_sigma0 = (tables.log @ damped).add_(tables.diagonal * (2.0 * log_unit))

    # exp(T/2) = a0 I + a1 T/2 + a2 (T/2)², squared, in coordinates in which both products are linear in outer products.
    lifted = damped.masked_fill(tables.is_s, 1.0)
    powers = tables.lift @ (lifted.unsqueeze(1) * lifted).view(36, n)
    matrices = powers[:18].view(3, 6, n)
    a = tables.exponential[:3] @ _monomials(torch.stack([powers[18], (matrices[1] * matrices[2]).sum(0)]), tables)
    root = (a.unsqueeze(1) * matrices).sum(0)
    sigma0 = (tables.square @ (root.unsqueeze(1) * root).view(36, n)).mul_(log_sigma0[6].exp())

    nu, kappa = torch.logaddexp(rows[6:], tables.zero) + tables.minimum
    return tuple(x.to(coefficients.dtype) for x in (log_sigma0[:6], sigma0, nu, kappa, plateau[0]))
