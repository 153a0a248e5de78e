"""The constants of the leverage that configurations with forces fix; `e2ip_plugins.leverage.form` has the formulas.

Validation configurations say how fast the uncertainty grows and give a factor on all variances. Beside them, training
configurations tell how much smaller errors are where the network is overfitted.
"""

import copy
import itertools
import math
from dataclasses import dataclass
from typing import Any, Callable, Dict, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch
from scipy.optimize import minimize
from scipy.stats import norm, t
from torch import Tensor

from e2ip_plugins.families.interface import Family
from e2ip_plugins.families.laws import Law, law_of
from e2ip_plugins.leverage.form import FORM, LeverageForm, Support, inflate, remoteness, surplus

#: Factors on the expected growth where the search for it starts: the likelihood has flat and false minima (a -> 0).
_STARTS = (1.0, 0.08)

#: Probability below one standard error of a Gaussian.
_ONE_SIGMA = float(norm.cdf(1.0))

#: Widths of the prior of how the log-variance at leverage 1 changes where constants are fitted anew to few frames: that
#: of all species together, and that of a species beside the others. Frames far from the training set hardly tell the
#: growth from that variance, and few atoms of a species hardly tell its own.
SCALE_CHANGE, SPECIES_CHANGE = 1.0, 0.5

#: Step of finite differences in the logarithms of the constants.
_STEP = 1e-2


class PreviousFit(NamedTuple):
    """What the previous fit found for a head: constants fitted anew to few configurations are expected near it.

    Attributes
    ----------
    growth, surplus : float
        The growth is the middle of its prior; the surplus stays, because training configurations tell it.
    log_scale : (kinds,)
    """

    growth: float
    surplus: float
    log_scale: np.ndarray


@dataclass
class FittedConstants:
    """Constants that were fitted for one data set (MACE: head).

    Attributes
    ----------
    growth : float
        a.
    growth_interval : tuple of float
        One standard error down and up.
    log_scale : float
        Logarithm of the factor on the variance at leverage 1.
    log_scale_error : float
        Its standard error.
    nll : tuple of float
        Mean over the atoms that were fitted to, in nats for a density in (eV/Å)⁻³: without the leverage, or where
        constants are fitted anew, with those of the previous fit; and with the fitted constants.
    configurations, atoms : int
        Number of those with finite reference forces.
    optimism, optimism_error : float
        See `Samples.optimism`.
    surplus : float
        See `e2ip_plugins.leverage.form.Support`.
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
    surplus: float = 0.0


class Samples:
    """Atoms with finite reference forces, and their negative log likelihood as a function of the constants.

    Parameters
    ----------
    family : Family
    parameters : dict
        Of every atom, without support.
    table : dict
        Columns ``residual``, ``forces``, ``distance``, ``typical``, ``around``, ``frames`` and ``kinds`` of
        `e2ip_plugins.fitting.force_errors.AtomTable`.
    form : LeverageForm
    previous : PreviousFit, optional
        The fit before this one.
    """

    def __init__(
        self,
        family: Family,
        parameters: Dict[str, np.ndarray],
        table: Dict[str, np.ndarray],
        form: LeverageForm = FORM,
        previous: Optional[PreviousFit] = None,
    ) -> None:
        self.residual, self.previous = table["residual"], previous
        self.relative_error = _relative_error(table["residual"], table["forces"])
        self.form = form if previous is None else form._replace(prior_growth=previous.growth)
        tensors = {name: torch.from_numpy(values) for name, values in parameters.items()}
        self.log_own = family.log_variance(tensors)
        zero, distance = _single(0.0), torch.from_numpy(table["distance"])
        self.support = Support(
            distance=distance,
            surplus=zero if previous is None else _single(previous.surplus),
            log_typical=torch.from_numpy(table["typical"]),
            log_scale=torch.zeros_like(distance),
            fitted=torch.tensor(True),
            growth=zero,  # `nll_by_configuration` fills it in
            leverage=zero,  # neither this one nor the next is read
            whitened=zero,
        )
        self.log_u = torch.from_numpy(table["around"])
        shaped = family.far_out(tensors, remoteness(distance, form), form)
        #: As trained, and with the shape that it has at this distance.
        self.law_of_training = law_of(family, parameters)
        self.law = law_of(family, {name: values.numpy() for name, values in shaped.items()})
        self.kinds = table["kinds"].astype(int)
        _, self.frames = np.unique(table["frames"], return_inverse=True)
        sizes = np.bincount(self.frames)
        #: Weight of an atom, the same for all: the weights of all atoms sum to the effective number of configurations
        #: (Kish), (Σn)²/Σn² for n atoms each: a large configuration among small ones is a single witness.
        self.weight = float(sizes.sum() / np.square(sizes).sum())
        self.configurations = len(sizes)

    def nll_by_configuration(self, constants: np.ndarray) -> np.ndarray:
        """Return the weighted negative log likelihood of every configuration, at (ln a, ln scale)."""
        growth, log_scale = _single(math.exp(constants[0])), self.support.log_scale + constants[1]
        support = self.support._replace(growth=growth, log_scale=log_scale)
        log_base, excess = inflate(support, self.log_own, self.log_u, self.form)
        return self._sums(self.law, (log_base + torch.log1p(excess)).numpy())

    def _sums(self, law: Law, log_total: np.ndarray) -> np.ndarray:
        # The total factor on the covariance is one on the unit of the error.
        nll = law.negative_log_likelihood(self.residual * np.exp(-0.5 * log_total)[:, None]) + 1.5 * log_total
        return self.weight * np.bincount(self.frames, nll)

    def fit(self, training: Optional["Samples"] = None) -> FittedConstants:
        """Return the constants of the largest posterior density, with atoms weighted by ``weight``.

        The atoms of a configuration are no independent witnesses.

        Parameters
        ----------
        training : Samples, optional
            Training atoms; without them the optimism is 0.
        """

        def fitted(samples: Samples, starts: Sequence[np.ndarray]) -> np.ndarray:
            return _minimum(lambda x: samples._objective(x) + samples._prior_of_scale(x[1:]), starts)

        optimum = fitted(self, [np.array([start, 0.0]) for start in self._starts()])
        optimism, error = self.optimism(training, optimum)
        samples = self._with_surplus(optimism)
        if samples is not self:
            optimum = fitted(samples, [optimum])
        return samples._constants(optimum, optimism, error)

    def fit_by_species(self, training: Optional["Samples"] = None) -> Tuple[FittedConstants, Dict[int, float]]:
        """Return the same with a scale for every species, for a readout that knows only the species of an atom.

        Returns
        -------
        constants : FittedConstants
        log_scale : dict
            By kind.
        """
        kinds, index = np.unique(self.kinds, return_inverse=True)
        square = np.bincount(index, np.square(self.residual).mean(-1)) / np.bincount(index)
        start = np.log(square.clip(min=1e-12)) - np.bincount(index, self.log_own.numpy()) / np.bincount(index)

        def scaled(samples: Samples, index: np.ndarray, constants: np.ndarray) -> Samples:
            return samples._replace(log_scale=torch.from_numpy(np.append(constants[1:], constants[1:].mean())[index]))

        def fitted(samples: Samples, starts: Sequence[np.ndarray]) -> np.ndarray:
            def objective(x: np.ndarray) -> float:
                return scaled(samples, index, x)._objective(np.array([x[0], 0.0])) + samples._prior_of_scale(x[1:])

            return _minimum(objective, starts)

        optimum = fitted(self, [np.concatenate([[growth], start]) for growth in self._starts()])
        if training is not None:
            # A kind that only training atoms are of has the mean of the others.
            place = np.searchsorted(kinds, training.kinds).clip(max=len(kinds) - 1)
            training = scaled(training, np.where(kinds[place] == training.kinds, place, len(kinds)), optimum)
        optimism, error = scaled(self, index, optimum).optimism(training, np.array([optimum[0], 0.0]))
        samples = self._with_surplus(optimism)
        if samples is not self:
            optimum = fitted(samples, [optimum])
        constants = scaled(samples, index, optimum)._constants(np.array([optimum[0], 0.0]), optimism, error)
        return constants, dict(zip(kinds.tolist(), optimum[1:].tolist(), strict=True))

    def optimism(self, training: Optional["Samples"], constants: np.ndarray) -> Tuple[float, float]:
        """Return the optimism o, the logarithm of a ratio of variances, and its standard error.

        It is the scale that fits validation atoms over the one that fits training atoms, at the same growth:
        differences of leverage and predicted variance are accounted for. A prior keeps few configurations from saying
        much. The optimism is at least 0: validation configurations may be the easier ones, but no network errs more
        where it was trained.
        """
        if training is None or not np.abs(training.residual).max():
            return 0.0, 0.0
        scale_of_training = _minimum(
            lambda x: float(training.nll_by_configuration(np.array([constants[0], x[0]])).sum()), [constants[1:2]]
        )
        errors = [
            samples._standard_errors(np.array([constants[0], log_scale]), np.array([[0, 1]])).item()
            for samples, log_scale in ((self, constants[1]), (training, scale_of_training[0]))
        ]
        variance, prior = math.hypot(*errors) ** 2, self.form.prior_optimism**2
        share = prior / (prior + variance)
        return share * max(0.0, float(constants[1] - scale_of_training[0])), math.sqrt(share * variance)

    def _starts(self) -> Sequence[float]:
        return [math.log(factor * self.form.prior_growth) for factor in _STARTS]

    def _replace(self, **support: Any) -> "Samples":
        """Return the same samples with other fields of the support."""
        other = copy.copy(self)
        other.support = self.support._replace(**support)
        return other

    def _with_surplus(self, optimism: float) -> "Samples":
        """Return the same samples with the surplus that follows from an optimism, or with that of the previous fit."""
        if self.previous is not None:
            return self
        return self._replace(surplus=_single(surplus(optimism, self.relative_error, self.form)))

    def _objective(self, constants: np.ndarray) -> float:
        prior = 0.5 * ((constants[0] - math.log(self.form.prior_growth)) / self.form.prior_width) ** 2
        return float(self.nll_by_configuration(constants).sum()) + prior

    def _prior_of_scale(self, log_scale: np.ndarray) -> float:
        """Return the negative logarithm of the prior of log-scales: one for all kinds, or for each of those present."""
        if self.previous is None:
            return 0.0
        change = log_scale - self.previous.log_scale[np.unique(self.kinds)]
        common = change.mean()
        return 0.5 * float((common / SCALE_CHANGE) ** 2 + np.square((change - common) / SPECIES_CHANGE).sum())

    def _constants(self, optimum: np.ndarray, optimism: float, optimism_error: float) -> FittedConstants:
        error = self._standard_errors(optimum, np.eye(2))
        sums = self._nll_before(), self.nll_by_configuration(optimum)
        before, after = (float(values.sum()) / (self.weight * len(self.residual)) for values in sums)
        return FittedConstants(
            growth=math.exp(optimum[0]),
            growth_interval=(math.exp(optimum[0] - error[0]), math.exp(optimum[0] + error[0])),
            log_scale=float(optimum[1]),
            log_scale_error=float(error[1]),
            optimism=optimism,
            optimism_error=optimism_error,
            surplus=self.support.surplus.item(),
            nll=(before, after),
            configurations=self.configurations,
            atoms=len(self.residual),
        )

    def _nll_before(self) -> np.ndarray:
        """Return the weighted NLL of every configuration with the previous fit, or without the leverage."""
        if self.previous is None:
            return self._sums(self.law_of_training, self.support.log_scale.numpy())
        samples = self._replace(log_scale=torch.from_numpy(self.previous.log_scale[self.kinds]))
        return samples.nll_by_configuration(np.array([math.log(self.previous.growth), 0.0]))

    def _standard_errors(self, constants: np.ndarray, directions: np.ndarray) -> np.ndarray:
        """Return the standard errors along directions (K, 2), by the sandwich estimator over configurations.

        Few configurations may happen to agree: errors are those of Student's t with their number, and at least those of
        atoms that are independent of each other.
        """

        def at(direction: np.ndarray) -> np.ndarray:
            return self.nll_by_configuration(constants + _STEP * direction)

        middle, ends = at(np.zeros(2)), [(at(d), at(-d)) for d in directions]
        score = np.stack([above - below for above, below in ends]) / (2.0 * _STEP)
        curvature = np.diag([(above - 2.0 * middle + below).sum() for above, below in ends])
        for i, j in itertools.combinations(range(len(directions)), 2):
            d, e = directions[i], directions[j]
            curvature[i, j] = curvature[j, i] = (at(d + e) - at(d - e) - at(e - d) + at(-d - e)).sum() / 4.0
        of_scale = SCALE_CHANGE**-2 if self.previous else 0.0
        prior = directions @ np.diag([self.form.prior_width**-2, of_scale]) @ directions.T
        return self._sandwich(score, curvature / _STEP**2, prior)

    def _sandwich(self, score: np.ndarray, curvature: np.ndarray, prior_curvature: np.ndarray) -> np.ndarray:
        """Return standard errors from the scores of configurations (constants, configurations)."""
        inverse = np.linalg.pinv(curvature + prior_curvature, hermitian=True)
        count, least = score.shape[1], np.diag(inverse).clip(min=0.0)
        if count < 2:  # nothing scatters
            return np.sqrt(least)
        variance = np.diag(inverse @ (np.cov(score) * count + prior_curvature) @ inverse).clip(min=0.0)
        return np.sqrt(np.maximum(variance * t.ppf(_ONE_SIGMA, count - 1) ** 2, self.weight * least))


def _relative_error(residual: np.ndarray, forces: np.ndarray) -> Optional[float]:
    """Return ε of the surplus from errors and predicted forces (N, 3); None where these, or all errors, are missing."""
    known = np.isfinite(forces).all(-1)
    error, force = (np.square(x[known]).sum() for x in (residual, residual + forces))
    return math.sqrt(error / force) if error > 0.0 and force > 0.0 else None


def _single(value: float) -> Tensor:
    return torch.full((1,), value, dtype=torch.float64)


def _minimum(objective: Callable[[np.ndarray], float], starts: Sequence[np.ndarray]) -> np.ndarray:
    """Return where the objective is least, from several starts.

    Central differences: one-sided ones leave so much noise that processes which add up in another order end apart.
    """
    results = [minimize(objective, x, method="BFGS", jac="3-point", options={"gtol": 1e-7}) for x in starts]
    return min(results, key=lambda result: result.fun).x
