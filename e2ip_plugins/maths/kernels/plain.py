"""The reference path: `e2ip_plugins.maths.spd` and `e2ip_plugins.maths.student` composed, differentiable to any order.

What TorchScript, `torch.compile` and `torch.export` see, and what higher derivatives use on every path.
"""

from typing import Optional, Tuple

import torch
from torch import Tensor

from e2ip_plugins.maths.kernels.constants import Constants
from e2ip_plugins.maths.spd import damp, damp_vector, exp_sym6, tangent_to_sym6
from e2ip_plugins.maths.student import evidence, evidence_regulariser, negative_log_likelihood


def split(coefficients: Tensor, coupled: bool) -> Tuple[Tensor, Tensor, Tensor, Optional[Tensor]]:
    """Return s, t, raw ν and raw κ (None where coupled) of coefficients (N, 8).

    s is NaN where it or the evidence is not finite: dampers and softplus would turn infinity into a number.
    """
    s, raw_nu = coefficients[:, 0], coefficients[:, 1]
    nan_where_not_finite = (s - s) + (raw_nu - raw_nu)
    raw_kappa: Optional[Tensor] = None
    if not coupled:
        raw_kappa = coefficients[:, 2]
        nan_where_not_finite = nan_where_not_finite + (raw_kappa - raw_kappa)
    return s + nan_where_not_finite.detach(), coefficients[:, 3:], raw_nu, raw_kappa


def log_sigma0_of(
    s: Tensor, t: Tensor, force_unit: Tensor, constants: Constants, flattening: Optional[Tensor] = None
) -> Tensor:
    """log Σ0/(eV²/Å²) as sym6 (N, 6)."""
    damped_s = damp(s, constants.scalar_damper[0], constants.scalar_damper[1])
    damped_t = damp_vector(t, constants.tensor_damper[0], constants.tensor_damper[1])
    if flattening is not None:
        damped_t = damped_t * torch.rsqrt(1.0 + flattening * damped_t.square().sum(-1)).unsqueeze(-1)
    unit_diagonal = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0], dtype=s.dtype, device=s.device)
    log_unit = 2.0 * torch.log(force_unit).unsqueeze(-1)
    return tangent_to_sym6(damped_s, damped_t) + log_unit * unit_diagonal


def nll_terms(
    coefficients: Tensor, residual: Tensor, force_unit: Tensor, constants: Constants
) -> Tuple[Tensor, Tensor]:
    """As `e2ip_plugins.maths.kernels.nll_terms`, with σ_ref (0-d or (N,)) and all others tensors of one dtype."""
    s, t, raw_nu, raw_kappa = split(coefficients, constants.coupled)
    log_sigma0 = log_sigma0_of(s, t, force_unit, constants)
    nu, kappa = evidence(raw_nu, raw_kappa)
    nll = negative_log_likelihood(log_sigma0, nu, kappa, residual)
    return nll, evidence_regulariser(nu, kappa, residual, force_unit)


def nll_terms_in_double(
    coefficients: Tensor, residual: Tensor, force_unit: Tensor, constants: Constants
) -> Tuple[Tensor, Tensor]:
    """As `nll_terms`, computed in float64 and rounded once: at a few hundred atoms it costs the same as float32."""
    if coefficients.device.type == "mps":  # which has no float64
        return nll_terms(coefficients, residual, force_unit, constants)
    nll, regulariser = nll_terms(coefficients.double(), residual.double(), force_unit.double(), constants)
    return nll.to(coefficients.dtype), regulariser.to(coefficients.dtype)


def distribution(
    coefficients: Tensor, flattening: Tensor, force_unit: Tensor, constants: Constants
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `e2ip_plugins.maths.kernels.distribution`, with flattening (N,), σ_ref (0-d or (N,)) and coefficients
    of one dtype."""
    s, t, raw_nu, raw_kappa = split(coefficients, constants.coupled)
    log_sigma0 = log_sigma0_of(s, t, force_unit, constants, flattening)
    nu, kappa = evidence(raw_nu, raw_kappa)
    scalar_knee, tensor_knee = constants.scalar_damper[0], constants.tensor_damper[0]
    past_knee = (s.square() > scalar_knee**2) | (t.square().sum(-1) > tensor_knee**2)
    return log_sigma0, exp_sym6(log_sigma0), nu, kappa, past_knee.to(s.dtype)
