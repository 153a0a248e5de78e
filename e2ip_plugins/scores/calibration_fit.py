"""Fit of a post-hoc calibration (`e2ip_plugins.scores.calibration`) to predictions for validation configurations.

Atoms count alike, because coverage and calibration error are figures over atoms.
"""

import math
from dataclasses import replace
from typing import Callable, Dict, List, Sequence

import numpy as np

from e2ip_plugins.errors import InputError, plural
from e2ip_plugins.scores import calibration_constants
from e2ip_plugins.scores.calibration import Calibration
from e2ip_plugins.scores.calibration_constants import Fitted
from e2ip_plugins.scores.conformal import configurations_for, conformal_radii, unreachable_levels
from e2ip_plugins.scores.metrics import COVERAGE_LEVELS, calibration_error
from e2ip_plugins.scores.sample import Sample

#: Methods of ``e2ip calibrate``. ``floor``, ``scale`` and ``species-scale`` exclude each other; ``conformal`` may
#: accompany any of them.
CALIBRATION_METHODS = ("floor", "scale", "species-scale", "conformal")

#: With fewer configurations a note asks the user to look at the intervals of the constants.
FEW_CONFIGURATIONS = 10

_FITS: Dict[str, Callable[[Sample, List[str]], Fitted]] = {
    "none": calibration_constants.unchanged,
    "floor": calibration_constants.fit_floor,
    "scale": calibration_constants.fit_scale,
    "species-scale": calibration_constants.fit_species_scale,
}


def check(methods: Sequence[str], levels: Sequence[float] = COVERAGE_LEVELS) -> str:
    """Return the one method that changes the covariance, or ``none``; `InputError` for methods that exclude others."""
    for level in levels:
        if not 0.0 < level < 1.0:
            raise InputError(f"--level {level:g}: a level lies between 0 and 1")
    unknown = [name for name in methods if name not in CALIBRATION_METHODS]
    if unknown or not methods:
        raise InputError(f"--method {' '.join(unknown)}: choose from {', '.join(CALIBRATION_METHODS)}")
    chosen = list(dict.fromkeys(name for name in methods if name != "conformal"))
    if len(chosen) > 1:
        raise InputError(
            f"--method: {' and '.join(chosen)} both set the size of the covariance; choose one of them (conformal may "
            "stand beside it)"
        )
    return chosen[0] if chosen else "none"


def calibrate(sample: Sample, methods: Sequence[str], levels: Sequence[float] = COVERAGE_LEVELS) -> Calibration:
    """Fit a calibration.

    Beside ``floor`` and ``species-scale``, conformal radii come from every second configuration and the constants from
    the others: the guarantee needs distances that do not depend on the configurations from which the radii come. A
    common factor changes no region, whatever it was fitted to.

    Parameters
    ----------
    sample : Sample
    methods : sequence of str
        Some of `CALIBRATION_METHODS`.
    levels
        Of the conformal radii.

    Raises
    ------
    InputError
        Methods that exclude each other, fewer than two configurations, predictions without errors, conformal radii
        alone of which none is finite.
    """
    method, conformal = check(methods, levels), "conformal" in methods
    halved = conformal and method in ("floor", "species-scale")
    index, count = sample.numbered()
    if count < (4 if halved else 2):
        raise InputError(
            f"{sample.file}: has {plural(count, 'configuration')} with finite reference forces; constants and "
            f"their uncertainty need at least {4 if halved else 2}"
        )
    if not np.abs(sample.error).max() > 0.0:
        raise InputError(f"{sample.file}: all errors are zero; there is nothing to fit to")
    fitting, held = (sample.only(index % 2 == i) if halved else sample for i in (0, 1))
    notes = _notes_on_sample(sample, count)
    if halved:
        notes.append(
            f"{method} fitted to every second configuration, the conformal radii to the others: the guarantee of the "
            "radii needs that"
        )
    factor, floor = _FITS[method](fitting, notes)
    # Some species may only be in the other half.
    mean = calibration_constants.geometric_mean(list(factor.values()))
    calibration = Calibration(
        methods=tuple(name for name in CALIBRATION_METHODS if name in methods),
        uq_family=sample.family.uq_family,
        uq_model=sample.uq_model,
        factor={str(symbol): factor.get(str(symbol), mean) for symbol in np.unique(sample.species)},
        floor=floor,
        radii={},
        configurations=count,
        atoms=len(sample.error),
        frames=sample.fingerprints,
        file=sample.file,
        notes=notes,
    )
    radii = _radii(held.calibrated(calibration), levels, method, notes) if conformal else {}
    before, after = _figures(sample), _figures(sample.calibrated(calibration))
    notes += _notes_on_figures(before, after, method)
    return replace(calibration, radii=radii, scores={"before": before, "after": after})


def _notes_on_sample(sample: Sample, count: int) -> List[str]:
    notes = [sample.doubt] if sample.doubt else []
    if sample.vanishing:
        notes.append(
            f"{sample.vanishing} atoms left out whose force vanishes by symmetry (isolated atoms, perfect crystals): "
            "they tell nothing of errors"
        )
    if sample.unlabelled:
        notes.append(f"{sample.unlabelled} atoms without finite reference forces left out")
    if count < FEW_CONFIGURATIONS:
        notes.append(f"{count} configurations say little of other frames: look at the intervals of the constants")
    return notes


def _radii(sample: Sample, levels: Sequence[float], method: str, notes: List[str]) -> Dict[float, float]:
    """Return the conformal radii of calibrated atoms, and add notes on them."""
    distance = np.linalg.norm(sample.law().z_scores(sample.error), axis=-1)
    radii = conformal_radii(distance, sample.frame, levels)
    _, count = sample.numbered()
    if method == "none" and all(math.isinf(radius) for radius in radii.values()):
        least = min(radii)
        raise InputError(
            f"{sample.file}: {count} configurations allow conformal radii for levels up to "
            f"{count / (count + 1):.3f}; for --level {least:g} give at least {configurations_for(least)} of them"
        )
    notes += unreachable_levels(radii, count)
    largest = max((radius for radius in radii.values() if math.isfinite(radius)), default=0.0)
    if largest**2 > calibration_constants.MAX_FACTOR:
        notes.append(calibration_constants.useless(f"a radius of {largest:.1e}"))
    return radii


def _figures(sample: Sample) -> Dict[str, float]:
    law = sample.law()
    pit = law.pit(sample.error)
    return {
        "nll": float(law.negative_log_likelihood(sample.error).mean()),
        "calibration_error": calibration_error(pit),
        **{f"coverage{round(100 * level)}": float(np.mean(pit <= level)) for level in COVERAGE_LEVELS},
    }


def _notes_on_figures(before: Dict[str, float], after: Dict[str, float], method: str) -> List[str]:
    notes = []
    if after["nll"] > before["nll"] + 0.01:
        notes.append(
            f"the mean NLL rises from {before['nll']:.3f} to {after['nll']:.3f}: errors have other tails than the "
            "predicted distributions, and no size of the covariance is right in the middle and in the tails"
        )
    if method == "species-scale" and after["calibration_error"] > before["calibration_error"] + 0.005:
        notes.append(
            f"the CE over all atoms rises from {before['calibration_error']:.4f} to {after['calibration_error']:.4f}, "
            "every species being fitted by itself; method scale does not do that"
        )
    return notes
