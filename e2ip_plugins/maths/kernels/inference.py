"""The distribution in one pass of few torch operations, for the 10 to 10⁴ atoms of a prediction.

There an operation costs its launch, not its arithmetic. So atoms run along the last axis of stacked rows, the series of
exp(T/2) is one product of monomials in (p, q) with a constant matrix, and nothing is recorded for autograd. The work is
done in float64 whatever the input: at these sizes it costs the same, no later digit is lost, and autocast, TF32 and
reduced-precision matrix products leave float64 alone.
"""

import functools
import math
from typing import NamedTuple, Sequence, Tuple, Union

import torch
from torch import Tensor

from e2ip_plugins.maths.kernels.constants import EXP_TERMS, ROOT3, Constants, exp_polynomials
from e2ip_plugins.maths.spd import sym6_to_matrix, tangent_to_sym6
from e2ip_plugins.maths.student import MIN_KAPPA, MIN_NU

#: Rows of this many atoms stay in the processor's cache.
CHUNK = 8192


class _Tables(NamedTuple):
    """Constant tensors. S = s Q0 + T with T = Σ t_k Q_k, and Σ0 is made of exp(T/2)."""

    order: Tensor  # (8,) or (7,): columns of the coefficients in the order s, t, raw ν and, unless coupled, raw κ
    undamped_up_to: Tensor  # (8, 1) or (7, 1): rows that are all below this are finite and below their knees
    knee: Tensor  # (2, 1): of s and t
    width: Tensor  # (2, 1): from knee to ceiling
    log: Tensor  # (7, 6): (s, t) to S as sym6, and a third of its trace
    diagonal: Tensor  # (7, 1): what a multiple of the unit matrix adds to these rows
    is_s: Tensor  # (6, 1)
    lift: Tensor  # (19, 36): (1, t) ⊗ (1, t) to coordinates (1, 2e) of I, T/2, (T/2)², and to ‖t‖² = 8p
    square: Tensor  # (6, 36): outer product of a matrix' coordinates to its square as sym6
    exponential: Tensor  # (3, i·j): monomials (8p)^i (3q)^j to a
    powers: Tuple[int, int]
    minimum: Tensor  # (2, 1): of ν and κ
    zero: Tensor
    one: Tensor


@functools.lru_cache(maxsize=16)
def _tables(double: bool, work: torch.dtype, device: torch.device, constants: Constants) -> _Tables:
    """Return the tables in the dtype and on the device of the work; ``double``: to the accuracy of float64."""

    def put(x: Union[Tensor, Sequence]) -> Tensor:
        return torch.as_tensor(x, dtype=torch.float64, device="cpu").to(device, work).contiguous()

    def column(x: Sequence) -> Tensor:
        return put(x).unsqueeze(1)

    log, lift, square = _matrices()
    exponential, powers = _series(double)
    knees, ceilings = zip(constants.scalar_damper, constants.tensor_damper, strict=True)
    evidence_rows = 1 if constants.coupled else 2
    # Dividing ordinary numbers by the largest float would give subnormal numbers, which are slow.
    largest = math.sqrt(torch.finfo(work).max)
    return _Tables(
        order=torch.tensor([0, 3, 4, 5, 6, 7, 1, 2][: 6 + evidence_rows], device=device),
        undamped_up_to=column([knees[0]] + 5 * [knees[1] / math.sqrt(5.0)] + evidence_rows * [largest]),
        knee=column(knees),
        width=column([ceiling - knee for knee, ceiling in zip(knees, ceilings, strict=True)]),
        log=put(log),
        diagonal=column([1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0]),
        is_s=torch.arange(6, device=device).unsqueeze(1) == 0,
        lift=put(lift),
        square=put(square),
        exponential=put(exponential),
        powers=powers,
        minimum=column([MIN_NU, MIN_KAPPA]),
        zero=put([0.0])[0],
        one=put([1.0])[0],
    )


def _matrices() -> Tuple[Tensor, Tensor, Tensor]:
    """Return ``log``, ``lift`` and ``square`` of `_Tables`."""
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
    return log, lift.view(19, 36), torch.stack(square).view(6, 36)


def _series(double: bool) -> Tuple[Tensor, Tuple[int, int]]:
    """Return ``exponential`` and ``powers`` of `_Tables`; the variables are ‖t‖² = 8p and t·∂q/∂t = 3q."""
    polynomials = exp_polynomials(EXP_TERMS[double])
    rows, columns = (1 + max(key[axis] for poly in polynomials for key in poly) for axis in (0, 1))
    exponential = torch.zeros(3, rows, columns, dtype=torch.float64, device="cpu")
    for n, poly in enumerate(polynomials):
        for (i, j), value in poly.items():
            exponential[n, i, j] = value / (8.0**i * 3.0**j)
    return exponential.view(3, -1), (rows, columns)


def _damp(rows: Tensor, tables: _Tables, widened: bool) -> Tuple[Tensor, Tensor]:
    """Damped (s, t) (6, N), NaN where a row is not finite, and 1 where a damper is past its knee (N,).

    Parameters
    ----------
    rows : (8, N) or (7, N)
        s, t, raw ν, unless coupled raw κ.
    tables : _Tables
    widened : bool
        Whether these are float32 numbers in float64, of which no square overflows.
    """
    count = rows.shape[1]
    may_overflow = not widened
    if rows.device.type == "cpu" and count > 0:
        # The usual case, at half the cost. Elsewhere asking would make the CPU wait.
        if torch.linalg.vector_norm(rows / tables.undamped_up_to, math.inf).item() <= 1.0:
            return rows[:6], rows.new_zeros(count)
        may_overflow = may_overflow and not torch.linalg.vector_norm(rows[:6], math.inf).item() < 1e18
    coefficients = rows[:6].clone()
    coefficients[0] += (rows - rows).sum(0)
    t, knee, width = coefficients[1:], tables.knee, tables.width
    if may_overflow:
        largest = t.abs().amax(0, keepdim=True).clamp_(min=1.0)
        scale = torch.cat([torch.ones_like(largest), largest])
        t, knee, width = t / largest, knee / scale, width / scale
    size = torch.cat([coefficients[:1].abs(), (t * t).sum(0, keepdim=True).sqrt_()])
    norm = torch.maximum(size, knee)
    ratio = ((norm - knee) / width).tanh_().mul_(width).add_(knee).div_(norm)
    return torch.cat([coefficients[:1] * ratio[0], coefficients[1:] * ratio[1]]), (size > knee).any(0)


def distribution(
    coefficients: Tensor, flattening: Tensor, force_unit: Tensor, constants: Constants
) -> Tuple[Tensor, ...]:
    """As `e2ip_plugins.maths.kernels.distribution`, with tensors of one dtype, float32 or float64; flattening and σ_ref
    (N,)."""
    if len(coefficients) <= CHUNK or coefficients.device.type != "cpu":
        results = _distribution(coefficients, flattening, force_unit, constants)
    else:
        chunks = zip(*(x.split(CHUNK) for x in (coefficients, flattening, force_unit)), strict=True)
        parts = [_distribution(*chunk, constants) for chunk in chunks]
        results = tuple(torch.cat(values, -1) for values in zip(*parts, strict=True))
    log_sigma0, sigma0, nu, kappa, plateau = results
    return log_sigma0.t(), sigma0.t(), nu, kappa, plateau


def _distribution(
    coefficients: Tensor, flattening: Tensor, force_unit: Tensor, constants: Constants
) -> Tuple[Tensor, ...]:
    """As `distribution`, with atoms along the last axis of every result."""
    out, device, n = coefficients.dtype, coefficients.device, len(coefficients)
    # MPS has no float64.
    work = out if device.type == "mps" else torch.float64
    tables = _tables(out == torch.float64, work, device, constants)
    rows = coefficients.t().index_select(0, tables.order).to(work)
    if device.type == "cpu" and force_unit.stride(0) == 0 and n:
        # The same for all atoms. Elsewhere reading it would make the CPU wait.
        log_unit: Union[float, Tensor] = math.log(force_unit[0].item())
    else:
        log_unit = force_unit.to(work).log()
    damped, plateau = _damp(rows, tables, work != out)
    t = damped[1:]
    t.mul_(torch.rsqrt(torch.linalg.vecdot(t, t, dim=0).mul_(flattening.to(work)).add_(1.0)))
    log_sigma0 = (tables.log @ damped).add_(tables.diagonal * (2.0 * log_unit))

    # exp(T/2) = a0 I + a1 T/2 + a2 (T/2)², squared, in coordinates in which both products are linear in outer products.
    lifted = damped.masked_fill(tables.is_s, 1.0)
    powers = tables.lift @ (lifted.unsqueeze(1) * lifted).view(36, n)
    matrices = powers[:18].view(3, 6, n)
    variables = torch.stack([powers[18], (matrices[1] * matrices[2]).sum(0)])
    count_p, count_q = tables.powers
    monomials = torch.cat([tables.one.expand(1, 2, n), variables.expand(count_p - 1, 2, n)]).cumprod(0)
    a = tables.exponential @ (monomials[:, :1] * monomials[:count_q, 1]).view(count_p * count_q, n)
    root = (a.unsqueeze(1) * matrices).sum(0)
    sigma0 = (tables.square @ (root.unsqueeze(1) * root).view(36, n)).mul_(log_sigma0[6].exp())

    # Coupled, one row stands for both: its minima are those of ν and of κ = ν - 5.
    nu, kappa = torch.logaddexp(rows[6:], tables.zero) + tables.minimum
    return tuple(x.to(out) for x in (log_sigma0[:6], sigma0, nu, kappa, plateau))
