"""The form of the leverage: its constants, and what it makes of a covariance."""

from typing import NamedTuple, Tuple

import torch
from torch import Tensor

#: Leverage of a species that the training set has no atom of; also what enters the mean over neighbours at most.
FAR = 1e6

#: Where the regions are that a kind of atom does not have, in units in which atoms are 1 apart: too far to count.
NOWHERE = 1e10


#: Of epistemic and aleatoric variance, either way.
MAX_RATIO = 1e6

#: Leverage plus neighbours' mean around which the training set ceases to say how errors grow, and how steeply they are
#: taken to grow from there on, in units of the slope before; see `inflate`.
TRUSTED, FAR_SLOPE = 11.0, 0.1

#: The same for what the network says of its variance, and the share of the species' variance from there on.
FAMILIAR, FAR_WEIGHT = 8.0, 0.8

#: Leverage plus neighbours' mean around which the surplus sets in.
STRANGE = 3.0


class Support(NamedTuple):
    """How well the training set supports every atom, as `e2ip_plugins.leverage.module.Leverage` finds it.

    A family that takes it multiplies its covariance by the factor of `inflate`; without ``fitted`` it leaves its
    parameters as they were trained.

    Attributes
    ----------
    leverage : (N,)
        Dimensionless, 1: like a training atom on average; `e2ip_plugins.keys.UNFITTED` unless fitted.
    distance : (N,)
        Leverage of the atom plus its mean over neighbours, finite: 2 on average.
    growth : (N,) or (1,)
        Constant a: the standard deviation grows like 1 + a · distance, more slowly far out.
    surplus : (N,) or (1,)
        Logarithm of a further factor on the variance of atoms unlike the training set's, at least 0: what a network
        that knows those by heart errs more (`e2ip_plugins.fitting.constants.Constants.surplus`).
    log_variance : (N,)
        `Family.log_variance` of the training atoms of the same species, on average.
    log_scale : (N,)
        Logarithm of the factor that makes the variances of supported atoms right.
    fitted : () bool
    """

    leverage: Tensor
    distance: Tensor
    growth: Tensor
    surplus: Tensor
    log_variance: Tensor
    log_scale: Tensor
    fitted: Tensor


def inflate(
    support: Support,
    log_variance: Tensor,
    max_ratio: float = MAX_RATIO,
    trusted: float = TRUSTED,
    far_slope: float = FAR_SLOPE,
    familiar: float = FAMILIAR,
    far_weight: float = FAR_WEIGHT,
    strange: float = STRANGE,
) -> Tuple[Tensor, Tensor]:
    """What a fitted support does to a covariance: times exp(``log_factor``) · (1 + ``excess``).

    The excess is the epistemic part in units of the other, (1 + a · r)² - 1, times (v̄ / v)^w with v the atom's own
    variance and v̄ that of its species. Near the training set w = 1/2: what has grown by itself need not grow twice, and
    r is the distance. Far from it nothing was trained on v: it still tells which atoms are worse, hardly how bad they
    are, and w is larger; and errors grow less than the distance first.

    A network that knows its training set by heart errs less there than elsewhere, of which the leverage of its training
    atoms tells nothing, and errs more by about as much once again on what is strange: 1 + excess has the factor
    exp(surplus · s), too. All is measured: docs/leverage.md.

    Parameters
    ----------
    support : Support
    log_variance : (N,)
        `Family.log_variance` without support.
    max_ratio : float
        Bound of the excess, and its inverse, and of (a · r)²; what exceeds it goes into log_factor. A parameter because
        TorchScript reads no globals.
    trusted, far_slope : float
        The slope of r goes from 1 to far_slope: r is the distance times far_slope + (1 - far_slope) / (1 +
        (distance / trusted)⁶)^(1/6). A power of 8 would overflow in float32, distances being 2e6 at most.
    familiar, far_weight : float
        w goes from 1/2 to far_weight as 1 / (1 + (distance / familiar)⁴) goes from 1 to 0; later it would undo the
        growth of atoms with a large v.
    strange : float
        s goes from 0 to 1 as (distance / strange)⁶ / (1 + (distance / strange)⁶).

    Returns
    -------
    log_factor, excess : (N,)
        The factor is exp(log_scale) where leverages and variance are those of a training atom on average.
    """
    distance = support.distance
    # The smooth steps are written with few operations: on a small molecule each costs what a thousand atoms would.
    below, difference = familiar**4, support.log_variance - log_variance
    weighted = torch.addcdiv(
        far_weight * difference, difference, distance.pow(4) + below, value=(0.5 - far_weight) * below
    )
    relative = torch.exp(weighted)
    sixth, steepness = distance.pow(6), (1.0 - far_slope) * trusted
    flattened = (sixth + trusted**6).pow(-1.0 / 6.0)
    grown = support.growth * torch.addcmul(far_slope * distance, distance, flattened, value=steepness)
    grown = grown.clamp(max=max_ratio**0.5)
    excess = grown * (grown + 2.0) * relative
    more = torch.expm1(support.surplus * (sixth / (sixth + strange**6)))
    excess = torch.addcmul(excess, excess + 1.0, more)
    usual = 2.0 * (far_slope + (1.0 - far_slope) * (1.0 + (2.0 / trusted) ** 6) ** (-1.0 / 6.0))
    log_factor = torch.sub(support.log_scale, torch.log1p(usual * support.growth), alpha=2.0)
    # Far out a network may take a variance for next to nothing: the bound is on the ratio, not on what has grown.
    log_factor = log_factor + (excess / max_ratio).clamp(1.0, 1e30).log()
    return log_factor, excess.clamp(min=1.0 / max_ratio, max=max_ratio)
