r"""Thermal averages with error bars: a trajectory of one model, reweighted to its members.

Frames that were sampled with the energy E at temperature T have, for a member with energies E_k and with
h = (E_k - E)/kT, the weights exp(-h). Direct reweighting takes them as they are::

    ⟨a⟩_k = Σ_t a_t exp(-h_t) / Σ_t exp(-h_t)

Where h varies by more than about 1, a few frames have nearly all of the weight. The cumulant expansion has a small
statistical error instead, and is exact if a and h are jointly Gaussian::

    ⟨a⟩_k = ⟨a⟩ - ⟨a h⟩ + ⟨a⟩⟨h⟩

Both after Imbalzano et al., J. Chem. Phys. 154, 074102 (2021); the expansion is that of Ceriotti et al., Proc. R. Soc.
A 468, 2 (2012).
"""

import warnings
from typing import NamedTuple

import numpy as np
from ase.units import kB
from numpy.typing import ArrayLike

from e2ip_plugins.errors import InputError, UncertaintyWarning

#: Share of the frames below which the effective sample size of direct weights is small.
SMALL_SHARE = 0.1


class MemberAverages(NamedTuple):
    """Averages of an observable for K members.

    Attributes
    ----------
    members : (K, ...)
        In the unit of the observable.
    """

    members: np.ndarray

    @property
    def mean(self) -> np.ndarray:
        """Mean over the members."""
        return self.members.mean(0)

    @property
    def std(self) -> np.ndarray:
        """Standard deviation over the members, with K - 1: the error bar of the average that the model causes."""
        return self.members.std(0, ddof=1)


class Reweighted(NamedTuple):
    """Thermal averages of an observable.

    Attributes
    ----------
    sampled : (...)
        Average of the trajectory as it is: that of the mean model.
    direct, cumulant : MemberAverages
        From exponential weights, and from the cumulant expansion.
    effective : (K,)
        Effective sample size of the direct weights of each member, (Σw)²/Σw² (Kish), as a share of the frames: 1 where
        all frames count alike, 1/F where one has all of the weight.
    """

    sampled: np.ndarray
    direct: MemberAverages
    cumulant: MemberAverages
    effective: np.ndarray

    @property
    def trusted(self) -> MemberAverages:
        """Direct averages where every member has an effective sample size of a tenth or more, otherwise the others."""
        return self.direct if self.effective.min() >= SMALL_SHARE else self.cumulant


def reweight(
    observable: ArrayLike, member_energies: ArrayLike, mean_energies: ArrayLike, temperature_K: float
) -> Reweighted:
    """Return thermal averages of an observable for every member, from a trajectory of the mean model.

    The spread over the members is the part of the error that is due to the model. It has the statistical error of the
    trajectory in it, which more independent frames make smaller.

    Parameters
    ----------
    observable : (F, ...)
        Values in F frames of the canonical ensemble of the mean model.
    member_energies : (F, K)
        Energies of K ≥ 2 members in eV, from `e2ip_plugins.energies.members` or a committee.
    mean_energies : (F,)
        Energies in eV that the trajectory was run with.
    temperature_K : float
        In kelvin.

    Raises
    ------
    InputError
        Different numbers of frames, fewer than two frames or members, numbers that are not finite, a temperature that
        is not positive.

    Warns
    -----
    UncertaintyWarning
        If the effective sample size of a member is below a tenth of the frames.

    Examples
    --------
    A harmonic oscillator of 1 eV/Å² at 300 K, and two members that pull at it with 0.01 eV/Å to either side:

    >>> x = np.sqrt(kB * 300) * np.random.default_rng(0).standard_normal(100_000)
    >>> energies = 0.5 * x**2
    >>> result = reweight(x, np.stack([energies + 0.01 * x, energies - 0.01 * x], 1), energies, 300)
    >>> result.direct.members.round(3)
    array([-0.01,  0.01])
    >>> result.cumulant.members.round(3)
    array([-0.01,  0.01])
    """
    values, energies, mean = (np.asarray(array, np.float64) for array in (observable, member_energies, mean_energies))
    _check(values, energies, mean, temperature_K)
    h = (energies - mean[:, None]) / (kB * temperature_K)
    weights = np.exp(h.min(0) - h)
    weights /= weights.sum(0)
    effective = 1.0 / (np.square(weights).sum(0) * len(h))
    direct = np.tensordot(weights, values, (0, 0))
    sampled = values.mean(0)
    cumulant = sampled - np.tensordot(h - h.mean(0), values - sampled, (0, 0)) / len(h)
    few = int((effective < SMALL_SHARE).sum())
    if few:
        warnings.warn(
            f"direct weights of {few} of {len(effective)} members rest on less than {SMALL_SHARE:.0%} of the frames "
            f"(the worst on {effective.min():.1%}): trust the cumulant expansion instead",
            UncertaintyWarning,
            stacklevel=2,
        )
    return Reweighted(sampled, MemberAverages(direct), MemberAverages(cumulant), effective)


def _check(values: np.ndarray, energies: np.ndarray, mean: np.ndarray, temperature_K: float) -> None:
    if energies.ndim != 2 or mean.ndim != 1 or values.ndim < 1 or not len(values) == len(energies) == len(mean):
        raise InputError(
            f"observable {values.shape}, member_energies {energies.shape} and mean_energies {mean.shape} should have "
            "the shapes (F, ...), (F, K) and (F,) for F frames and K members"
        )
    if min(energies.shape) < 2:
        raise InputError(f"{len(energies)} frames, {energies.shape[1]} members: an error bar needs two of both")
    if not (np.isfinite(values).all() and np.isfinite(energies).all() and np.isfinite(mean).all()):
        raise InputError("observable or energies have entries that are not finite: leave such frames out")
    if not 0.0 < temperature_K < np.inf:
        raise InputError(f"temperature_K {temperature_K}: give a positive number of kelvin")
