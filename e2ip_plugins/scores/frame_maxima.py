"""Quantiles of the largest uncertainty of a frame, over frames that a model was not trained on, for thresholds.

Each of K held-out frames has a maximum over its atoms, or over those of a species. The quantile of level p is the k-th
smallest of these maxima, k = ⌈p (K + 1)⌉. If a new frame is exchangeable with the held-out ones, its maximum is larger
with a probability of at most 1 - p (split conformal prediction). The quantile is infinite for p > K/(K + 1), which K
frames cannot tell. That of p = 1 is the largest maximum, which a new frame exceeds with a probability of at most
1/(K + 1).
"""

import math
from typing import Dict, Iterable, Optional

import numpy as np
import torch

from e2ip_plugins.errors import InputError
from e2ip_plugins.keys import ENERGY_PER_ATOM, LEVERAGE, PRINCIPAL_STD
from e2ip_plugins.predictions.prediction_files import Predictions
from e2ip_plugins.scores.calibration import Calibration, Tables

#: Group of all atoms.
ALL_ATOMS = "all"

#: Levels of the quantiles in files.
QUANTILE_LEVELS = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 1.0)


def principal_std(covariance: np.ndarray) -> np.ndarray:
    """Return the largest standard deviation over all directions (N,), in eV/Å, of covariances (N, 3, 3).

    Covariances are in eV²/Å²; the result is NaN where one is not finite.

    >>> principal_std(np.diag([1.0, 4.0, 9.0])[None])
    array([3.])
    """
    std = np.full(len(covariance), np.nan)
    finite = np.isfinite(covariance).all((-2, -1))
    # By rounding, the eigenvalues of a covariance of nearly zero may be negative.
    std[finite] = np.sqrt(np.linalg.eigvalsh(covariance[finite])[:, -1].clip(min=0.0))
    return std


def quantile(maxima: np.ndarray, level: float) -> float:
    """Return the quantile of maxima (K,) that the module's docstring defines.

    >>> quantile(np.array([3.0, 1.0, 2.0]), 0.5), quantile(np.array([3.0, 1.0, 2.0]), 0.8)
    (2.0, inf)
    """
    if level == 1.0:
        return float(maxima.max())
    # By rounding, 0.9 · 10 may be more than 9.
    k = max(1, math.ceil(level * (len(maxima) + 1) - 1e-9))
    return float(np.sort(maxima)[k - 1]) if k <= len(maxima) else math.inf


def table(
    values: np.ndarray, frame: np.ndarray, species: np.ndarray, levels: Iterable[float] = QUANTILE_LEVELS
) -> Dict[str, Dict[float, float]]:
    """Return quantiles over frames of the largest value in a frame, by group and level.

    Parameters
    ----------
    values : (N,)
        Of atoms; may be infinite.
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

    groups = {ALL_ATOMS: np.full(len(values), True)}
    groups.update({str(symbol): species == symbol for symbol in np.unique(species)})
    return {group: quantiles(chosen) for group, chosen in groups.items()}


def of_predictions(
    predictions: Predictions, calibration: Optional[Calibration] = None, levels: Iterable[float] = QUANTILE_LEVELS
) -> Tables:
    """Return tables of ``forces_epistemic_std``, `PRINCIPAL_STD` and, if every atom has one, the leverage.

    Where frames have uncertainties of their energies, also of `ENERGY_PER_ATOM`, a number of the frame: of the group of
    all atoms alone.

    Parameters
    ----------
    predictions : Predictions
        With a distribution.
    calibration : Calibration, optional
        Applied before; atoms of species without constants are left out, as are frames whose forces have weight 0.
    levels
        See `table`.
    """
    p = predictions
    assert p.family is not None
    known = p.counted[p.frame_of_atom]
    if calibration is not None:
        known &= np.isin(p.species, calibration.species)
    if not known.any():
        raise InputError(f"{p.path}: the forces of all frames have weight zero (config_forces_weight)")
    parameters = {name: values[known] for name, values in p.parameters.items()}
    if calibration is not None:
        parameters = calibration.apply_numpy(p.family, parameters, p.species[known])
    derived = p.family.derive({name: torch.as_tensor(v, dtype=torch.float64) for name, v in parameters.items()})
    views = {name: value.numpy() for name, value in derived.items()}
    scalars = {
        "forces_epistemic_std": views["forces_epistemic_std"],
        PRINCIPAL_STD.name: principal_std(views["forces_cov"]),
    }
    if p.leverage is not None and not np.isnan(p.leverage).any():
        scalars[LEVERAGE.name] = p.leverage[known]
    tables = {name: table(values, p.frame_of_atom[known], p.species[known], levels) for name, values in scalars.items()}
    if p.has_energy_uncertainties:
        counted = p.counted & np.isfinite(p.energy_uncertainty)
        factor = 1.0 if calibration is None else calibration.energy_factor
        per_atom = factor * (p.energy_uncertainty / p.sizes)[counted]
        if len(per_atom):
            tables[ENERGY_PER_ATOM.name] = {ALL_ATOMS: {level: quantile(per_atom, level) for level in sorted(levels)}}
    return tables
