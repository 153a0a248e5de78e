"""The force block of the training loss: NLL + λ·regulariser per atom, and its size.

A likelihood pulls on a force with the inverse of its covariance. Atoms that are predicted badly get a
large variance, then hardly any pull, and stay bad: the pitfall of heteroscedastic regression (Seitzer
et al. 2022, https://arxiv.org/abs/2203.09168), which makes the balance with the energy term depend on
the stage of training, too. ``mse_like`` losses therefore keep the pull from weakening, as β-NLL does in
another way: atoms whose predicted σ exceeds `PULL_CEILING` are pulled as if it were just that, with the
same weight for all of them. Below it the gradient is that of the likelihood, and weighting by
precision helps. The value of the loss and its gradients in all distribution parameters are those of
the likelihood everywhere.
"""

import math
from typing import Dict, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from e2ip_plugins.families.presets_tmp import (
    PRESETS,
    TENSOR_DAMPER,
    get_preset,
    resolve_evidence,
    resolve_evidence_weight,
)
from e2ip_plugins.keys import COEFFICIENTS_KEY, FORCE_UNIT_KEY, PARAMETER_KEYS
from e2ip_plugins.maths.kernels import nll_terms
from e2ip_plugins.maths.kernels.plain import keep_pull
from e2ip_plugins.maths.student import evidence_regulariser, negative_log_likelihood

# Σ0 ≥ exp(-c/√3) σ_ref² isotropically, hence NLL ≥ 1.5 ln 2π - (√3/2) c in units of σ_ref. Adding the
# negative of that keeps the loss ≥ 0: ReduceLROnPlateau takes a *relative* threshold of a negative
# loss as a licence to count a flat loss as an improvement for ever.
_NLL_FLOOR = 1.5 * math.log(2.0 * math.pi) - 0.5 * math.sqrt(3.0) * PRESETS["default"].scalar_damper[1]

#: In units of σ_ref, chosen by measurement (docs/uncertainty.md): a higher one makes better likelihoods where
#: errors are small and leaves badly predicted atoms behind where they are not.
PULL_CEILING = 3.0


class ForceLossSettings(NamedTuple):
    """What the force block needs beyond the model's outputs."""

    evidence: str
    evidence_weight: float
    mse_like: bool
    scalar_damper: Tuple[float, float]


def force_loss_settings(
    preset: str = "default", evidence: Optional[str] = None, evidence_weight: Optional[float] = None
) -> ForceLossSettings:
    """Settings from the user's options; raises `InputError` for options that do not go together."""
    chosen = get_preset(preset)
    mode = resolve_evidence(chosen, evidence)
    weight = resolve_evidence_weight(chosen, mode, evidence_weight)
    return ForceLossSettings(mode, weight, chosen.mse_like, chosen.scalar_damper)


def force_loss(
    reference: Tensor,
    forces: Tensor,
    log_sigma0: Tensor,
    nu: Tensor,
    kappa: Tensor,
    force_unit: Tensor,
    settings: ForceLossSettings,
) -> Tuple[Tensor, Tensor]:
    """Loss per atom and the mask of atoms that count.

    Parameters
    ----------
    reference, forces : (N, 3)
        y and γ in eV/Å. Atoms with a NaN or infinite reference are masked.
    log_sigma0 : (N, 6)
    nu, kappa, force_unit : (N,)
        ``force_unit`` is σ_ref in eV/Å.

    Returns
    -------
    loss : (N,)
        With ``mse_like``: 2σ_ref²/3 · (NLL + λ·reg + constant) ≥ 0, NLL of forces in units of σ_ref, in
        (eV/Å)²; at errors of about σ_ref its gradient in the forces is that of the mean square error over
        components, and a predicted σ above `PULL_CEILING` does not weaken it further (see the module).
        Otherwise NLL (density in eV/Å) + λ·reg, in nats. Zero where masked.
    mask : (N,) bool
    """
    mask, residual = _residual(reference, forces)
    scored = residual
    if settings.mse_like:
        scored = keep_pull(residual, log_sigma0, nu, kappa, force_unit, PULL_CEILING)
    nll = negative_log_likelihood(log_sigma0, nu, kappa, scored)
    regulariser = evidence_regulariser(nu, kappa, residual, force_unit)
    return _loss(nll, regulariser, mask, force_unit, settings), mask


def force_loss_of_outputs(
    reference: Tensor, forces: Tensor, outputs: Dict[str, Tensor], settings: ForceLossSettings
) -> Tuple[Tensor, Tensor]:
    """`force_loss` from a model's output dictionary, in one go from the head's raw outputs where it has them.

    ``e2ip_coefficients`` (N, 8) become the distribution that the settings' preset makes of them. ``e2ip_force_unit``
    and, without coefficients, ``e2ip_nu`` and ``e2ip_kappa`` may be (N,) or (N, 1).
    """
    force_unit = outputs[FORCE_UNIT_KEY].reshape(-1)
    if COEFFICIENTS_KEY not in outputs:
        log_sigma0, nu, kappa = (outputs[key.name] for key in PARAMETER_KEYS)
        return force_loss(reference, forces, log_sigma0, nu.reshape(-1), kappa.reshape(-1), force_unit, settings)
    mask, residual = _residual(reference, forces)
    s, t, raw_nu, raw_kappa = split_coefficients(outputs[COEFFICIENTS_KEY], settings.evidence)
    ceiling = PULL_CEILING if settings.mse_like else None
    nll, regulariser = nll_terms(
        s, t, raw_nu, raw_kappa, residual, force_unit, settings.scalar_damper, TENSOR_DAMPER, ceiling
    )
    return _loss(nll, regulariser, mask, force_unit, settings), mask


def split_coefficients(coefficients: Tensor, evidence: str) -> Tuple[Tensor, Tensor, Tensor, Optional[Tensor]]:
    """s (N,), t (N, 5), ν̂ and κ̂ (N,) of ``e2ip_coefficients`` (N, 8); κ̂ is None in coupled mode."""
    raw_kappa = None if evidence == "coupled" else coefficients[..., 7]
    return coefficients[..., 0], coefficients[..., 1:6], coefficients[..., 6], raw_kappa


def _residual(reference: Tensor, forces: Tensor) -> Tuple[Tensor, Tensor]:
    mask = torch.isfinite(reference).all(dim=-1)
    return mask, torch.where(mask.unsqueeze(-1), reference - forces, torch.zeros_like(forces))


def _loss(nll: Tensor, regulariser: Tensor, mask: Tensor, force_unit: Tensor, settings: ForceLossSettings) -> Tensor:
    loss = nll
    if settings.evidence_weight > 0:
        loss = loss + settings.evidence_weight * regulariser
    if settings.mse_like:
        in_force_units = loss - 3.0 * torch.log(force_unit) - _NLL_FLOOR
        loss = (2.0 / 3.0) * force_unit.square() * in_force_units
    return torch.where(mask, loss, torch.zeros_like(loss))


def masked_mean(loss: Tensor, mask: Tensor) -> Tensor:
    """Mean over the atoms that count; 0 where none does."""
    return loss.sum() / mask.sum().clamp(min=1)
