"""Conformal radii: regions that hold a random atom of a new configuration with a given probability."""

import math
from typing import Dict, List, Sequence

import numpy as np


def conformal_radii(distance: np.ndarray, frame: np.ndarray, levels: Sequence[float]) -> Dict[float, float]:
    """Return the `conformal_radius` of every level, in ascending order."""
    return {float(level): conformal_radius(distance, frame, level) for level in sorted(levels)}


def conformal_radius(distance: np.ndarray, frame: np.ndarray, level: float) -> float:
    """Return the radius that holds a random atom of a new configuration with a probability of at least ``level``.

    Hierarchical conformal prediction (Lee, Barber & Willett 2023, https://arxiv.org/abs/2306.06342): configurations are
    exchangeable, atoms within one are not. Each of K configurations has the weight 1/(K + 1), shared by its atoms, and
    infinity has the last one. The radius is the weighted quantile of the distances.

    Parameters
    ----------
    distance : (N,)
        Of the errors of atoms, in units of the covariance.
    frame : (N,) int
        Configuration of every atom.
    level : float

    Returns
    -------
    float
        Infinite for levels above K/(K + 1).

    Examples
    --------
    >>> conformal_radius(np.array([1.0, 2.0, 3.0]), np.array([0, 1, 2]), 0.75), 4 * 0.75
    (3.0, 3.0)
    """
    _, index, sizes = np.unique(frame, return_inverse=True, return_counts=True)
    order = np.argsort(distance)
    held = np.cumsum(1.0 / ((len(sizes) + 1) * sizes[index[order]]))
    # Sums of weights that equal the level may differ from it by rounding.
    place = np.searchsorted(held, level * (1.0 - 1e-12))
    return float(distance[order][place]) if place < len(held) else math.inf


def configurations_for(level: float) -> int:
    """Return the least number of configurations with which the radius of a level is finite.

    >>> configurations_for(0.9), configurations_for(0.95)
    (9, 19)
    """
    # Whole quotients may differ from whole numbers by rounding.
    return math.ceil(level / (1.0 - level) - 1e-9)


def unreachable_levels(radii: Dict[float, float], count: int) -> List[str]:
    """Return a note on the levels whose radius is infinite with ``count`` configurations, or none."""
    levels = [f"{level:g}" for level, radius in radii.items() if math.isinf(radius)]
    if not levels:
        return []
    return [
        f"no finite conformal radius for level {', '.join(levels)}: {count} configurations allow levels up to "
        f"{count / (count + 1):.3f}; give more configurations"
    ]
