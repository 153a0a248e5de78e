"""How large the largest uncertainty of a frame is on frames that a model was not trained on: what thresholds come from.

Of K held-out frames each has a maximum over its atoms, or over those of a species. The quantile of level p is the k-th
smallest of them, k = ⌈p (K + 1)⌉: if a new frame is exchangeable with the held-out ones, its maximum is larger with a
probability of at most 1 - p (split conformal prediction). Infinite for p > K/(K + 1), which K frames cannot tell; p = 1
is the largest that was seen, which a new frame exceeds with a probability of at most 1/(K + 1).
"""

import math
from typing import Any, Dict, Iterable

import numpy as np
import torch

from e2ip_plugins.keys import LEVERAGE, PRINCIPAL_STD

#: Quantile by level, by group of atoms (`ALL` or a chemical symbol), by name of the uncertainty.
Tables = Dict[str, Dict[str, Dict[float, float]]]

#: Group of all atoms.
ALL = "all"

#: Quantiles that files have.
LEVELS = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 1.0)


def principal_std(covariance: np.ndarray) -> np.ndarray:
    """Largest standard deviation over all directions (N,), in eV/Å, of covariances (N, 3, 3) in eV²/Å².

    NaN where one is not finite.

    >>> principal_std(np.diag([1.0, 4.0, 9.0])[None])
    array([3.])
    """
    found = np.full(len(covariance), np.nan)
    finite = np.isfinite(covariance).all((-2, -1))
    # Rounding may leave an eigenvalue of a covariance of nearly zero below it.
    found[finite] = np.sqrt(np.linalg.eigvalsh(covariance[finite])[:, -1].clip(min=0.0))
    return found


def quantile(maxima: np.ndarray, level: float) -> float:
    """The quantile of maxima (K,), see the module.

    >>> quantile(np.array([3.0, 1.0, 2.0]), 0.5), quantile(np.array([3.0, 1.0, 2.0]), 0.8)
    (2.0, inf)
    """
    if level == 1.0:
        return float(maxima.max())
    # Less a little: 0.9 · 10 may be more than 9.
    k = max(1, math.ceil(level * (len(maxima) + 1) - 1e-9))
    return float(np.sort(maxima)[k - 1]) if k <= len(maxima) else math.inf


def table(
    values: np.ndarray, frame: np.ndarray, species: np.ndarray, levels: Iterable[float] = LEVELS
) -> Dict[str, Dict[float, float]]:
    """Quantiles over frames of the largest of some values (N,), by group and level.

    Parameters
    ----------
    values : (N,)
        May be infinite.
    frame : (N,) int
        Frame of every atom.
    species : (N,) str
        Chemical symbols.
    levels
        Above 0, at most 1.
    """
    levels = sorted(levels)

    def quantiles(chosen: np.ndarray) -> Dict[float, float]:
        _, index = np.unique(frame[chosen], return_inverse=True)
        maxima = np.full(index.max() + 1, -np.inf)
        np.maximum.at(maxima, index, values[chosen])
        return {level: quantile(maxima, level) for level in levels}

    groups = {ALL: np.full(len(values), True)}
    groups.update({str(symbol): species == symbol for symbol in np.unique(species)})
    return {group: quantiles(chosen) for group, chosen in groups.items()}


def of_predictions(predictions: Any, calibration: Any = None, levels: Iterable[float] = LEVELS) -> Tables:
    """Tables of ``forces_epistemic_std``, `PRINCIPAL_STD` and, if every atom has one, the leverage.

    Parameters
    ----------
    predictions : e2ip_plugins.predictions.prediction_files.Predictions
        With a distribution.
    calibration : e2ip_plugins.scores.calibration.Calibration, optional
        To be applied before; atoms of species that it does not know are left out.
    """
    p = predictions
    known = np.full(len(p.species), True) if calibration is None else np.isin(p.species, calibration.species)
    species, frame = p.species[known], p.frame_of_atom[known]
    parameters = {name: torch.as_tensor(v[known], dtype=torch.float64) for name, v in p.parameters.items()}
    if calibration is not None:
        parameters = calibration.apply(p.family, parameters, species)
    views = {name: value.numpy() for name, value in p.family.derive(parameters).items()}
    scalars = {
        "forces_epistemic_std": views["forces_epistemic_std"],
        PRINCIPAL_STD.name: principal_std(views["forces_cov"]),
    }
    if p.leverage is not None and not np.isnan(p.leverage).any():
        scalars[LEVERAGE.name] = p.leverage[known]
    return {name: table(values, frame, species, levels) for name, values in scalars.items()}
