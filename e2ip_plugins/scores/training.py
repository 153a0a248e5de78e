"""What both hosts log about the uncertainty during training and validation."""

from typing import Dict, List

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from e2ip_plugins.families.e2ip import derive_niw
from e2ip_plugins.families.laws import radial_pit
from e2ip_plugins.maths.spd import half_exp_matvec
from e2ip_plugins.maths.student import negative_log_likelihood, predictive_scale_factor
from e2ip_plugins.scores.metrics import spearman


class ForceUncertainty(Metric):
    """NLL, coverage and rank correlation of predicted force distributions, over all atoms seen.

    ``compute()`` gives a dict of floats, NaN while no atom has been seen and where predictions are NaN:

    - ``nll``: mean negative log density in nats, for a density in (eV/Å)⁻³
    - ``coverage95``: share of atoms whose reference lies inside the 95 % region of the Student-t,
      PIT = F_{F(3, m)}(M/3) ≤ 0.95 with M in the metric of the scale matrix Λ
    - ``spearman``: rank correlation of ``forces_epistemic_std`` with the error norm ‖y - γ‖
    - ``plateau``: share of atoms with a damper past its knee
    - ``masked``: number of atoms left out because their reference is not finite
    """

    full_state_update = False
    is_differentiable = False

    atoms: List[Tensor]

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        # Seven numbers per atom: finite reference, NLL, M, m, ‖y - γ‖, forces_epistemic_std, plateau.
        # One state, because every state costs a collective operation under DDP; flat and of the
        # metric's own dtype, so that it fits what torchmetrics puts in for a rank without atoms.
        self.add_state("atoms", default=[], dist_reduce_fx="cat")

    def update(
        self,
        reference: Tensor,
        forces: Tensor,
        log_sigma0: Tensor,
        nu: Tensor,
        kappa: Tensor,
        plateau: Tensor,
    ) -> None:
        """Add atoms: forces in eV/Å (N, 3), log(Σ0) (N, 6), ν, κ and plateau flag (N,) or (N, 1)."""
        with torch.no_grad():
            nu, kappa, plateau = nu.reshape(-1), kappa.reshape(-1), plateau.reshape(-1)
            residual = reference - forces
            mahalanobis = half_exp_matvec(log_sigma0, residual, -1.0).square().sum(-1)
            parameters = {"e2ip_log_sigma0": log_sigma0, "e2ip_nu": nu, "e2ip_kappa": kappa}
            columns = [
                torch.isfinite(reference).all(-1),
                negative_log_likelihood(log_sigma0, nu, kappa, residual),
                mahalanobis / predictive_scale_factor(nu, kappa),
                nu - 2.0,
                residual.norm(dim=-1),
                derive_niw(parameters)["forces_epistemic_std"],
                plateau,
            ]
            # Masked atoms are told apart in compute(): indexing by a mask here would make a GPU wait.
            self.atoms.append(torch.stack([c.to(self.dtype) for c in columns], dim=-1).reshape(-1))

    def compute(self) -> Dict[str, float]:
        """See the class."""
        if len(self.atoms) == 0:  # a list before DDP synchronisation, one tensor after
            table = np.empty((0, 7))
        else:
            table = dim_zero_cat(self.atoms).to("cpu", torch.float64).numpy().reshape(-1, 7)
        finite = table[:, 0] == 1.0
        _, nll, mahalanobis, m, error, epistemic, plateau = table[finite].T
        return {
            "nll": _mean(nll),
            "coverage95": _mean(np.where(np.isnan(mahalanobis), np.nan, radial_pit(mahalanobis, m) <= 0.95)),
            "spearman": spearman(epistemic, error),
            "plateau": _mean(plateau),
            "masked": float(np.count_nonzero(~finite)),
        }


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else float("nan")
