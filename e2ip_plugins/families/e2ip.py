"""Predictive families: from distribution parameters to every output key, in one place.

The parameters are the interchange between models, files and tools; covariances are views of them.
A further family adds a function here and its parameter keys to `e2ip_plugins.keys`.
"""

import math
from typing import Dict

import torch
from torch import Tensor

from e2ip_plugins.maths.spd import exp_sym6, sym6_to_matrix
from e2ip_plugins.maths.student import aleatoric_factor, epistemic_factor


def derive_niw(parameters: Dict[str, Tensor]) -> Dict[str, Tensor]:
    """Every derived key of `e2ip_plugins.keys.DERIVED_KEYS` from the NIW parameters.

    Parameters
    ----------
    parameters
        ``e2ip_log_sigma0`` (N, 6) in log(eV²/Å²), ``e2ip_nu`` and ``e2ip_kappa`` (N,); with ``e2ip_sigma0_sym6``
        (N, 6), Σ0 in eV²/Å², its exponential is not computed again.
    """
    nu, kappa = parameters["e2ip_nu"], parameters["e2ip_kappa"]
    if "e2ip_sigma0_sym6" in parameters:  # a literal: TorchScript
        sigma0 = sym6_to_matrix(parameters["e2ip_sigma0_sym6"])
    else:
        sigma0 = sym6_to_matrix(exp_sym6(parameters["e2ip_log_sigma0"]))
    aleatoric = aleatoric_factor(nu)[..., None, None] * sigma0
    epistemic = epistemic_factor(nu, kappa)[..., None, None] * sigma0
    views = _force_views(aleatoric, epistemic)
    views["e2ip_sigma0"] = sigma0
    return views


def _force_views(aleatoric: Tensor, epistemic: Tensor) -> Dict[str, Tensor]:
    """The ``forces_*`` keys from the two parts (..., 3, 3) of a covariance."""
    covariance = aleatoric + epistemic
    return {
        "forces_cov": covariance,
        "forces_aleatoric_cov": aleatoric,
        "forces_epistemic_cov": epistemic,
        "forces_uncertainty": covariance.diagonal(dim1=-2, dim2=-1).sqrt(),
        "forces_epistemic_std": (epistemic.diagonal(dim1=-2, dim2=-1).sum(-1) / 3.0).sqrt(),
    }


def convert_niw(parameters: Dict[str, Tensor], force_factor: float) -> Dict[str, Tensor]:
    """NIW parameters after forces were multiplied by a unit factor.

    Σ0 scales with the square of the factor, so that its logarithm gains 2 ln(factor) on the diagonal;
    the evidence has no unit.

    Parameters
    ----------
    parameters
        ``e2ip_log_sigma0`` (..., 6) and any others.
    force_factor : float
        > 0; new forces = force_factor × old forces.
    """
    log_sigma0 = parameters["e2ip_log_sigma0"]
    diagonal = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0], dtype=log_sigma0.dtype, device=log_sigma0.device)
    return {**parameters, "e2ip_log_sigma0": log_sigma0 + 2.0 * math.log(force_factor) * diagonal}


def derive_niw_committee(parameters: Dict[str, Tensor], forces: Tensor) -> Dict[str, Tensor]:
    """The ``forces_*`` keys of an equally weighted committee of NIW models.

    Law of total variance: the covariance of the mixture is the mean of the members' covariances plus
    the covariance of their mean forces. The second is disagreement between models, hence epistemic.
    The mixture is no longer a Normal-Inverse-Wishart, so there are no parameter keys.

    Parameters
    ----------
    parameters
        As for `derive_niw`, with the M members as leading axis: (M, N, ...).
    forces : (M, N, 3)
        In eV/Å.
    """
    members = derive_niw(parameters)
    deviation = forces - forces.mean(0)
    spread = (deviation.unsqueeze(-1) * deviation.unsqueeze(-2)).mean(0)
    return _force_views(members["forces_aleatoric_cov"].mean(0), members["forces_epistemic_cov"].mean(0) + spread)
