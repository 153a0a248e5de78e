"""A predictive family in one file, for tests: a Gaussian with one variance per atom. Nothing else knows it."""

import math
from typing import Any, Dict, Mapping, Optional

import numpy as np
import torch
from torch import Tensor

from e2ip_plugins.families.interface import Family, force_views
from e2ip_plugins.keys import FORCE_UNIT_KEY, OutputKey
from e2ip_plugins.leverage.form import Support
from e2ip_plugins.maths.spd import damp

#: Knee and ceiling of the damper on log(σ/σ_ref).
KNEE, CEILING = 4.0, 5.0


class Isotropic(Family):
    """N(γ, σ² I) with log(σ/σ_ref) the only coefficient."""

    name = "isotropic"
    uq_family = "isotropic"
    parameter_keys = (OutputKey("isotropic_log_std", (), "log(eV/Å)", "logarithm of the standard deviation"),)

    num_scalars = 1
    num_tensors = 0
    initial_scalars = (2.0,)

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self.knee: float = KNEE
        self.ceiling: float = CEILING

    def forward(self, coefficients: Tensor, force_unit: Tensor, support: Optional[Support] = None) -> Dict[str, Tensor]:
        log_ratio = coefficients[:, 0]
        # The damper would turn infinity into a number; this adds NaN where the coefficient is not finite, else 0.
        nan_where_not_finite = (log_ratio - log_ratio).detach()
        log_std = damp(log_ratio, self.knee, self.ceiling) + nan_where_not_finite + torch.log(force_unit)
        outputs = _views(log_std)
        outputs["isotropic_log_std"] = log_std
        outputs["e2ip_plateau"] = (log_ratio.abs() > self.knee).to(log_std.dtype)
        return outputs

    def force_loss(self, residual: Tensor, outputs: Dict[str, Tensor]) -> Tensor:
        unit = outputs[FORCE_UNIT_KEY]
        # A family may start from its parameters as well as from e2ip_coefficients.
        log_std = outputs["isotropic_log_std"] - torch.log(unit)
        nll = 3.0 * log_std + 0.5 * (residual / unit.unsqueeze(-1)).square().sum(-1) * torch.exp(-2.0 * log_std)
        # The constant keeps the loss at least 0.
        return 2.0 / 3.0 * unit.square() * (nll + 3.0 * self.ceiling)

    @staticmethod
    def derive(parameters: Dict[str, Tensor]) -> Dict[str, Tensor]:
        return _views(parameters["isotropic_log_std"])

    @classmethod
    def convert(cls, parameters: Dict[str, Tensor], force_factor: float) -> Dict[str, Tensor]:
        return {"isotropic_log_std": parameters["isotropic_log_std"] + math.log(force_factor)}

    @classmethod
    def widen(cls, parameters: Dict[str, Tensor], factor: Tensor, floor: Tensor) -> Dict[str, Tensor]:
        log_std = parameters["isotropic_log_std"]
        more = torch.log(factor) + torch.log1p(floor / factor * torch.exp(-2.0 * log_std))
        return {"isotropic_log_std": log_std + 0.5 * more}

    @staticmethod
    def law_arguments(parameters: Dict[str, np.ndarray]) -> Dict[str, np.ndarray]:
        return {"log_matrix": 2.0 * parameters["isotropic_log_std"][:, None] * [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]}


def _views(log_std: Tensor) -> Dict[str, Tensor]:
    eye = torch.eye(3, dtype=log_std.dtype, device=log_std.device)
    covariance = torch.exp(2.0 * log_std)[..., None, None] * eye
    return force_views(covariance, torch.zeros_like(covariance))
