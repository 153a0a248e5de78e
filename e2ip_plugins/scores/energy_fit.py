"""Fit of a calibration's constants for energies: a factor on their standard deviations, and conformal radii.

The factor is that of maximum likelihood for Gaussians, √(mean z²) with z = e/σ over the frames: a closed form, which of
few frames knows more than the calibration error does. Towards 1 it is shrunk as the factors of forces are.
"""

import math
from dataclasses import replace
from typing import Dict, List, Optional, Sequence

import numpy as np

from e2ip_plugins.predictions.prediction_files import Predictions
from e2ip_plugins.scores.calibration import Calibration, CalibrationConstant, EnergyCalibration
from e2ip_plugins.scores.calibration_constants import bootstrap_interval, shrunk
from e2ip_plugins.scores.conformal import conformal_radii, unreachable_levels
from e2ip_plugins.scores.energies import EnergyResiduals, energy_figures, of_frames, reference_doubt
from e2ip_plugins.scores.metrics import COVERAGE_LEVELS

#: With fewer frames a note asks the user to look at the interval of the factor.
FEW_FRAMES = 10


def with_energies(calibration: Calibration, p: Predictions, levels: Sequence[float] = COVERAGE_LEVELS) -> Calibration:
    """Return a calibration with constants for energies, where the validation file has energies with uncertainties.

    Parameters
    ----------
    calibration : Calibration
        Fitted to the forces of the same predictions. If ``conformal`` is its only method, the factor is 1; without
        this method there are no radii.
    p : Predictions
        Frames of one atom are left out: most are isolated atoms, whose energies have no error by construction.
    levels
        Of the conformal radii.
    """
    if not p.has_energy_uncertainties:
        return calibration
    notes = list(calibration.notes)
    residuals = _usable(p, notes)
    if residuals is None:
        return replace(calibration, notes=notes)
    z = residuals.error / residuals.std
    factor = CalibrationConstant(1.0, (1.0, 1.0))
    if calibration.methods != ("conformal",):
        factor = fit_energy_factor(z, notes)
    radii: Dict[float, float] = {}
    if "conformal" in calibration.methods:
        radii = conformal_radii(np.abs(z) / factor.value, np.arange(len(z)), levels)
        notes += [f"energies: {text}" for text in unreachable_levels(radii, len(z))]
    scores = {
        when: energy_figures(residuals._replace(std=value * residuals.std))
        for when, value in (("before", 1.0), ("after", factor.value))
    }
    wanted = ("nll", "calibration_error", "coverage90")
    energies = EnergyCalibration(
        factor=factor,
        radii=radii,
        frames=len(z),
        scores={when: {name: figures[name] for name in wanted} for when, figures in scores.items()},
    )
    of_energies = {p.frames[i] for i in residuals.frames[:, 0]}
    frames = (*calibration.frames, *sorted(of_energies.difference(calibration.frames)))
    return replace(calibration, energies=energies, frames=frames, notes=notes)


def fit_energy_factor(z: np.ndarray, notes: List[str]) -> CalibrationConstant:
    """Return the factor on standard deviations that makes errors z (F,), in units of them, most likely."""
    square = np.square(z)

    def factor(drawn: np.ndarray) -> float:
        return math.sqrt(float(square[drawn].mean()))

    wanted = factor(np.arange(len(z)))
    low, high = bootstrap_interval(factor, len(z))
    # Resamples of frames without errors have none, either.
    width = math.log(high) - math.log(low) if low > 0.0 else math.inf
    value = math.exp(shrunk(math.log(wanted), 0.0, width))
    if low <= 1.0 <= high:
        notes.append(
            f"energies: these frames want a factor of {wanted:.3f} on the standard deviations, which they hardly tell "
            f"from 1: {value:.3f} is applied"
        )
    if len(z) < FEW_FRAMES:
        notes.append(f"energies: {len(z)} frames say little of other ones: look at the interval of the factor")
    return CalibrationConstant(value, (low, high))


def _usable(p: Predictions, notes: List[str]) -> Optional[EnergyResiduals]:
    """Return the errors of frames to fit to, in an order that does not depend on the file's; None where there are none.

    Notes say why.
    """
    residuals = of_frames(p)
    several = np.empty(0, dtype=int) if residuals is None else np.flatnonzero(residuals.atoms > 1)
    unchanged = "the standard deviations of energies stay as they are"
    if residuals is None or len(several) < 2:
        notes.append(
            f"energies: {len(several)} frames of two atoms or more have a reference energy and an uncertainty, and the "
            f"fit needs two: {unchanged}"
        )
        return None
    doubt = reference_doubt(p)
    if doubt is None and not residuals.error[several].any():
        doubt = "all errors of energies are zero"
    if doubt is not None:
        notes.append(f"{doubt}; {unchanged}")
        return None
    names = [p.frames[i] for i in residuals.frames[several, 0]]
    order = several[np.argsort(names, kind="stable")]
    arrays = (residuals.error[order], residuals.std[order], residuals.atoms[order], residuals.frames[order])
    return EnergyResiduals(*arrays, len(order))
