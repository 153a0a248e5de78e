"""Accuracy of the fused loss and distribution against 60-digit arithmetic, on the worst cases.

Runs for Triton too: on a GPU where there is one, and in Triton's interpreter when TRITON_INTERPRET=1 (see
test_triton.py).
"""

import functools
import itertools

import mpmath
import pytest
import torch

from e2ip_plugins.maths.kernels import distribution, nll_terms, paths, plain
from e2ip_plugins.maths.kernels.constants import Constants

F64 = torch.float64
UNIT = 0.0433641
SCALAR, TENSOR = (14.0, 15.0), (4.0, 5.0)
PATHS = ["triton"] if paths.interpreted() else ["eager", "plain"]
if torch.cuda.is_available() and paths.has_triton() and not paths.interpreted():
    PATHS.append("triton")

DIRECTIONS = {
    "generic": (0.3, -0.7, 0.2, 0.5, -0.35),
    "two equal eigenvalues": (0.0, 0.0, 1.0, 0.0, 0.0),
    "two equal, other sign": (0.0, 0.0, -1.0, 0.0, 0.0),
}


def cases() -> list[tuple]:
    """(s, ‖t‖, direction of t, raw ν, raw κ, residual/σ_ref): one thing extreme at a time, then pairs."""
    base = (0.5, 2.0, "generic", 1.0, 0.5, 1.0)
    variations = [
        (0, (-14.5, 14.5, -1e30, 1e30)),
        (1, (0.0, 1e-6, 4.0, 4.5, 30.0, 1e19, 1e30)),
        (2, ("two equal eigenvalues", "two equal, other sign")),
        (3, (-30.0, 20.0, 1e4, 1e8, 1e30)),
        (4, (-30.0, 20.0, 1e4, 1e30)),
        (5, (0.0, 1e-6, 1e4)),
    ]
    found = [base]
    for position, values in variations:
        found += [(*base[:position], value, *base[position + 1 :]) for value in values]
    for norm, direction, nu, size in itertools.product((4.0, 30.0), DIRECTIONS, (1.0, 1e4), (0.01, 3.0, 300.0)):
        found.append((0.5, norm, direction, nu, 2.0, size))
    return found


@functools.cache
def inputs() -> list[torch.Tensor]:
    """Coefficients and residual of every case, exact in float32."""
    rows = cases()
    unit = torch.tensor([DIRECTIONS[row[2]] for row in rows], dtype=F64)
    t = torch.tensor([row[1] for row in rows], dtype=F64)[:, None] * unit / unit.norm(dim=1, keepdim=True)
    v = torch.tensor([row[5] for row in rows], dtype=F64)[:, None] * torch.tensor([0.6, -0.48, 0.64], dtype=F64)
    others = torch.tensor([[row[k] for k in (0, 3, 4)] for row in rows], dtype=F64)
    return [x.float().to(F64) for x in (torch.cat([others, t], 1), UNIT * v)]


def damp(x, knee: float, ceiling: float):
    excess = abs(x) - knee
    if excess <= 0:
        return x
    return mpmath.sign(x) * (knee + (ceiling - knee) * mpmath.tanh(excess / (ceiling - knee)))


def damp_vector(t: list) -> list:
    norm = mpmath.sqrt(mpmath.fsum(x * x for x in t))
    return [x * damp(norm, *TENSOR) / norm for x in t] if norm else t


def slope(function, x):
    """Central difference, in many digits."""
    step = max(abs(x), 1) * mpmath.mpf(10) ** -25
    return (function(x + step) - function(x - step)) / (2 * step)


def nll_of(s, raw_nu, raw_kappa, mahalanobis):
    """From the definition; ``mahalanobis`` without its factor e^{-s/√3}."""
    mp = mpmath
    s = damp(s, *SCALAR)
    nu = mp.log1p(mp.exp(-abs(raw_nu))) + max(raw_nu, 0) + 5
    kappa = mp.log1p(mp.exp(-abs(raw_kappa))) + max(raw_kappa, 0) + mp.mpf(1e-6)
    m, scale = nu - 2, nu * (1 + 1 / kappa)
    nll = mp.loggamma(m / 2) - mp.loggamma((m + 3) / 2) + mp.mpf(3) / 2 * mp.log(mp.pi * scale)
    nll += (m + 3) / 2 * mp.log1p(mp.exp(-s / mp.sqrt(3)) * mahalanobis / scale)
    return nll + mp.sqrt(3) / 2 * s + 3 * mp.log(mp.mpf(UNIT)), nu + kappa


def reference(s, t, raw_nu, raw_kappa, residual) -> dict:
    """Everything for one atom, with exp(±T) and the derivative of exp(-T) from T's eigenvectors."""
    mp, root = mpmath, mpmath.sqrt
    damped = damp_vector(t)
    basis = [mp.zeros(3) for _ in range(5)]
    for k, i, j in ((0, 0, 2), (1, 0, 1), (3, 1, 2)):
        basis[k][i, j] = basis[k][j, i] = 1 / root(2)
    basis[2][0, 0] = basis[2][2, 2] = -1 / root(6)
    basis[2][1, 1] = 2 / root(6)
    basis[4][2, 2] = 1 / root(2)
    basis[4][0, 0] = -basis[4][2, 2]
    tangent = mp.zeros(3)
    for x, q in zip(damped, basis, strict=True):
        tangent += x * q
    values, vectors = mp.eigsy(tangent)
    v = mp.matrix(residual) / mp.mpf(UNIT)
    w = vectors.T * v
    mahalanobis = mp.fsum(mp.exp(-values[i]) * w[i] ** 2 for i in range(3))
    by_v = vectors * mp.matrix([2 * mp.exp(-values[i]) * w[i] for i in range(3)])

    def divided(i, j):
        gap = values[i] - values[j]
        if abs(gap) < mp.mpf(10) ** -25:
            return -mp.exp(-values[i])
        return (mp.exp(-values[i]) - mp.exp(-values[j])) / gap

    by_damped = []
    for q in basis:
        rotated = vectors.T * q * vectors
        by_damped.append(mp.fsum(w[i] * w[j] * rotated[i, j] * divided(i, j) for i in range(3) for j in range(3)))

    nll, evidence = nll_of(s, raw_nu, raw_kappa, mahalanobis)
    pull = slope(lambda x: nll_of(s, raw_nu, raw_kappa, x)[0], mahalanobis)

    def through_damper(k):
        along = [
            slope(lambda x, j=j: damp_vector([*t[:k], x, *t[k + 1 :]])[j], t[k]) * g for j, g in enumerate(by_damped)
        ]
        return pull * mp.fsum(along)

    factor = mp.exp(damp(s, *SCALAR) / root(3)) * mp.mpf(UNIT) ** 2
    sigma0 = vectors * mp.diag([factor * mp.exp(x) for x in values]) * vectors.T
    return {
        "nll": nll,
        "regulariser": evidence * mp.norm(v),
        "by_s": slope(lambda x: nll_of(x, raw_nu, raw_kappa, mahalanobis)[0], s),
        "by_t": [through_damper(k) for k in range(5)],
        "by_nu": slope(lambda x: nll_of(s, x, raw_kappa, mahalanobis)[0], raw_nu),
        "by_kappa": slope(lambda x: nll_of(s, raw_nu, x, mahalanobis)[0], raw_kappa),
        "by_residual": [pull * x / mp.mpf(UNIT) for x in by_v],
        "sigma0": [sigma0[i, j] for i, j in ((0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1))],
    }


@functools.cache
def table() -> dict[str, torch.Tensor]:
    """The reference of every case."""
    found = []
    with mpmath.workdps(60):
        for row in torch.cat(inputs(), 1).tolist():
            s, nu, kappa, *others = (mpmath.mpf(x) for x in row)
            found.append(reference(s, others[:5], nu, kappa, others[5:]))
    as_float = [
        {k: [float(y) for y in x] if isinstance(x, list) else float(x) for k, x in row.items()} for row in found
    ]
    return {name: torch.tensor([row[name] for row in as_float], dtype=F64) for name in as_float[0]}


def run(path: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    on_gpu = path == "triton" and not paths.interpreted()
    leaves = [x.to(dtype).to("cuda" if on_gpu else "cpu").requires_grad_() for x in inputs()]
    if path == "plain":
        rest = (torch.tensor(UNIT, dtype=dtype), Constants(False, SCALAR, TENSOR))
        (nll, regulariser), spread = (
            plain.nll_terms(*leaves, *rest),
            plain.distribution(leaves[0], torch.zeros_like(leaves[0][:, 0]), *rest),
        )
    else:
        rest = (UNIT, False, SCALAR, TENSOR)
        (nll, regulariser), spread = nll_terms(*leaves, *rest, path=path), distribution(leaves[0], *rest, path=path)
    by_coefficients, by_residual = torch.autograd.grad(nll.sum(), leaves)
    out = dict(zip(("by_s", "by_nu", "by_kappa"), by_coefficients.unbind(1), strict=False))
    out |= {"by_t": by_coefficients[:, 3:], "by_residual": by_residual}
    out |= {"nll": nll, "regulariser": regulariser, "sigma0": spread[1]}
    return {name: x.detach().cpu().to(F64) for name, x in out.items()}


def relative_errors(ours: dict[str, torch.Tensor], by_t_noise: float = 0.0) -> dict[str, torch.Tensor]:
    """Error of each atom relative to what the result is a sum of; blocks by their norm.

    ``by_t_noise``: autograd adds the rounding of the trace of log Σ0 to the gradient in t, which the gradients of the
    Triton kernel do not have.
    """
    exact, errors = table(), {}
    pull = exact["by_s"] - 0.5 * 3**0.5
    for name, reference_ in exact.items():
        size = reference_.abs() if reference_.dim() == 1 else reference_.norm(dim=1)
        if name == "nll":
            # A relative error ε of the Mahalanobis form M is one of ε ½ (ν+1) z in the NLL, z = x/(1+x).
            size = size + 3**0.5 * pull.abs()
        elif name == "by_s":
            size = size + 0.5 * 3**0.5
        elif name == "by_t":
            size = size + by_t_noise
        difference = ours[name] - reference_
        difference = difference.abs() if difference.dim() == 1 else difference.norm(dim=1)
        # At ν = 1e30 the gradient in ν is 1e-60, less than the reference resolves.
        errors[name] = difference / size.clamp(min=1e-20)
    return errors


#: Largest relative error allowed; the eager path computes in float64 and rounds once.
BOUNDS = {
    ("eager", torch.float32): 1e-7,
    ("triton", torch.float32): 2e-6,
    ("plain", torch.float32): 2e-6,
    ("eager", F64): 1e-14,
    ("triton", F64): 1e-14,
    ("plain", F64): 1e-14,
}


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=["float32", "float64"])
@pytest.mark.parametrize("path", PATHS)
def test_accuracy_on_worst_cases(path, dtype):
    errors = relative_errors(run(path, dtype), by_t_noise=0.0 if path == "triton" else 1.0)
    # Autograd of log1p(x) loses the digits of log1p(x) - x/(1+x) at large ν, and squares ν out of float32's range.
    # Where float64 is rounded to float32, enough digits are left.
    inexact = {"plain": ("by_nu", "by_kappa"), "eager": ("by_nu",) if dtype == F64 else ()}.get(path, ())
    usual = torch.tensor([row[3] <= 30 for row in cases()])
    errors |= {name: errors[name][usual] for name in inexact}
    report = "\n".join(f"{name:12s} median {x.median():.1e} max {x.max():.1e}" for name, x in errors.items())
    print(f"{path} {dtype}\n{report}")
    # A NaN is never below the bound.
    bounds = {name: BOUNDS[path, dtype] for name in errors}
    if dtype == F64:
        # The terms in ν cancel to 1/ν of their size.
        bounds["by_nu"] = 1e-12
    assert all((x <= bounds[name]).all() for name, x in errors.items()), report
