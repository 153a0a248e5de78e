"""Base of the Gaussian families: their one parameter, the logarithm of the covariance, and everything that follows.

A Gaussian family says how coefficients become that logarithm. Its covariance is aleatoric: a variance that was learned
from errors says nothing about what the model was not trained on. Several runs make a deep ensemble, whose disagreement
is epistemic (`e2ip_plugins.families.interface.committee_views`).
"""

import math
from typing import Any, Dict, Mapping, Optional, Tuple

import numpy as np
import torch
from torch import Tensor

from e2ip_plugins.families.interface import (
    SCALAR_DAMPER,
    TENSOR_DAMPER,
    Family,
    beta_option,
    checked_number,
    force_views,
    pulled,
)
from e2ip_plugins.keys import FORCE_UNIT_KEY, OutputKey
from e2ip_plugins.leverage.form import Support
from e2ip_plugins.maths.spd import damp, damp_vector, exp_sym6, half_exp_matvec, sym6_to_matrix


class Gaussian(Family):
    """Base class of families whose one parameter is the logarithm of the covariance; option ``beta``.

    A family with further parameters derives from `Family`.

    The loss is the Gaussian negative log likelihood (Nix & Weigend 1994; Lakshminarayanan et al. 2017,
    https://arxiv.org/abs/1612.01474). Its pull on the forces is weaker where the predicted variance is large;
    ``beta`` weakens that, see `e2ip_plugins.families.interface.pulled`.
    """

    uq_family = "gaussian"
    log_matrix = "gaussian_log_cov"
    options = (beta_option(0.0),)
    parameter_keys = (
        OutputKey(
            "gaussian_log_cov", (6,), "log(eV²/Å²)", "matrix logarithm of the covariance, xx, yy, zz, yz, xz, xy"
        ),
    )

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self.beta = float(options["beta"])
        self.scalar_damper: Tuple[float, float] = SCALAR_DAMPER
        self.tensor_damper: Tuple[float, float] = TENSOR_DAMPER

    @classmethod
    def resolve(cls, user_options: Mapping[str, Any]) -> Dict[str, Any]:
        """See `Family`."""
        return {"beta": checked_number(super().resolve(user_options), "beta", 1.0)}

    def parts(self, coefficients: Tensor) -> Tuple[Tensor, Tensor]:
        """Return trace/√3 (N,) and coordinates of the rest (N, k) of log(covariance/σ_ref²)."""
        raise NotImplementedError

    def assemble(self, isotropic: Tensor, rest: Tensor) -> Tensor:
        """Return the logarithm as sym6 (N, 6) from its parts."""
        raise NotImplementedError

    def forward(self, coefficients: Tensor, force_unit: Tensor, support: Optional[Support] = None) -> Dict[str, Tensor]:
        """See `Family`."""
        isotropic, rest = self.parts(coefficients)
        past_knee = (isotropic.abs() > self.scalar_damper[0]) | (rest.square().sum(-1) > self.tensor_damper[0] ** 2)
        # A damper would turn infinity into a number; this adds NaN where the part is not finite, else 0.
        nan_where_not_finite = (isotropic - isotropic).detach()
        isotropic = damp(isotropic, self.scalar_damper[0], self.scalar_damper[1]) + nan_where_not_finite
        log_covariance = self.assemble(isotropic, damp_vector(rest, self.tensor_damper[0], self.tensor_damper[1]))
        log_unit = 2.0 * torch.log(force_unit)
        log_covariance = torch.cat([log_covariance[:, :3] + log_unit, log_covariance[:, 3:]], dim=1)
        outputs = _views(log_covariance)
        outputs["gaussian_log_cov"] = log_covariance
        outputs["e2ip_plateau"] = past_knee.to(log_covariance.dtype)
        return outputs

    def force_loss(self, residual: Tensor, outputs: Dict[str, Tensor]) -> Tensor:
        """Return 2σ_ref²/3 · (NLL + constant) ≥ 0 of forces in units of σ_ref, in (eV/Å)² (N,).

        At errors of about σ_ref its gradient in the forces is that of the mean square error over components.
        """
        unit = outputs[FORCE_UNIT_KEY]
        log_unit = 2.0 * torch.log(unit).unsqueeze(-1)
        log_covariance = outputs["gaussian_log_cov"]
        log_covariance = torch.cat([log_covariance[:, :3] - log_unit, log_covariance[:, 3:]], dim=1)
        log_variance = log_covariance[:, :3].sum(-1) / 3.0
        residual = pulled(residual / unit.unsqueeze(-1), log_variance, self.beta)
        distance = half_exp_matvec(log_covariance, residual, -1.0).square().sum(-1)
        nll = 0.5 * distance + 1.5 * (log_variance + self.scalar_damper[1] / math.sqrt(3.0))
        return (2.0 / 3.0) * unit.square() * nll

    @staticmethod
    def derive(parameters: Dict[str, Tensor]) -> Dict[str, Tensor]:
        """See `Family`."""
        return _views(parameters["gaussian_log_cov"])

    @staticmethod
    def law_arguments(parameters: Dict[str, np.ndarray]) -> Dict[str, np.ndarray]:
        """See `Family`; the Gaussian with this covariance."""
        return {"log_matrix": parameters["gaussian_log_cov"]}


def _views(log_covariance: Tensor) -> Dict[str, Tensor]:
    covariance = sym6_to_matrix(exp_sym6(log_covariance))
    return force_views(covariance, torch.zeros_like(covariance))
