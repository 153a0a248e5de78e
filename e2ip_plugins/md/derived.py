"""Uncertainty of what is made of the forces of several atoms: a group's mean force, a force along a constraint.

A model gives every atom's covariance, and none between atoms. Errors of neighbours are not independent, though: those
of a whole structure without an external field add up to zero. What is exact whatever they do is an upper bound.
"""

from typing import Any, NamedTuple, Sequence, Union

import numpy as np
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator

from e2ip_plugins.errors import InputError


class Derived(NamedTuple):
    """A quantity, and what can be said of its standard deviation.

    Attributes
    ----------
    value : float
        In eV/Å times the unit of the weights.
    bound : float
        Largest standard deviation that the atoms' covariances allow, however their errors go together.
    independent : float
        What it would be if the errors of atoms were independent, which they are not.
    """

    value: float
    bound: float
    independent: float


class MeanForce(NamedTuple):
    """Mean force of a group (3,) in eV/Å, and two covariances (3, 3) in eV²/Å² with the meanings of `Derived`.

    The first is a bound in every direction: ``bound`` less the true covariance has no negative eigenvalue. In one
    direction `combined_force` has a tighter one.
    """

    force: np.ndarray
    bound: np.ndarray
    independent: np.ndarray


def combined_force(atoms: Atoms, weights: Any) -> Derived:
    """The quantity Q = Σ w_i · F_i, a generalised force: along a bond, a torsion, a constraint, a reaction coordinate.

    With C_i the covariance of the force on atom i and s_i = √(w_iᵀ C_i w_i), its standard deviation is at most Σ s_i
    (all errors in phase), and √(Σ s_i²) if they were independent.

    Parameters
    ----------
    atoms : ase.Atoms
        With a calculator that has uncertainties, or a frame with ``forces_cov`` and forces, as files hold them.
    weights : (N, 3)
        ∂x_i/∂q for a coordinate q; for the force that stretches a bond along the unit vector u, u/2 on one atom and
        -u/2 on the other.

    Raises
    ------
    InputError
        Without uncertainties; for weights of another shape or that are not finite.
    """
    forces, covariances = _forces(atoms)
    w = np.asarray(weights, dtype=float)
    if w.shape != forces.shape or not np.isfinite(w).all():
        found = "some that are not finite" if w.shape == forces.shape else str(w.shape)
        raise InputError(f"weights: {forces.shape} finite numbers are needed, one vector for every atom, not {found}")
    # Files hold rounded numbers.
    variances = np.maximum(np.einsum("ia,iab,ib->i", w, covariances, w), 0.0)
    return Derived(float(np.sum(w * forces)), float(np.sum(np.sqrt(variances))), float(np.sqrt(np.sum(variances))))


def mean_force(atoms: Atoms, group: Union[Sequence[int], np.ndarray]) -> MeanForce:
    """Mean force on a group of atoms, with covariances.

    Of n atoms the covariance is at most the mean of theirs (by convexity), and the n-th part of that if errors were
    independent.

    Parameters
    ----------
    atoms : ase.Atoms
        As in `combined_force`.
    group : (n,) int
        Indices of atoms, or a mask (N,).

    Raises
    ------
    InputError
        Without uncertainties; for an empty group, an atom that is not there or is named twice.
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
    """Forces (N, 3) and their covariances (N, 3, 3), evaluated or read, without constraints."""
    if atoms.calc is None:
        raise InputError(
            "the frame has neither a calculator nor forces (those of mace_eval_configs have names with MACE_ in front: "
            "take a file of e2ip evaluate)"
        )
    # A column that a frame was read with belongs to the forces that were read with it.
    held = atoms.arrays.get("forces_cov") if isinstance(atoms.calc, SinglePointCalculator) else None
    forces = atoms.get_forces(apply_constraint=False)
    # Of a `BiasedCalculator` those without the bias, which the covariances are of.
    forces = atoms.calc.results.get("forces_unbiased", forces)
    found = atoms.calc.results.get("forces_cov", held)
    if found is None:
        raise InputError(
            "no forces_cov: the calculator's model has no readout, or the frame is not one of predictions (or of e2ip "
            "evaluate --no-covariances, which leaves them out)"
        )
    return forces, np.asarray(found, dtype=float).reshape(-1, 3, 3)
