"""``eip``: a Normal-Inverse-Gamma for every Cartesian component (Xu et al. 2025, https://arxiv.org/abs/2407.13994).

The diagonal counterpart of ``e2ip``: three independent distributions along the axes of a fixed frame, with evidence of
their own, from invariant features. Per component NIG(γ, ν, α, β), γ being the predicted force, in units of σ_ref. Two
likelihoods:

``quantile``
    As published: evidential quantile regression (Hüttel et al. 2023) at q = 0.6. With
    z = β/(α-1), τ = (1-2q)/(q(1-q)) and ω = 2/(q(1-q)) the component follows a Student-t of 2α degrees of freedom,
    location γ + τz and squared scale 2β(1 + ωνz)/(αν).
``nig``
    The marginal of the NIG itself (Amini et al. 2020, https://arxiv.org/abs/1910.02600): 2α degrees of freedom,
    location γ and squared scale β(1 + ν)/(αν).

Files carry these Student-t distributions, not ν, α and β: z is a variance that the published form takes for a length,
so that β does not convert to other units.
"""

import math
from typing import Any, Dict, Final, Mapping, Optional, Tuple

import numpy as np
import torch
from torch import Tensor

from e2ip_plugins.families.interface import INITIAL_SIGMA, SCALAR_DAMPER, Family, Option, checked_number, force_views
from e2ip_plugins.keys import COEFFICIENTS_KEY, FORCE_UNIT_KEY, OutputKey
from e2ip_plugins.leverage.form import Support
from e2ip_plugins.maths.spd import damp
from e2ip_plugins.maths.student import softplus

#: q, and weight of the regulariser (the authors' programs).
QUANTILE, REGULARISER_WEIGHT = 0.6, 0.1

MIN_EVIDENCE = 1e-6


class EIP(Family):
    """See the module and `Family`. Coefficients are log β, raw α and raw ν of x, y and z."""

    name = "eip"
    uq_family = "nig"
    law_name = "componentwise"
    equivariant = False
    options = (
        Option("likelihood", "quantile (the default, as published) or nig", "quantile", choices=("quantile", "nig")),
        Option(
            "regulariser_weight",
            f"weight of the evidence regulariser (default: {REGULARISER_WEIGHT})",
            REGULARISER_WEIGHT,
            float,
            loss_only=True,
        ),
    )
    parameter_keys = (
        OutputKey("eip_shift", (3,), "eV/Å", "location of every component's Student-t, minus the predicted force"),
        OutputKey("eip_log_scale2", (3,), "log(eV²/Å²)", "logarithm of its squared scale"),
        OutputKey("eip_dof", (3,), "1", "its degrees of freedom 2α > 2", above=2.0),
        OutputKey("eip_epistemic_share", (3,), "1", "epistemic part of its variance", above=0.0),
    )

    num_scalars = 9
    num_tensors = 0
    quantile: Final[bool]

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self.quantile = options["likelihood"] == "quantile"
        self.regulariser_weight = float(options["regulariser_weight"])
        self.damper: Tuple[float, float] = SCALAR_DAMPER  # on log β
        self.q: float = QUANTILE
        self.min_evidence: float = MIN_EVIDENCE
        self.initial_scalars = (2.0 * math.log(INITIAL_SIGMA),) * 3 + (0.0,) * 6

    @classmethod
    def resolve(cls, user_options: Mapping[str, Any]) -> Dict[str, Any]:
        """See `Family`."""
        options = super().resolve(user_options)
        return {**options, "regulariser_weight": checked_number(options, "regulariser_weight")}

    def evidence(self, coefficients: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        """Return ν, α and β (N, 3), the last in units of σ_ref²."""
        # Dampers and softplus would turn infinity into a number; this adds NaN where a coefficient is not finite.
        nan_where_not_finite = (coefficients - coefficients).detach().sum(-1, keepdim=True)
        beta = torch.exp(damp(coefficients[:, :3], self.damper[0], self.damper[1])) + nan_where_not_finite
        alpha = softplus(coefficients[:, 3:6]) + (1.0 + self.min_evidence)
        return softplus(coefficients[:, 6:]) + self.min_evidence, alpha, beta

    def student(self, coefficients: Tensor) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return shift, squared scale, degrees of freedom and epistemic share (N, 3), in units of σ_ref."""
        nu, alpha, beta = self.evidence(coefficients)
        if self.quantile:
            mean_variance = beta / (alpha - 1.0)
            product = self.q * (1.0 - self.q)
            relative = (2.0 / product) * nu * mean_variance
            scale2 = 2.0 * beta * (1.0 + relative) / (alpha * nu)
            return (1.0 - 2.0 * self.q) / product * mean_variance, scale2, 2.0 * alpha, 1.0 / (1.0 + relative)
        return torch.zeros_like(nu), beta * (1.0 + nu) / (alpha * nu), 2.0 * alpha, 1.0 / (1.0 + nu)

    def forward(self, coefficients: Tensor, force_unit: Tensor, support: Optional[Support] = None) -> Dict[str, Tensor]:
        """See `Family`."""
        shift, scale2, dof, share = self.student(coefficients)
        log_scale2 = torch.log(scale2) + 2.0 * torch.log(force_unit)
        outputs = _views(log_scale2, dof, share)
        outputs["eip_shift"] = shift * force_unit
        outputs["eip_log_scale2"] = log_scale2
        outputs["eip_dof"] = dof
        outputs["eip_epistemic_share"] = share
        past_knee = (coefficients[:, :3].abs() > self.damper[0]).any(-1)
        outputs["e2ip_plateau"] = past_knee.to(log_scale2.dtype)
        return outputs

    @classmethod
    def log_variance(cls, parameters: Dict[str, Tensor]) -> Tensor:
        """See `Family`."""
        dof = parameters["eip_dof"]
        return (parameters["eip_log_scale2"] + torch.log(dof / (dof - 2.0))).sum(-1) / 3.0

    def force_loss(self, residual: Tensor, outputs: Dict[str, Tensor]) -> Tensor:
        """Return the sum over components of NLL + λ ρ(e) |e| (2ν + α + 1/β), in units of σ_ref, times 2σ_ref²/3 (N,).

        ρ is the pinball loss at q, with ``nig`` half the absolute error. A constant keeps the loss from being negative
        for any but extreme evidence.
        """
        unit = outputs[FORCE_UNIT_KEY].unsqueeze(-1)
        error = residual / unit
        nu, alpha, beta = self.evidence(outputs[COEFFICIENTS_KEY])
        shift, scale2, dof, _ = self.student(outputs[COEFFICIENTS_KEY])
        tail = 0.5 * (dof + 1.0) * torch.log1p((error - shift).square() / (dof * scale2))
        half = 0.5 * dof
        nll = 0.5 * torch.log(math.pi * dof * scale2) + torch.lgamma(half) - torch.lgamma(half + 0.5) + tail
        q = self.q if self.quantile else 0.5
        pinball = torch.maximum(q * error, (q - 1.0) * error)
        loss = nll + self.regulariser_weight * pinball * error.abs() * (2.0 * nu + alpha + 1.0 / beta)
        return (2.0 / 3.0) * outputs[FORCE_UNIT_KEY].square() * (loss + 0.5 * self.damper[1]).sum(-1)

    @staticmethod
    def derive(parameters: Dict[str, Tensor]) -> Dict[str, Tensor]:
        """See `Family`."""
        return _views(parameters["eip_log_scale2"], parameters["eip_dof"], parameters["eip_epistemic_share"])

    @classmethod
    def convert(cls, parameters: Dict[str, Tensor], force_factor: float) -> Dict[str, Tensor]:
        """See `Family`."""
        return {
            **parameters,
            "eip_shift": parameters["eip_shift"] * force_factor,
            "eip_log_scale2": parameters["eip_log_scale2"] + 2.0 * math.log(force_factor),
        }

    @classmethod
    def widen(cls, parameters: Dict[str, Tensor], factor: Tensor, floor: Tensor) -> Dict[str, Tensor]:
        """See `Family`; locations stay."""
        dof, log_scale2 = parameters["eip_dof"], parameters["eip_log_scale2"]
        factor, floor2 = factor.unsqueeze(-1), floor.unsqueeze(-1) * (dof - 2.0) / dof
        more = torch.log(factor) + torch.log1p(floor2 / factor * torch.exp(-log_scale2))
        return {**parameters, "eip_log_scale2": log_scale2 + more}

    @staticmethod
    def law_arguments(parameters: Dict[str, np.ndarray]) -> Dict[str, np.ndarray]:
        """See `Family`; three independent Student-t distributions."""
        return {
            "shift": parameters["eip_shift"],
            "log_scale": parameters["eip_log_scale2"],
            "dof": parameters["eip_dof"],
            "epistemic_share": parameters["eip_epistemic_share"],
        }


def _views(log_scale2: Tensor, dof: Tensor, share: Tensor) -> Dict[str, Tensor]:
    variance = torch.exp(log_scale2) * dof / (dof - 2.0)
    return force_views(torch.diag_embed((1.0 - share) * variance), torch.diag_embed(share * variance))
