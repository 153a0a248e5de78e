"""The reference path: `e2ip_plugins.maths.spd` and `e2ip_plugins.maths.student` composed, differentiable to any order.

What TorchScript, `torch.compile` and `torch.export` see, and what higher derivatives use on every path.
"""

from typing import Optional, Tuple

import torch
from torch import Tensor

from e2ip_plugins.maths.spd import damp, damp_vector, exp_sym6, tangent_to_sym6
from e2ip_plugins.maths.student import evidence, evidence_regulariser, negative_log_likelihood, predictive_scale_factor


def nan_where_not_finite(s: Tensor, raw_nu: Tensor, raw_kappa: Optional[Tensor]) -> Tensor:
    """s, but NaN where it or the evidence is not finite: dampers and softplus would make numbers of infinities."""
    doubt = (s - s) + (raw_nu - raw_nu)
    if raw_kappa is not None:
        doubt = doubt + (raw_kappa - raw_kappa)
    return s + doubt.detach()


def log_sigma0_of(
    s: Tensor, t: Tensor, force_unit: Tensor, scalar_damper: Tuple[float, float], tensor_damper: Tuple[float, float]
) -> Tensor:
    """log Σ0/(eV²/Å²) as sym6 (N, 6); arguments as in `nll_terms`."""
    damped_s = damp(s, scalar_damper[0], scalar_damper[1])
    damped_t = damp_vector(t, tensor_damper[0], tensor_damper[1])
    unit_diagonal = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0], dtype=s.dtype, device=s.device)
    log_unit = 2.0 * torch.log(force_unit).unsqueeze(-1)
    return tangent_to_sym6(damped_s, damped_t) + log_unit * unit_diagonal


def keep_pull(
    residual: Tensor, log_sigma0: Tensor, nu: Tensor, kappa: Tensor, force_unit: Tensor, pull_ceiling: float
) -> Tensor:
    """The residual itself (N, 3), its gradient times max(1, predictive variance/(ceiling σ_ref)²).

    The variance is the geometric mean over directions, det(Λ)^(1/3).
    """
    log_variance = log_sigma0[..., :3].sum(-1) / 3.0 + torch.log(predictive_scale_factor(nu, kappa))
    excess = log_variance - 2.0 * torch.log(pull_ceiling * force_unit)
    pull = torch.exp(excess.clamp(min=0.0)).detach()
    constant = residual.detach()
    return constant + pull.unsqueeze(-1) * (residual - constant)


def nll_terms(
    s: Tensor,
    t: Tensor,
    raw_nu: Tensor,
    raw_kappa: Optional[Tensor],
    residual: Tensor,
    force_unit: Tensor,
    scalar_damper: Tuple[float, float],
    tensor_damper: Tuple[float, float],
    pull_ceiling: Optional[float] = None,
) -> Tuple[Tensor, Tensor]:
    """As `e2ip_plugins.maths.kernels.nll_terms`, with σ_ref (0-d or (N,)) and all others tensors of one dtype."""
    s = nan_where_not_finite(s, raw_nu, raw_kappa)
    log_sigma0 = log_sigma0_of(s, t, force_unit, scalar_damper, tensor_damper)
    nu, kappa = evidence(raw_nu, raw_kappa)
    scored = residual
    if pull_ceiling is not None:
        scored = keep_pull(residual, log_sigma0, nu, kappa, force_unit, pull_ceiling)
    nll = negative_log_likelihood(log_sigma0, nu, kappa, scored)
    return nll, evidence_regulariser(nu, kappa, residual, force_unit)


def distribution(
    s: Tensor,
    t: Tensor,
    raw_nu: Tensor,
    raw_kappa: Optional[Tensor],
    force_unit: Tensor,
    scalar_damper: Tuple[float, float],
    tensor_damper: Tuple[float, float],
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `e2ip_plugins.maths.kernels.distribution`, with σ_ref (0-d or (N,)) and all others tensors of one dtype."""
    s = nan_where_not_finite(s, raw_nu, raw_kappa)
    log_sigma0 = log_sigma0_of(s, t, force_unit, scalar_damper, tensor_damper)
    nu, kappa = evidence(raw_nu, raw_kappa)
    past_knee = (s.square() > scalar_damper[0] ** 2) | (t.square().sum(-1) > tensor_damper[0] ** 2)
    return log_sigma0, exp_sym6(log_sigma0), nu, kappa, past_knee.to(s.dtype)
