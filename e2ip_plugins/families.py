"""Predictive families: from distribution parameters to every output key, in one place.

The parameters are the interchange between models, files and tools; covariances are views of them.
A further family adds a function here and its parameter keys to `e2ip_plugins.keys`.
"""

from typing import Dict

from torch import Tensor

from e2ip_plugins.niw import aleatoric_factor, epistemic_factor
from e2ip_plugins.spd import exp_sym6, sym6_to_matrix


def derive_niw(parameters: Dict[str, Tensor]) -> Dict[str, Tensor]:
    """Every derived key of `e2ip_plugins.keys.DERIVED_KEYS` from the NIW parameters.

    Parameters
    ----------
    parameters
        ``e2ip_log_sigma0`` (N, 6) in log(eV²/Å²), ``e2ip_nu`` and ``e2ip_kappa`` (N,).
    """
    nu, kappa = parameters["e2ip_nu"], parameters["e2ip_kappa"]
    sigma0 = sym6_to_matrix(exp_sym6(parameters["e2ip_log_sigma0"]))
    aleatoric = aleatoric_factor(nu)[..., None, None] * sigma0
    epistemic = epistemic_factor(nu, kappa)[..., None, None] * sigma0
    covariance = aleatoric + epistemic
    return {
        "forces_cov": covariance,
        "forces_aleatoric_cov": aleatoric,
        "forces_epistemic_cov": epistemic,
        "forces_uncertainty": covariance.diagonal(dim1=-2, dim2=-1).sqrt(),
        "forces_epistemic_std": (epistemic.diagonal(dim1=-2, dim2=-1).sum(-1) / 3.0).sqrt(),
        "e2ip_sigma0": sigma0,
    }
