"""The constants that validation configurations fix: how fast the uncertainty grows, and a factor on all variances."""

import math
from dataclasses import dataclass
from typing import Any, Callable, Dict, Sequence, Tuple

import numpy as np
import torch
from scipy.optimize import minimize
from scipy.stats import norm, t
from torch import Tensor

from e2ip_plugins.families.interface import Support, inflate

#: Where the growth a is expected, and how many e-folds around it (docs/leverage.md): validation configurations come
#: from where the training set does and say little about it.
PRIOR_GROWTH, PRIOR_WIDTH = 2.5, 0.3
_STARTS = (PRIOR_GROWTH, 0.2)

#: Probability below one standard error of a Gaussian.
ONE_SIGMA = float(norm.cdf(1.0))


@dataclass
class Constants:
    """What was fitted for one data set of the host.

    Attributes
    ----------
    growth : float
        a; the standard deviation grows by 1 + a (h + h̄), more slowly far out.
    growth_interval : tuple of float
        What the configurations leave open, one standard error up and down.
    log_scale : float
        Logarithm of the factor on the variance at leverage 1.
    log_scale_error : float
        Its standard error.
    nll : tuple of float
        Mean over atoms before and after, in nats for a density in (eV/Å)⁻³.
    configurations, atoms : int
        Number of those with finite reference forces.
    """

    growth: float
    growth_interval: Tuple[float, float]
    log_scale: float
    log_scale_error: float
    nll: Tuple[float, float]
    configurations: int
    atoms: int


class Samples:
    """Validation atoms with finite reference forces, and their negative log likelihood as a function of the constants.

    Parameters
    ----------
    law : Law
        Of the parameters without support.
    residual : (N, 3)
    support : Support
        CPU, float64.
    log_variance : (N,)
        `Family.log_variance` without support.
    frames, kinds : (N,) int
    """

    def __init__(
        self,
        law: Any,
        residual: np.ndarray,
        support: Support,
        log_variance: Tensor,
        frames: np.ndarray,
        kinds: np.ndarray,
    ) -> None:
        self.law, self.residual, self.support, self.log_variance = law, residual, support, log_variance
        _, self.frames = np.unique(frames, return_inverse=True)
        sizes = np.bincount(self.frames)
        #: Of an atom: all count alike, and together like as many as there are configurations. Where sizes differ, that
        #: number is the effective one (Kish): a large configuration among small ones is no more than a single witness.
        self.weight = float(sizes.sum() / np.square(sizes).sum())
        self.configurations = len(sizes)
        self.kinds = kinds

    def per_configuration(self, constants: np.ndarray) -> np.ndarray:
        """What the atoms of every configuration add, at (ln a, ln scale)."""
        one = torch.ones(1, dtype=torch.float64)
        support = self.support._replace(
            growth=one * math.exp(constants[0]), log_scale=self.support.log_scale + constants[1]
        )
        log_factor, excess = inflate(support, self.log_variance)
        return self._sums((log_factor + torch.log1p(excess)).numpy())

    def as_trained(self) -> np.ndarray:
        """The same without support."""
        return self._sums(self.support.log_scale.numpy())

    def _mean(self, per_configuration: np.ndarray) -> float:
        return float(per_configuration.sum()) / (self.weight * len(self.residual))

    def _sums(self, log_factor: np.ndarray) -> np.ndarray:
        # A factor on the covariance is a factor on the unit of the error.
        nll = self.law.negative_log_likelihood(self.residual * np.exp(-0.5 * log_factor)[:, None]) + 1.5 * log_factor
        return self.weight * np.bincount(self.frames, nll)

    def fit(self) -> Constants:
        """Constants of the largest posterior density, with atoms as they weigh, see ``weight``.

        The atoms of a configuration are no independent witnesses. The likelihood has flat and false minima (a -> 0).
        """
        starts = [np.array([math.log(start), 0.0]) for start in _STARTS]
        return self._constants(_minimum(self._objective, starts))

    def fit_by_species(self) -> Tuple[Constants, Dict[int, float]]:
        """The same with a scale for every species, for a readout that knows nothing of the atoms but that.

        Returns
        -------
        constants : Constants
        log_scale : dict
            By kind.
        """
        kinds, index = np.unique(self.kinds, return_inverse=True)
        square = np.bincount(index, np.square(self.residual).mean(-1)) / np.bincount(index)
        start = np.log(square.clip(min=1e-12)) - np.bincount(index, self.log_variance.numpy()) / np.bincount(index)

        def objective(constants: np.ndarray) -> float:
            scaled = self.support._replace(log_scale=torch.from_numpy(constants[1:][index]))
            return Samples._objective(self._with(scaled), np.array([constants[0], 0.0]))

        starts = [np.concatenate([[math.log(growth)], start]) for growth in _STARTS]
        found = _minimum(objective, starts)
        scaled = self._with(self.support._replace(log_scale=torch.from_numpy(found[1:][index])))
        log_scale = dict(zip(kinds.tolist(), found[1:].tolist(), strict=True))
        return scaled._constants(np.array([found[0], 0.0])), log_scale

    def _with(self, support: Support) -> "Samples":
        return Samples(self.law, self.residual, support, self.log_variance, self.frames, self.kinds)

    def _objective(self, constants: np.ndarray) -> float:
        prior = 0.5 * ((constants[0] - math.log(PRIOR_GROWTH)) / PRIOR_WIDTH) ** 2
        return float(self.per_configuration(constants).sum()) + prior

    def _constants(self, found: np.ndarray) -> Constants:
        error = self._standard_errors(found)
        return Constants(
            growth=math.exp(found[0]),
            growth_interval=(math.exp(found[0] - error[0]), math.exp(found[0] + error[0])),
            log_scale=float(found[1]),
            log_scale_error=float(error[1]),
            nll=(self._mean(self.as_trained()), self._mean(self.per_configuration(found))),
            configurations=self.configurations,
            atoms=len(self.residual),
        )

    def _standard_errors(self, constants: np.ndarray, step: float = 1e-2) -> np.ndarray:
        """Of both constants, by the sandwich estimator over configurations.

        Few configurations may happen to agree: errors are those of Student's t with their number, and of atoms that are
        independent of each other at least.
        """
        prior_curvature = np.diag([PRIOR_WIDTH**-2, 0.0])
        at = {
            (i, j): self.per_configuration(constants + step * np.array([i, j])) for i in (-1, 0, 1) for j in (-1, 0, 1)
        }
        score = np.stack([at[1, 0] - at[-1, 0], at[0, 1] - at[0, -1]]) / (2.0 * step)
        curvature = np.empty((2, 2))
        curvature[0, 0] = (at[1, 0] - 2.0 * at[0, 0] + at[-1, 0]).sum()
        curvature[1, 1] = (at[0, 1] - 2.0 * at[0, 0] + at[0, -1]).sum()
        curvature[0, 1] = curvature[1, 0] = (at[1, 1] - at[1, -1] - at[-1, 1] + at[-1, -1]).sum() / 4.0
        inverse = np.linalg.pinv(curvature / step**2 + prior_curvature, hermitian=True)
        count, least = score.shape[1], np.diag(inverse).clip(min=0.0)
        if count < 2:  # nothing scatters
            return np.sqrt(least)
        variance = np.diag(inverse @ (np.cov(score) * count + prior_curvature) @ inverse).clip(min=0.0)
        return np.sqrt(np.maximum(variance * t.ppf(ONE_SIGMA, count - 1) ** 2, self.weight * least))


def _minimum(objective: Callable[[np.ndarray], float], starts: Sequence[np.ndarray]) -> np.ndarray:
    """Where the objective is least, from several starts.

    Central differences: those of one side leave so much noise that processes which add up in another order end apart.
    """
    found = [minimize(objective, x, method="BFGS", jac="3-point", options={"gtol": 1e-7}) for x in starts]
    return min(found, key=lambda f: f.fun).x
