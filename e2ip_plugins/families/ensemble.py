"""Base of ensembles: a Gaussian with the moments of the members, whose disagreement is the epistemic part.

``e2ip ensemble`` makes such predictions from files of several models; `shallow` trains one.
"""

from typing import Dict

import numpy as np
from torch import Tensor

from e2ip_plugins.families.interface import Family, force_views
from e2ip_plugins.keys import OutputKey
from e2ip_plugins.maths.spd import exp_log_spd


class Ensemble(Family):
    """Base class; parameters are the total covariance and how much of its trace is epistemic."""

    uq_family = "ensemble"
    log_matrix = "ensemble_log_cov"
    parameter_keys = (
        OutputKey(
            "ensemble_log_cov", (6,), "log(eV²/Å²)", "matrix logarithm of the covariance, xx, yy, zz, yz, xz, xy"
        ),
        OutputKey("ensemble_epistemic_share", (), "1", "epistemic part of the covariance's trace, 0 … 1", above=-1e-9),
    )

    @staticmethod
    def derive(parameters: Dict[str, Tensor]) -> Dict[str, Tensor]:
        """See `Family`; both parts have the shape of their sum, whatever those of the members were."""
        # Few members make ill-conditioned covariances, for which the closed form is not accurate.
        covariance = exp_log_spd(parameters["ensemble_log_cov"])
        share = parameters["ensemble_epistemic_share"][..., None, None]
        return force_views((1.0 - share) * covariance, share * covariance)

    @staticmethod
    def law_arguments(parameters: Dict[str, np.ndarray]) -> Dict[str, np.ndarray]:
        """See `Family`; the Gaussian with this covariance."""
        share = parameters["ensemble_epistemic_share"]
        return {"log_matrix": parameters["ensemble_log_cov"], "epistemic_share": share}
