"""``e2ip-cholesky``: the distribution of ``e2ip`` with a Σ0 that does not turn with the structure.

Σ0 = L Lᵀ from invariant features: its directions are those of a fixed frame. The paper's ablation of equivariance
("w/o equivariance"), for comparisons; likelihood, evidence and leverage are those of ``e2ip``.
"""

import math
from typing import Dict, Optional, Tuple

import torch
from torch import Tensor

from e2ip_plugins.families.niw import NIW
from e2ip_plugins.leverage.form import FORM, LeverageForm
from e2ip_plugins.maths.spd import damp, log_spd
from e2ip_plugins.maths.student import evidence, evidence_regulariser, negative_log_density


class E2IPCholesky(NIW):
    """See the module and `NIW`.

    Coefficients are the logarithm of L_xx, ν̂, κ̂, the logarithms of L_yy and L_zz, and L_yx, L_zx and L_zy in units of
    L_yy, L_zz and L_zz. The mean of the logarithms is damped as s is in ``e2ip``; nothing bounds the conditioning.
    """

    name = "e2ip-cholesky"
    equivariant = False

    num_scalars = 8
    num_tensors = 0

    def start(self, sigma: float) -> Tuple[float, ...]:
        """See `NIW`."""
        return (math.log(sigma), 0.0, 0.0, math.log(sigma), math.log(sigma), 0.0, 0.0, 0.0)

    def factor(self, coefficients: Tensor) -> Tuple[Tensor, Tensor]:
        """Return log of the diagonal of L/σ_ref (N, 3), and yx, zx, zy in units of their row's diagonal (N, 3)."""
        # Softplus would turn infinite evidence into a number; this adds NaN where it is not finite, else 0.
        evidence = coefficients[:, 1] if self.coupled else coefficients[:, 1] + coefficients[:, 2]
        nan_where_not_finite = (evidence - evidence).detach().unsqueeze(-1)
        raw = torch.stack([coefficients[:, 0], coefficients[:, 3], coefficients[:, 4]], dim=-1) + nan_where_not_finite
        deviation = raw - raw.mean(-1, keepdim=True)
        log_diagonal = deviation + 0.5 * self.log_sigma2(coefficients).unsqueeze(-1)
        return log_diagonal, coefficients[:, 5:]

    def distribution(
        self, coefficients: Tensor, force_unit: Tensor, flattening: Optional[Tensor] = None
    ) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """See `NIW`; of log Σ0 the trace has derivatives of every order, the rest a first one. Nothing is flattened."""
        log_diagonal, rows = self.factor(coefficients)
        sigma0 = _product(log_diagonal + torch.log(force_unit), rows)
        nu, kappa = evidence(coefficients[:, 1], None if self.coupled else coefficients[:, 2])
        past_knee = self._raw_s(coefficients).abs() > self.scalar_damper[0]
        mean = log_diagonal.mean(-1, keepdim=True)
        # In units of its size and in double precision: digits of the small eigenvalues.
        log_sigma0 = log_spd(_product((log_diagonal - mean).double(), rows.double())).to(sigma0.dtype)
        shift = 2.0 * (mean + torch.log(force_unit)) - log_sigma0[:, :3].mean(-1, keepdim=True)
        log_sigma0 = torch.cat([log_sigma0[:, :3] + shift, log_sigma0[:, 3:]], dim=1)
        return log_sigma0, sigma0, nu, kappa, past_knee.to(sigma0.dtype)

    @classmethod
    def far_out(cls, parameters: Dict[str, Tensor], far: Tensor, form: LeverageForm = FORM) -> Dict[str, Tensor]:
        """See `Family`; its axes are none that errors follow, at any distance, and stay."""
        return {**super().far_out(parameters, far, form), cls.log_matrix: parameters[cls.log_matrix]}

    def nll_terms(self, coefficients: Tensor, residual: Tensor, force_unit: Tensor) -> Tuple[Tensor, Tensor]:
        """See `NIW`; by forward substitution."""
        nu, kappa = evidence(coefficients[:, 1], None if self.coupled else coefficients[:, 2])
        log_diagonal, rows = self.factor(coefficients)
        log_diagonal = log_diagonal + torch.log(force_unit).unsqueeze(-1)
        x, y, z = (residual * torch.exp(-log_diagonal)).unbind(-1)
        yx, zx, zy = rows.unbind(-1)
        w_y = y - yx * x
        w_z = z - zx * x - zy * w_y
        distance = x * x + w_y * w_y + w_z * w_z
        nll = negative_log_density(distance, 2.0 * log_diagonal.sum(-1), nu, kappa)
        return nll, evidence_regulariser(nu, kappa, residual, force_unit)

    def log_sigma2(self, coefficients: Tensor) -> Tensor:
        """See `NIW`."""
        return damp(self._raw_s(coefficients), self.scalar_damper[0], self.scalar_damper[1]) / math.sqrt(3.0)

    def _raw_s(self, coefficients: Tensor) -> Tensor:
        """s = log det(Σ0/σ_ref²)/√3 before its damper."""
        log_diagonal = coefficients[:, 0] + coefficients[:, 3] + coefficients[:, 4]
        # A damper would make a number of infinity.
        return (2.0 / math.sqrt(3.0)) * log_diagonal + (log_diagonal - log_diagonal).detach()


def _product(log_diagonal: Tensor, rows: Tensor) -> Tensor:
    """Return L Lᵀ as sym6 (N, 6), L as in `E2IPCholesky.factor`."""
    x, y, z = log_diagonal.exp().unbind(-1)
    yx, zx, zy = rows.unbind(-1)
    return torch.stack(
        [
            x * x,
            y * y * (1.0 + yx * yx),
            z * z * (1.0 + zx * zx + zy * zy),
            y * z * (yx * zx + zy),
            x * z * zx,
            x * y * yx,
        ],
        dim=-1,
    )
