"""Uncertainty of quantities made of several atoms' forces: a group's mean force, a force along a constraint.

A model gives a covariance for every atom, and none between atoms. Errors of neighbours are not independent, though:
those of all atoms of a structure without an external field add up to zero. An upper bound holds in any case.
"""

from typing import Any, NamedTuple, Sequence, Union

import numpy as np
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator

from e2ip_plugins.errors import InputError
from e2ip_plugins.md.mixtures import results_of


class Derived(NamedTuple):
    """A quantity with a bound and an estimate of its standard deviation.

    Attributes
    ----------
    value : float
        The quantity, in eV/Å times the unit of the weights.
    bound : float
        Largest standard deviation that the atoms' covariances allow, whatever the correlation of their errors.
    independent : float
        Standard deviation if the errors of atoms were independent, which they are not.
    """

    value: float
    bound: float
    independent: float


class MeanForce(NamedTuple):
    """Mean force of a group (3,) in eV/Å, and two covariances (3, 3) in eV²/Å² with the meanings of `Derived`.

    The first is a bound in every direction: ``bound`` minus the true covariance has no negative eigenvalue. For one
    direction, `combined_force` gives a tighter bound.
    """

    force: np.ndarray
    bound: np.ndarray
    independent: np.ndarray


def combined_force(atoms: Atoms, weights: Any) -> Derived:
    """Return a generalised force Q = Σ w_i · F_i: along a bond, a torsion, a constraint or a reaction coordinate.

    With C_i the covariance of the force on atom i and s_i = √(w_iᵀ C_i w_i), the standard deviation of Q is at most
    Σ s_i (all errors in phase), and √(Σ s_i²) for independent errors.

    Parameters
    ----------
    atoms : ase.Atoms
        Structure whose calculator has uncertainties, or frame of a file with forces and ``forces_cov``.
    weights : (N, 3)
        ∂x_i/∂q for a coordinate q. For the force that stretches a bond along the unit vector u: u/2 on one atom and
        -u/2 on the other.

    Raises
    ------
    InputError
        There are no uncertainties; the weights have another shape or are not finite.
    """
    forces, covariances = _forces(atoms)
    w = np.asarray(weights, dtype=float)
    if w.shape != forces.shape or not np.isfinite(w).all():
        reason = "some that are not finite" if w.shape == forces.shape else str(w.shape)
        raise InputError(f"weights: {forces.shape} finite numbers are needed, one vector for every atom, not {reason}")
    # A variance may be slightly negative: files hold rounded numbers.
    variances = np.maximum(np.einsum("ia,iab,ib->i", w, covariances, w), 0.0)
    return Derived(float(np.sum(w * forces)), float(np.sum(np.sqrt(variances))), float(np.sqrt(np.sum(variances))))


def mean_force(atoms: Atoms, group: Union[Sequence[int], np.ndarray]) -> MeanForce:
    """Return the mean force on a group of atoms, with covariances.

    The covariance of the mean over n atoms is at most the mean of their covariances (by convexity), and the n-th part
    of that for independent errors.

    Parameters
    ----------
    atoms : ase.Atoms
        As in `combined_force`.
    group : (n,) int
        Indices of atoms, or a mask (N,).

    Raises
    ------
    InputError
        There are no uncertainties; the group is empty, or names an atom twice or one that the structure lacks.
    """
    forces, covariances = _forces(atoms)
    chosen = np.asarray(group)
    if chosen.dtype == bool and chosen.shape == (len(forces),):
        chosen = np.flatnonzero(chosen)
    if chosen.ndim != 1 or len(chosen) == 0 or not np.issubdtype(chosen.dtype, np.integer):
        raise InputError("group: indices of at least one atom, or a mask with an entry for every atom")
    if chosen.min() < -len(forces) or chosen.max() >= len(forces):
        raise InputError(f"group: the structure has atoms 0 to {len(forces) - 1}, not {chosen.min()} to {chosen.max()}")
    if len(np.unique(chosen % len(forces))) < len(chosen):
        raise InputError("group: an atom is named twice")
    bound = covariances[chosen].mean(0)
    return MeanForce(forces[chosen].mean(0), bound, bound / len(chosen))


def _forces(atoms: Atoms) -> tuple[np.ndarray, np.ndarray]:
    """Return forces (N, 3) and their covariances (N, 3, 3), evaluated or read, without constraints."""
    if atoms.calc is None:
        raise InputError("the frame has neither a calculator nor forces: take a frame of e2ip evaluate")
    # A column of covariances belongs to the forces that were read from the same file.
    column = atoms.arrays.get("forces_cov") if isinstance(atoms.calc, SinglePointCalculator) else None
    forces = atoms.get_forces(apply_constraint=False)
    # The covariances belong to the forces without the bias of a `BiasedCalculator`.
    results = results_of(atoms)
    forces = results.get("forces_unbiased", forces)
    covariances = results.get("forces_cov", column)
    if covariances is None:
        raise InputError(
            "no forces_cov: the calculator's model has no readout, or the frame's file lacks them (--no-covariances)"
        )
    return forces, np.asarray(covariances, dtype=float).reshape(-1, 3, 3)
