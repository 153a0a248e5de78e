r"""The Student-t distribution of an atomic force with evidence ν and κ (d = 3).

Parameters per atom: location γ (the host's forces), L = log Σ0 as sym6 in log(eV²/Å²), evidence ν > 5
and κ > 0. The predictive is a Student-t with m = ν - 2 degrees of freedom and scale matrix
Λ = ν(κ+1)/(κ(ν-2)) Σ0 (paper, Eq. 7).
"""

import math
from typing import List, Optional, Tuple

import torch
from torch import Tensor

from e2ip_plugins.maths.spd import half_exp_matvec

#: ν > d + 1 makes the covariance exist; the paper keeps ν ≥ d + 2 (Eq. 9).
MIN_NU = 5.0
MIN_KAPPA = 1e-6


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), smooth everywhere."""
    # torch's own softplus switches to the identity above a threshold, which puts a step into gradients;
    # clamp(x) + log1p(exp(-|x|)) has the wrong subgradient at 0, where training starts.
    return torch.logaddexp(x, torch.zeros_like(x))


def evidence(
    raw_nu: Tensor, raw_kappa: Optional[Tensor], min_nu: float = MIN_NU, min_kappa: float = MIN_KAPPA
) -> Tuple[Tensor, Tensor]:
    """ν and κ (...,) from unconstrained outputs; without ``raw_kappa``, coupled: κ = ν - 5 + 1e-6.

    Paper, Eq. 9; the coupling follows Meinert & Lavin (2021, https://arxiv.org/abs/2104.06135), because the
    likelihood sees κ and Σ0 only through (1+κ)/κ Σ0.
    """
    above_minimum = softplus(raw_nu)
    if raw_kappa is None:
        return above_minimum + min_nu, above_minimum + min_kappa
    return above_minimum + min_nu, softplus(raw_kappa) + min_kappa


def log_gamma_rest_coefficients(double: bool) -> List[float]:
    """Coefficients of R(u) = lnΓ(m/2+3/2) - lnΓ(m/2) - 1.5 ln w, from u¹ on, with u = 1/w² and w = (2m+1)/4, m ≥ 3.

    The errors are 2e-16 with ``double`` and 2e-10 without. TorchScript reads no module-level list of floats.
    """
    if double:
        return [
            -0.0781249999999978241,
            0.000488281246982994041,
            -0.00132242767431675366,
            0.00131695634069072885,
            -0.00240571746140381532,
            0.00659897835717241076,
            -0.0239821600648960473,
            0.0983837623358096548,
            -0.389347451175356542,
            1.32193446370477011,
            -3.55257736455648384,
            7.07860841477950589,
            -9.70835827501525845,
            8.12697743647297244,
            -3.11781379139744176,
        ]
    return [-0.07812499889, 4.88034184e-4, -1.312958192e-3, 1.173398046e-3, -1.265340346e-3, 8.032483939e-4]


def _log_gamma_ratio_rest(m: Tensor) -> Tensor:
    """R with lnΓ(m/2+3/2) - lnΓ(m/2) = 1.5 ln w + R(1/w²), w = (2m+1)/4, for m (...,) ≥ 3.

    A polynomial in place of two lgammas, whose difference loses its digits at large ν.
    """
    u = (4.0 / (2.0 * m + 1.0)).square()
    coefficients = log_gamma_rest_coefficients(m.dtype == torch.float64)
    total = torch.full_like(u, coefficients[-1])
    for i in range(len(coefficients) - 1):
        total = total * u + coefficients[len(coefficients) - 2 - i]
    return total * u


def negative_log_likelihood(log_sigma0: Tensor, nu: Tensor, kappa: Tensor, residual: Tensor) -> Tensor:
    """-log density of the predictive Student-t at γ + residual, in nats for a density in (eV/Å)⁻³.

    Paper, Eq. 25, rearranged so that no lgamma, factorisation or inverse occurs.

    Parameters
    ----------
    log_sigma0 : (..., 6)
        log(Σ0) in log(eV²/Å²).
    nu, kappa : (...,)
    residual : (..., 3)
        y - γ in eV/Å.

    Returns
    -------
    (...,)

    Examples
    --------
    At the location of a Student-t with m = 6 and Λ = 8/3 I:

    >>> negative_log_likelihood(torch.zeros(6), torch.tensor(8.0), torch.tensor(1.0), torch.zeros(3))
    tensor(4.1154)
    """
    mahalanobis = half_exp_matvec(log_sigma0, residual, -1.0).square().sum(-1)
    return negative_log_density(mahalanobis, log_sigma0[..., :3].sum(-1), nu, kappa)


def negative_log_density(mahalanobis: Tensor, log_det: Tensor, nu: Tensor, kappa: Tensor) -> Tensor:
    """As `negative_log_likelihood` (...,), from vᵀ Σ0⁻¹ v and log det Σ0 (...,) of whatever units."""
    m = nu - 2.0
    x = mahalanobis / (nu * (1.0 + 1.0 / kappa))
    return (
        1.5 * math.log(2.0 * math.pi)
        + 1.5 * torch.log1p(3.0 / (2.0 * m + 1.0))
        - _log_gamma_ratio_rest(m)
        + 1.5 * torch.log1p(1.0 / kappa)
        + 0.5 * log_det
        + 0.5 * (nu + 1.0) * torch.log1p(x)
    )


def evidence_regulariser(nu: Tensor, kappa: Tensor, residual: Tensor, force_unit: Tensor) -> Tensor:
    """(ν + κ) ‖y - γ‖/σ_ref (paper, Eq. 14), with a zero (sub)gradient at zero residual."""
    square = (residual / force_unit.unsqueeze(-1)).square().sum(-1)
    positive = square > 0
    norm = torch.where(positive, torch.where(positive, square, torch.ones_like(square)).sqrt(), square)
    return (nu + kappa) * norm


def aleatoric_factor(nu: Tensor) -> Tensor:
    """U_ale / Σ0 = ν/(ν-4) (paper, Eq. 8)."""
    return nu / (nu - 4.0)


def predictive_scale_factor(nu: Tensor, kappa: Tensor) -> Tensor:
    """Λ / Σ0 = ν(κ+1)/(κ(ν-2)) (paper, Eq. 7)."""
    return nu * (1.0 + 1.0 / kappa) / (nu - 2.0)
