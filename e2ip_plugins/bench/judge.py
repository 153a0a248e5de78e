"""Scores of finished runs and of ensembles of them: raw, and calibrated on the validation frames."""

import json
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from e2ip_plugins import __version__
from e2ip_plugins.bench import data
from e2ip_plugins.errors import InputError
from e2ip_plugins.families.laws import law_of
from e2ip_plugins.files import replacing
from e2ip_plugins.predictions.copies import distinct
from e2ip_plugins.predictions.prediction_files import read_predictions
from e2ip_plugins.report.compare import ScoredModel, compare, load_models
from e2ip_plugins.report.ensemble import combine
from e2ip_plugins.scores.calibration_fit import calibrate
from e2ip_plugins.scores.metrics import summarise
from e2ip_plugins.scores.sample import Sample

#: Name of a calibration before judging -> method of `e2ip calibrate` and the frames that it is fitted to.
CALIBRATIONS: Dict[str, Optional[Tuple[str, str]]] = {
    "raw": None,
    "floor": ("floor", "valid"),
    "scale": ("scale", "valid"),
    "scale, further frames": ("scale", "further"),
}

#: Version of what is kept of a case: that of this package, and of its form.
VERSION = f"{__version__}, 2"

#: Files that nothing is judged on.
_NO_TESTS = ("valid", "further", "rotated")


class Case(NamedTuple):
    """Predictions of one model or ensemble.

    Attributes
    ----------
    folder : Path
        Where its scores are kept.
    files : dict
        Predictions by label: ``valid``, ``further``, the tests, ``rotated``; not every set has all.
    """

    folder: Path
    files: Mapping[str, Path]


def ensemble(members: Sequence[Case], folder: Path, isotropic: bool = False) -> Case:
    """The ensemble of some members; its files are made unless newer ones exist, or it has been judged."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for label in members[0].files:
        files[label] = folder / f"{label}.xyz"
        sources = [member.files[label] for member in members]
        if not _newer(folder / "scores.json", sources) and not _newer(files[label], sources):
            for member in members:
                _check_predictions(member)
            combine(sources, files[label], isotropic=isotropic)
    return Case(folder, files)


def judge(case: Case) -> Dict[str, Any]:
    """Scores by label and calibration, with the AUROC of frames out of distribution; kept in the case's folder.

    Kept scores stay right without their predictions, which may be removed.
    """
    kept = case.folder / "scores.json"
    if _newer(kept, list(case.files.values())):
        scores = data.read_json(kept)
        if scores.get("version") == VERSION:
            return scores
    _check_predictions(case)
    uncertain = read_predictions(case.files["valid"]).family is not None
    result: Dict[str, Any] = {"version": VERSION, "tests": {}, "calibrations": {}}
    for name, fit in CALIBRATIONS.items():
        calibration = None
        if fit is not None:
            method, frames = fit
            if not uncertain or frames not in case.files:
                continue
            calibration = calibrate(Sample.of(distinct(read_predictions(case.files[frames]))), [method])
            factors = {symbol: constant.value for symbol, constant in calibration.factor.items()}
            result["calibrations"][name] = {"factor": factors, "floor": calibration.floor.value}
        models = {
            label: load_models([path], [label], calibrations=[calibration])[0]
            for label, path in case.files.items()
            if label not in _NO_TESTS
        }
        for label, model in models.items():
            report = compare([model])["models"][0]
            figures = result["tests"].setdefault(label, {})[name] = dict(report["overall"])
            ends = (report["interval95"] or {}).get("overall", {}).get("coverage95", [None, None])
            figures |= {"coverage95_low": ends[0], "coverage95_high": ends[1]}
            first = next(iter(models.values()))
            if uncertain and model is not first:
                aurocs = compare([first], [model])["ood"]["frame_auroc"][0]
                by_leverage = aurocs.get("mean_leverage")
                figures["frame_auroc"] = aurocs.get("mean_epistemic_std") if by_leverage is None else by_leverage
    if uncertain:
        result["rotation"] = rotation(case)
    with replacing(kept) as unfinished:
        unfinished.write_text(json.dumps(result, indent=1) + "\n")
    return result


def _check_predictions(case: Case) -> None:
    missing = [path for path in case.files.values() if not path.exists()]
    if missing:
        raise InputError(
            f"{missing[0]}: is missing, and no scores of it have been kept: remove the folder {case.folder} "
            "and run the command again without --tables"
        )


def rotation(case: Case) -> Dict[str, float]:
    """What a rotation of every test frame changes, in predictions and in scores; all 0 where it should be.

    Returns
    -------
    dict
        ``covariance``: mean of ‖Σ(Rx) - RΣ(x)Rᵀ‖/‖Σ(x)‖ (Frobenius) over atoms; ``covariance_largest``; ``forces``:
        largest ‖F(Rx) - RF(x)‖ in eV/Å; ``spearman``, ``nll``, ``energy_score``: absolute change of the score.
    """
    label = next(name for name in case.files if name not in _NO_TESTS)
    # A frame and its copies are turned each in its own way.
    before, after = (load_models([case.files[name]], copies=True)[0] for name in (label, "rotated"))
    turns = data.rotations(len(before.predictions.sizes))[before.predictions.frame_of_atom]
    covariances = [_covariance(model) for model in (before, after)]
    turned = turns @ covariances[0] @ turns.swapaxes(1, 2)
    relative = np.linalg.norm(covariances[1] - turned, axis=(1, 2)) / np.linalg.norm(turned, axis=(1, 2))
    forces = np.einsum("nij,nj->ni", turns, before.predictions.forces) - after.predictions.forces
    scores = [summarise(model.scores) for model in (before, after)]
    ranking = "spearman_epistemic" if np.isfinite(scores[0]["spearman_epistemic"] or np.nan) else "spearman_total"
    result = {
        "covariance": float(relative.mean()),
        "covariance_largest": float(relative.max()),
        "forces": float(np.linalg.norm(forces, axis=1).max()),
    }
    for name, key in (("spearman", ranking), ("nll", "nll"), ("energy_score", "energy_score")):
        first, second = (_number(s[key]) for s in scores)
        result[name] = abs(second - first)
    return result


def _number(value: Optional[float]) -> float:
    return float("nan") if value is None else value


def _covariance(model: ScoredModel) -> np.ndarray:
    p = model.predictions
    assert p.family is not None
    return law_of(p.family, p.parameters).covariance()


def _newer(path: Path, sources: Sequence[Path]) -> bool:
    times = [source.stat().st_mtime for source in sources if source.exists()]
    return path.exists() and path.stat().st_mtime >= max(times, default=0.0)


def spread(values: List[Optional[float]]) -> Tuple[Optional[float], Optional[float]]:
    """Mean and sample standard deviation; both None where a value is missing, the second of one value."""
    numbers = [v for v in values if v is not None]
    if not numbers or len(numbers) < len(values):
        return None, None
    return float(np.mean(numbers)), float(np.std(numbers, ddof=1)) if len(numbers) > 1 else None
