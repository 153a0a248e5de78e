"""``shallow``: a shallow ensemble, K energies on one backbone (Kellner & Ceriotti 2024,
https://arxiv.org/abs/2402.16621).

Members differ in the weights of a last linear layer alone. K of them are their mean and K - 1 deviations; the mean is
that of the base model, and so are its forces. In an orthonormal basis of what sums to zero over the members, the
deviations are K - 1 energies ε_j = Σ_i w_j · h(x_i), the coefficients of this family, and the members' forces have the
sample covariance

    C = 1/(K - 1) Σ_j g_j g_jᵀ,   g_j = -∂ε_j/∂r,

exactly as if K members had been subtracted from their mean. C measures the disagreement of the members and is all
epistemic.

C has rank K - 1 at most and is badly conditioned where that is small: `SHRINKAGE` and `FLOOR` bound it.
"""

import math
from typing import Any, Dict, Mapping, Optional

import torch
from torch import Tensor

from e2ip_plugins.errors import InputError
from e2ip_plugins.families.ensemble import Ensemble
from e2ip_plugins.families.interface import SCALAR_DAMPER, Option, beta_option, checked_number, force_views, pulled
from e2ip_plugins.keys import FORCE_UNIT_KEY
from e2ip_plugins.leverage.form import Support
from e2ip_plugins.maths.log import SymmetricLog, sym6_adjugate, sym6_determinant
from e2ip_plugins.maths.spd import matrix_to_sym6, sym6_matvec, sym6_to_matrix

#: Members, as in the comparisons of the paper of ``e2ip``; every one costs a backward pass.
MEMBERS = 5

#: The members' Gaussian: of the force as a whole, which is what is predicted; or, as published, of each Cartesian
#: component by itself, which leaves the correlations to chance.
LIKELIHOODS = ("full", "components")

#: As in ``e2ip``; published is 0.
BETA_DEFAULT = 0.5

#: Weight of the isotropic matrix of the same trace in the covariance, which has a condition number below 1e3 then,
#: like that of ``e2ip`` at the ceiling of its damper.
SHRINKAGE = 3e-3

#: Least variance of a component in units of σ_ref²; that of the other families at the ceiling of their dampers.
FLOOR = math.exp(-SCALAR_DAMPER[1] / math.sqrt(3.0))

#: Unit of the coefficients' energies in σ_ref Å, so large that members of an untrained model disagree enough.
ENERGY_UNIT = 1e4


class Shallow(Ensemble):
    """See the module and `Ensemble`; option ``members``."""

    name = "shallow"
    options = (
        Option("members", f"energies on the shared backbone, at least 2 (default: {MEMBERS})", MEMBERS, int),
        Option(
            "likelihood",
            "full: of the covariance (the default), or components: of variances along axes, as published",
            LIKELIHOODS[0],
            loss_only=True,
            choices=LIKELIHOODS,
        ),
        beta_option(BETA_DEFAULT),
    )
    takes_forces = True
    num_scalars = MEMBERS - 1
    num_tensors = 0
    initial_scalars = ()

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self.num_scalars = options["members"] - 1
        self.beta = float(options["beta"])
        self.full = options["likelihood"] == "full"
        self.energy_unit = ENERGY_UNIT
        self.shrinkage = SHRINKAGE
        self.floor = FLOOR
        self.log = SymmetricLog()

    @classmethod
    def resolve(cls, user_options: Mapping[str, Any]) -> Dict[str, Any]:
        """See `Family`."""
        options = super().resolve(user_options)
        members = options["members"]
        if not isinstance(members, int) or isinstance(members, bool) or members < 2:
            raise InputError(f"members must be a whole number of at least 2, got {members}")
        return {**options, "beta": checked_number(options, "beta", 1.0)}

    def forward(self, coefficients: Tensor, force_unit: Tensor, support: Optional[Support] = None) -> Dict[str, Tensor]:
        """See `Family`."""
        deviations = (self.energy_unit * coefficients).reshape(coefficients.shape[0], self.num_scalars, 3)
        x, y, z = deviations.unbind(-1)
        covariance = torch.stack([x * x, y * y, z * z, y * z, x * z, x * y], dim=-1).mean(1)
        mean = covariance[:, :3].sum(-1, keepdim=True) / 3.0
        covariance = (1.0 - self.shrinkage) * covariance
        diagonal = covariance[:, :3] + (self.shrinkage * mean + self.floor)
        covariance = torch.cat([diagonal, covariance[:, 3:]], dim=1) * force_unit.square()
        log_covariance = self.log(covariance)
        matrix = sym6_to_matrix(covariance)
        outputs = force_views(torch.zeros_like(matrix), matrix)
        outputs["ensemble_log_cov"] = log_covariance
        outputs["ensemble_epistemic_share"] = torch.ones_like(log_covariance[:, 0])
        outputs["e2ip_plateau"] = (mean.squeeze(-1) < self.floor).to(covariance.dtype)
        return outputs

    def force_loss(self, residual: Tensor, outputs: Dict[str, Tensor]) -> Tensor:
        """Return 2σ_ref²/3 · (NLL + constant) ≥ 0 of forces in units of σ_ref, in (eV/Å)² (N,).

        Its pull on the forces is weaker where variances are large; ``beta`` weakens that, see
        `e2ip_plugins.families.interface.pulled`.
        """
        unit = outputs[FORCE_UNIT_KEY]
        covariance = matrix_to_sym6(outputs["forces_cov"] / unit.square()[:, None, None])
        if not self.full:
            covariance = torch.cat([covariance[:, :3], torch.zeros_like(covariance[:, 3:])], dim=1)
        adjugate = sym6_adjugate(covariance)
        determinant = sym6_determinant(covariance, adjugate)
        log_variance = torch.log(determinant) / 3.0
        residual = pulled(residual / unit.unsqueeze(-1), log_variance, self.beta)
        distance = (residual * sym6_matvec(adjugate, residual)).sum(-1) / determinant
        nll = 0.5 * distance + 1.5 * (log_variance - math.log(self.floor))
        return (2.0 / 3.0) * unit.square() * nll
