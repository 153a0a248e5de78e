"""``e2ip-ablation``: ``e2ip`` without what keeps it stable, for the benchmark ``damping``.

The dampers, which bound the conditioning of Σ0, can be taken away. The closed form can be replaced by the one of the
paper: a matrix exponential in the model's precision, and its Cholesky factorisation in the likelihood. Everything else
is that of ``e2ip``.
"""

import os
from typing import Any, Dict, Mapping, Optional, Tuple

import torch
from torch import Tensor

from e2ip_plugins.families import condition_trace
from e2ip_plugins.families.e2ip import E2IP
from e2ip_plugins.families.interface import Option
from e2ip_plugins.families.niw import NIW
from e2ip_plugins.maths.kernels.constants import Constants
from e2ip_plugins.maths.kernels.plain import log_sigma0_of, split
from e2ip_plugins.maths.spd import exp_sym6, half_exp_matvec, matrix_to_sym6, sym6_to_matrix
from e2ip_plugins.maths.student import evidence, evidence_regulariser, negative_log_density

#: Message that ends a training once the published numerics fail.
FACTORISATION_FAILED = "Cholesky factorisation of Σ0 failed"

#: Knee and ceiling that nothing reaches.
NO_DAMPER = (1e6, 2e6)

#: The closed form without dampers is right up to ‖t‖ = 80, far beyond what single precision can tell from singular.
SQUARINGS = 4


class E2IPAblation(E2IP):
    """See the module and `NIW`. Coefficients are s, ν̂, κ̂ and t.

    Raises
    ------
    ArithmeticError
        By the loss, with ``numerics: published``, once Cholesky fails: as the paper has it, training ends there.
    """

    name = "e2ip-ablation"
    options = (
        *NIW.options,
        Option(
            "numerics",
            "closed (the default) or published: matrix exponential and Cholesky factorisation",
            "closed",
            choices=("closed", "published"),
        ),
        Option("damper", "of the coefficients of the covariance: on (the default) or off", "on", choices=("on", "off")),
    )

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self.published = options["numerics"] == "published"
        if options["damper"] == "off":
            self.scalar_damper = self.tensor_damper = NO_DAMPER
        self.squarings = SQUARINGS  # TorchScript reads no globals
        self.trace_path = os.environ.get(condition_trace.VARIABLE)

    def distribution(
        self, coefficients: Tensor, force_unit: Tensor, flattening: Optional[Tensor] = None
    ) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """See `NIW`."""
        s, t, raw_nu, raw_kappa = split(coefficients, self.coupled)
        log_sigma0 = self.log_sigma0(s, t, force_unit, flattening)
        if self.published:
            sigma0 = matrix_to_sym6(torch.linalg.matrix_exp(sym6_to_matrix(log_sigma0)))
        else:
            sigma0 = exp_sym6(log_sigma0, self.squarings)
        nu, kappa = evidence(raw_nu, raw_kappa)
        past_knee = (s.abs() > self.scalar_damper[0]) | (t.square().sum(-1) > self.tensor_damper[0] ** 2)
        return log_sigma0, sigma0, nu, kappa, past_knee.to(s.dtype)

    def nll_terms(self, coefficients: Tensor, residual: Tensor, force_unit: Tensor) -> Tuple[Tensor, Tensor]:
        """See `NIW`."""
        s, t, raw_nu, raw_kappa = split(coefficients, self.coupled)
        log_sigma0 = self.log_sigma0(s, t, force_unit)
        if self.published:
            factor, failed = torch.linalg.cholesky_ex(torch.linalg.matrix_exp(sym6_to_matrix(log_sigma0)))
            if bool(failed.any()):
                raise ArithmeticError(
                    f"{FACTORISATION_FAILED} for {int((failed > 0).sum())} of {len(failed)} atoms: not positive "
                    "definite in this precision (readout e2ip-ablation, numerics published)"
                )
            whitened = torch.linalg.solve_triangular(factor, residual.unsqueeze(-1), upper=False).squeeze(-1)
            log_det = 2.0 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        else:
            whitened = half_exp_matvec(log_sigma0, residual, -1.0, 2**self.squarings)
            log_det = log_sigma0[:, :3].sum(-1)
        nu, kappa = evidence(raw_nu, raw_kappa)
        nll = negative_log_density(whitened.square().sum(-1), log_det, nu, kappa)
        return nll, evidence_regulariser(nu, kappa, residual, force_unit)

    def force_loss(self, residual: Tensor, outputs: Dict[str, Tensor]) -> Tensor:
        """See `NIW`."""
        if self.trace_path and outputs["forces_cov"].requires_grad:
            condition_trace.append_line(self.trace_path, outputs["forces_cov"])
        return super().force_loss(residual, outputs)

    def log_sigma0(self, s: Tensor, t: Tensor, force_unit: Tensor, flattening: Optional[Tensor] = None) -> Tensor:
        """Return log Σ0/(eV²/Å²) as sym6 (N, 6)."""
        constants = Constants(self.coupled, self.scalar_damper, self.tensor_damper)
        return log_sigma0_of(s, t, force_unit, constants, flattening)
