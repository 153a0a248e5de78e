"""The constants that configurations with forces fix.

Validation configurations say how fast the uncertainty grows and give a factor on all variances; beside them, training
configurations tell how much of the errors is hidden where the network knows its data by heart.
"""

import copy
import math
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np
import torch
from scipy.optimize import minimize
from scipy.stats import norm, t
from torch import Tensor

from e2ip_plugins.leverage.form import Support, inflate

#: Where the growth a is expected, and how many e-folds around it (docs/leverage.md): validation configurations come
#: from where the training set does and say little about it.
PRIOR_GROWTH, PRIOR_WIDTH = 2.5, 0.6
_STARTS = (PRIOR_GROWTH, 0.2)

#: Of the optimism, a logarithm, around 0; and how many times as much strange atoms err more (docs/leverage.md).
PRIOR_OPTIMISM, ONCE_MORE = 0.3, 1.5

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
    optimism, optimism_error : float
        See `Samples.optimism`.
    """

    growth: float
    growth_interval: Tuple[float, float]
    log_scale: float
    log_scale_error: float
    nll: Tuple[float, float]
    configurations: int
    atoms: int
    optimism: float = 0.0
    optimism_error: float = 0.0

    @property
    def surplus(self) -> float:
        """See `Support`."""
        return _surplus(self.optimism)


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
        growth, log_scale = _alone(math.exp(constants[0])), self.support.log_scale + constants[1]
        support = self.support._replace(growth=growth, log_scale=log_scale)
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

    def fit(self, training: Optional["Samples"] = None) -> Constants:
        """Constants of the largest posterior density, with atoms as they weigh, see ``weight``.

        The atoms of a configuration are no independent witnesses. The likelihood has flat and false minima (a -> 0).

        Parameters
        ----------
        training : Samples, optional
            Of training atoms: what there is without them is no optimism.
        """
        starts = [np.array([math.log(start), 0.0]) for start in _STARTS]
        found = _minimum(self._objective, starts)
        optimism, error = self.optimism(training, found)
        if optimism:
            samples = self._with(surplus=_alone(_surplus(optimism)))
            return samples._constants(_minimum(samples._objective, [found]), optimism, error)
        return self._constants(found, optimism, error)

    def fit_by_species(self, training: Optional["Samples"] = None) -> Tuple[Constants, Dict[int, float]]:
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

        def scaled(samples: Samples, index: np.ndarray, constants: np.ndarray) -> Samples:
            return samples._with(log_scale=torch.from_numpy(np.append(constants[1:], constants[1:].mean())[index]))

        def fitted(samples: Samples, starts: List[np.ndarray]) -> np.ndarray:
            return _minimum(lambda x: scaled(samples, index, x)._objective(np.array([x[0], 0.0])), starts)

        samples = self
        found = fitted(samples, [np.concatenate([[math.log(growth)], start]) for growth in _STARTS])
        if training is not None:
            # A kind that only training atoms are of has the mean of the others.
            place = np.searchsorted(kinds, training.kinds).clip(max=len(kinds) - 1)
            training = scaled(training, np.where(kinds[place] == training.kinds, place, len(kinds)), found)
        optimism, error = scaled(samples, index, found).optimism(training, np.array([found[0], 0.0]))
        if optimism:
            samples = self._with(surplus=_alone(_surplus(optimism)))
            found = fitted(samples, [found])
        constants = scaled(samples, index, found)._constants(np.array([found[0], 0.0]), optimism, error)
        return constants, dict(zip(kinds.tolist(), found[1:].tolist(), strict=True))

    def optimism(self, training: Optional["Samples"], constants: np.ndarray) -> Tuple[float, float]:
        """How much larger variances are here than those of ``training`` are, a logarithm, and its standard error.

        Both in units of what the model says of them, with these constants: differences of leverage and variance are
        accounted for. A prior of width `PRIOR_OPTIMISM` keeps few configurations from saying much, and it is at least
        0: validation configurations may be the easier ones, but no network errs more where it was trained.
        """
        if training is None or not np.abs(training.residual).max():
            return 0.0, 0.0
        of_training = _minimum(
            lambda x: float(training.per_configuration(np.array([constants[0], x[0]])).sum()), [constants[1:2]]
        )
        errors = [
            samples._error_of_scale(np.array([constants[0], log_scale]))
            for samples, log_scale in ((self, constants[1]), (training, of_training[0]))
        ]
        variance = math.hypot(*errors) ** 2
        share = PRIOR_OPTIMISM**2 / (PRIOR_OPTIMISM**2 + variance)
        return share * max(0.0, float(constants[1] - of_training[0])), math.sqrt(share * variance)

    def _with(self, **support: Tensor) -> "Samples":
        """The same with other fields of the support."""
        other = copy.copy(self)
        other.support = self.support._replace(**support)
        return other

    def _objective(self, constants: np.ndarray) -> float:
        prior = 0.5 * ((constants[0] - math.log(PRIOR_GROWTH)) / PRIOR_WIDTH) ** 2
        return float(self.per_configuration(constants).sum()) + prior

    def _constants(self, found: np.ndarray, optimism: float, optimism_error: float) -> Constants:
        error = self._standard_errors(found)
        return Constants(
            growth=math.exp(found[0]),
            growth_interval=(math.exp(found[0] - error[0]), math.exp(found[0] + error[0])),
            log_scale=float(found[1]),
            log_scale_error=float(error[1]),
            optimism=optimism,
            optimism_error=optimism_error,
            nll=(self._mean(self.as_trained()), self._mean(self.per_configuration(found))),
            configurations=self.configurations,
            atoms=len(self.residual),
        )

    def _error_of_scale(self, constants: np.ndarray, step: float = 1e-2) -> float:
        """Standard error of ln scale alone, as in `_standard_errors`."""
        below, at, above = (self.per_configuration(constants + np.array([0.0, d])) for d in (-step, 0.0, step))
        score = ((above - below) / (2.0 * step))[np.newaxis]
        curvature = (above - 2.0 * at + below).sum() / step**2
        return float(self._scattered(score, np.array([[curvature]]), np.zeros((1, 1)))[0])

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
        return self._scattered(score, curvature / step**2, prior_curvature)

    def _scattered(self, score: np.ndarray, curvature: np.ndarray, prior_curvature: np.ndarray) -> np.ndarray:
        """Standard errors from the scores of configurations (constants, configurations)."""
        inverse = np.linalg.pinv(curvature + prior_curvature, hermitian=True)
        count, least = score.shape[1], np.diag(inverse).clip(min=0.0)
        if count < 2:  # nothing scatters
            return np.sqrt(least)
        variance = np.diag(inverse @ (np.cov(score) * count + prior_curvature) @ inverse).clip(min=0.0)
        return np.sqrt(np.maximum(variance * t.ppf(ONE_SIGMA, count - 1) ** 2, self.weight * least))


def _surplus(optimism: float) -> float:
    """Networks that err three times as much as where they were trained want no more than those that err 1.5 times."""
    return math.tanh(ONCE_MORE * optimism)


def _alone(value: float) -> Tensor:
    return torch.full((1,), value, dtype=torch.float64)


def _minimum(objective: Callable[[np.ndarray], float], starts: Sequence[np.ndarray]) -> np.ndarray:
    """Where the objective is least, from several starts.

    Central differences: those of one side leave so much noise that processes which add up in another order end apart.
    """
    found = [minimize(objective, x, method="BFGS", jac="3-point", options={"gtol": 1e-7}) for x in starts]
    return min(found, key=lambda f: f.fun).x
