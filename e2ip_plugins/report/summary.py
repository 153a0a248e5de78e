"""The figures of one scored model, over all atoms and per species, ready for JSON."""

from typing import Dict, Optional

import numpy as np

from e2ip_plugins.families.laws import law_of
from e2ip_plugins.keys import KCAL_PER_MOL
from e2ip_plugins.predictions.prediction_files import Predictions
from e2ip_plugins.report.scored_model import ScoredModel
from e2ip_plugins.scores.bootstrap import CoverageBand, coverage_band
from e2ip_plugins.scores.calibration import Calibration
from e2ip_plugins.scores.energies import energy_figures, energy_intervals
from e2ip_plugins.scores.metrics import COVERAGE_LEVELS, auroc, frame_scores, observed_coverage, summarise

#: Units of the figures.
SUMMARY_UNITS = {
    "force_mae": "eV/Å",
    "force_rmse": "eV/Å",
    "energy_mae": "eV/atom",
    "nll": "nats, density in (eV/Å)^-3",
    "nll_kcal": "nats, density in (kcal/mol/Å)^-3",
    "energy_score": "eV/Å",
    "energy_score_kcal": "kcal/mol/Å",
    "energy_score_error": "eV/Å, standard error from sampling",
    "energy_score_error_kcal": "kcal/mol/Å, standard error from sampling",
    "epistemic_std": "eV/Å, mean over atoms",
    "total_std": "eV/Å, mean over atoms",
    "leverage": "1, mean over atoms",
    "everything else": "1",
}

#: Units of the figures of energies with uncertainties, of frames and of pairs.
ENERGY_UNITS = {
    "energies": "frames: mae and crps in eV/atom; pairs: in eV; nll in nats, density in 1/eV; nll_kcal in mol/kcal"
}


def summary(model: ScoredModel) -> dict:
    """Return the figures of a model as `e2ip_plugins.report.compare.compare` describes them."""
    p, pit = model.predictions, model.scores.get("pit")
    species = {str(symbol): model.species == symbol for symbol in np.unique(model.species)}
    energy_mae = float(np.abs(model.energy_error).mean()) if len(model.energy_error) else None
    return {
        "label": model.label,
        "file": str(p.path),
        "uq_family": p.family.uq_family if p.family else None,
        "frames": len(p.sizes),
        "masked_atoms": model.masked,
        "left_out": model.left_out,
        "overall": _figures(model, np.full(len(model.species), True)) | _finite({"energy_mae": energy_mae}),
        "species": {symbol: _figures(model, chosen) for symbol, chosen in species.items()},
        "observed_coverage": None if pit is None else observed_coverage(pit).tolist(),
        "interval95": _intervals(model, species),
        "file_calibration": p.calibration,
        "calibration": _of_calibration(model),
        **({"energies": _of_energies(model)} if model.energy_residuals else {}),
    }


def _of_energies(model: ScoredModel) -> dict:
    """Return the figures of energies, of ``frames`` and of ``pairs``, with their 95 % intervals."""
    of_kinds = {}
    for kind, residuals in model.energy_residuals.items():
        figures, intervals = energy_figures(residuals), energy_intervals(residuals)
        # A density in mol/kcal is KCAL times the one in 1/eV.
        shift = -float(np.log(KCAL_PER_MOL))
        figures["nll_kcal"] = figures["nll"] + shift
        if intervals is not None and "nll" in intervals:
            low, high = intervals["nll"]
            intervals["nll_kcal"] = (low + shift, high + shift)
        of_kinds[kind] = {
            "number": len(residuals.error),
            "possible": residuals.possible,
            **_finite(figures),
            "interval95": None if intervals is None else {name: list(ends) for name, ends in intervals.items()},
        }
    return of_kinds


def frame_auroc(inside: ScoredModel, outside: ScoredModel) -> dict:
    """Return, by every score of a frame, the probability that it is larger out of distribution than in it."""
    a, b = _frame_scores(inside.predictions), _frame_scores(outside.predictions)
    return {"label": inside.label} | _finite({name: auroc(b[name], a[name]) for name in a})


def _frame_scores(p: Predictions) -> Dict[str, np.ndarray]:
    # All atoms count: no reference is needed to distinguish frames.
    epistemic = law_of(p.family, p.parameters).epistemic_std() if p.family else None
    # Families without an epistemic part rank nothing by it.
    return frame_scores(p.sizes, p.leverage, epistemic if epistemic is not None and epistemic.any() else None)


def _figures(model: ScoredModel, chosen: np.ndarray) -> dict:
    """Return the averages over some of the atoms, NLL and energy score also in kcal/mol/Å."""
    figures = summarise({name: values[chosen] for name, values in model.scores.items()})
    nll = figures["nll"]
    # A density in (kcal/mol/Å)⁻³ is KCAL³ times the one in (eV/Å)⁻³.
    figures["nll_kcal"] = None if nll is None else nll - 3.0 * float(np.log(KCAL_PER_MOL))
    for name in ("energy_score", "energy_score_error"):
        value = figures[name]
        figures[f"{name}_kcal"] = None if value is None else value / KCAL_PER_MOL
    return _finite({"atoms": int(chosen.sum())} | figures)


def _intervals(model: ScoredModel, species: Dict[str, np.ndarray]) -> Optional[dict]:
    """Return 95 % intervals of coverages and calibration errors, from a bootstrap of whole configurations."""
    if model.band is None:
        return None
    pit, frame = model.scores["pit"], model.frame
    return {
        "overall": _of_band(model.band),
        "species": {symbol: _of_band(coverage_band(pit[chosen], frame[chosen])) for symbol, chosen in species.items()},
        "observed_coverage": {"low": model.band.low.tolist(), "high": model.band.high.tolist()},
    }


def _of_band(band: Optional[CoverageBand]) -> Optional[dict]:
    if band is None:
        return None
    coverages = {f"coverage{round(100 * level)}": list(band.coverage(level)) for level in COVERAGE_LEVELS}
    return {"calibration_error": list(band.calibration_error), **coverages}


def _of_calibration(model: ScoredModel) -> Optional[dict]:
    """Return the constants that were applied, and the coverage of conformal regions.

    The coverage is the share of a configuration's atoms inside, averaged over configurations: the regions' guarantee is
    for configurations that count alike, whatever their size.
    """
    calibration = model.calibration
    if calibration is None:
        return None
    conformal = {}
    if "z_scores" in model.scores:
        distance = np.linalg.norm(model.scores["z_scores"], axis=-1)
        _, frame = np.unique(model.frame, return_inverse=True)
        atoms = np.bincount(frame)
        for level, radius in calibration.radii.items():
            if np.isfinite(radius):
                coverage = float(np.mean(np.bincount(frame, distance <= radius) / atoms))
                conformal[f"{level:g}"] = {"radius": radius, "coverage": coverage}
    of_energies = {} if calibration.energies is None else {"energies": _of_energy_calibration(model, calibration)}
    return {
        **of_energies,
        "file": calibration.path,
        "methods": list(calibration.methods),
        "factor": {symbol: constant.value for symbol, constant in calibration.factor.items()},
        "floor": calibration.floor.value,
        "conformal": conformal,
    }


def _of_energy_calibration(model: ScoredModel, calibration: Calibration) -> dict:
    """Return the factor on standard deviations of energies, and the coverage of their conformal intervals."""
    assert calibration.energies is not None
    conformal = {}
    if residuals := model.energy_residuals.get("frames"):
        distance = np.abs(residuals.error) / residuals.std
        for level, radius in calibration.energies.radii.items():
            if np.isfinite(radius):
                conformal[f"{level:g}"] = {"radius": radius, "coverage": float(np.mean(distance <= radius))}
    return {"factor": calibration.energy_factor, "conformal": conformal}


def _finite(figures: dict) -> dict:
    # JSON has neither NaN nor infinity, and an undefined figure is an empty cell like a missing one.
    return {name: None if value is None or not np.isfinite(value) else value for name, value in figures.items()}
