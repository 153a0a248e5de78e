"""Compare predictions of several models on the same frames, and on frames out of distribution: read, check, score."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple, Union

import numpy as np

from e2ip_plugins import __version__
from e2ip_plugins.errors import InputError
from e2ip_plugins.families.laws import law_of
from e2ip_plugins.keys import KCAL_PER_MOL
from e2ip_plugins.predictions.prediction_files import Predictions, distinct, read_predictions
from e2ip_plugins.scores import references
from e2ip_plugins.scores.bootstrap import CoverageBand, coverage_band
from e2ip_plugins.scores.calibration import Calibration
from e2ip_plugins.scores.metrics import (
    CALIBRATION_LEVELS,
    COVERAGE_LEVELS,
    AtomScores,
    auroc,
    frame_scores,
    observed_coverage,
    score_atoms,
    summarise,
)

#: References may differ by what eight decimals and a passage through float32 do to them.
REFERENCE_ATOL = 1e-5
REFERENCE_RTOL = 1e-6


@dataclass(frozen=True)
class Model:
    """One file's predictions with their scores.

    Attributes
    ----------
    label : str
    predictions : Predictions
    kept : (N,)
        False for atoms whose reference force is not finite; scores leave them out. All True where no atom has one.
    scores : AtomScores
        Of the kept atoms; without references, those that need none.
    species : (kept atoms,)
    energy_error : (frames with both energies,)
        (Reference - predicted energy) / number of atoms, in eV.
    calibration : Calibration or None
        What ``predictions`` and ``scores`` have been calibrated with.
    """

    label: str
    predictions: Predictions
    kept: np.ndarray
    scores: AtomScores
    species: np.ndarray
    energy_error: np.ndarray
    calibration: Optional[Calibration] = None

    @property
    def masked(self) -> int:
        """Number of atoms without a finite reference force."""
        return int(np.count_nonzero(~self.kept))

    @property
    def frame(self) -> np.ndarray:
        """Configuration of every kept atom."""
        return self.predictions.frame_of_atom[self.kept]

    @cached_property
    def band(self) -> Optional[CoverageBand]:
        """How sure the coverages over all atoms are; None without a distribution or with one configuration."""
        return coverage_band(self.scores["pit"], self.frame) if "pit" in self.scores else None

    @property
    def left_out(self) -> List[str]:
        """What the scores leave out, and doubts, for the user."""
        p = self.predictions
        texts = list(p.repeats)
        texts += filter(None, [references.doubt(p.reference_forces[self.kept], p.forces[self.kept])] * p.labelled)
        if "error" not in self.scores:
            texts.append("no reference forces: nothing but leverage, standard deviations and the AUROC of frames")
        if "error" in self.scores and (zero := references.vanishing(p.forces[self.kept], self.scores["error"])).any():
            texts.append(
                f"{np.count_nonzero(zero)} atoms whose force vanishes by symmetry (isolated atoms, perfect crystals) "
                "are counted, with an error of 0; e2ip fit and calibrate leave them out"
            )
        if self.masked:
            texts.append(f"{self.masked} atoms without finite reference forces left out")
        singular = np.count_nonzero(self.scores.get("singular", ()))
        if singular:
            texts.append(
                f"covariances of {singular} atoms have no full rank, as those of ensembles of two or three: their NLL "
                "and coverages mean nothing; e2ip ensemble --isotropic, or a calibration with method floor, mends that"
            )
        missing = np.count_nonzero(~np.isfinite(self.predictions.reference_energy))
        if 0 < missing < len(self.predictions.sizes):
            texts.append(f"{missing} frames without a finite reference energy left out of the energy MAE")
        leverage = self.scores.get("leverage", np.empty(0))
        # A model that was never fitted to its training set has none for every atom.
        if not np.isfinite(leverage).all() and not np.isnan(leverage).all():
            texts.append(
                f"{np.count_nonzero(~np.isfinite(leverage))} atoms with NaN or Inf leverage left out of its mean"
            )
        return texts


def load_models(
    paths: Sequence[Union[str, Path]],
    labels: Optional[Sequence[str]] = None,
    ref_forces: Optional[str] = None,
    ref_energy: Optional[str] = None,
    calibrations: Sequence[Optional[Calibration]] = (),
    copies: bool = False,
) -> List[Model]:
    """Read files, make sure that they are about the same frames, and score every atom.

    With ``calibrations``, one or None for each file, scores are those of the calibrated predictions. With ``copies``
    a frame counts as often as it is there.

    Raises
    ------
    InputError
        A file cannot be read or lacks columns; frames differ in number, species or reference forces; a calibration is
        not for these predictions, or was fitted to some of these frames.
    """
    files = [Path(p) for p in paths]
    labels, calibrations = _labels(files, labels, calibrations), _one_each(files, calibrations)
    predictions = read_same_frames(files, ref_forces, ref_energy, copies=copies)
    return [_score(label, p, c) for label, p, c in zip(labels, predictions, calibrations, strict=True)]


def load_both_sets(
    paths: Sequence[Union[str, Path]],
    ood_paths: Sequence[Union[str, Path]],
    labels: Optional[Sequence[str]] = None,
    ref_forces: Optional[str] = None,
    ref_energy: Optional[str] = None,
    calibrations: Sequence[Optional[Calibration]] = (),
) -> Tuple[List[Model], List[Model]]:
    """`load_models` in distribution and out of it: one file per model and set, models in the same order.

    Raises
    ------
    InputError
        As `load_models`, for either set, but that frames out of distribution need no references; not as many files out
        of distribution as models; both sets hold the same frames; a model's two files are of different predictive
        families or models.
    """
    files, ood_files = [Path(p) for p in paths], [Path(p) for p in ood_paths]
    labels, calibrations = _labels(files, labels, calibrations), _one_each(files, calibrations)
    if len(ood_files) != len(files):
        raise InputError(f"--ood: {len(ood_files)} files for {len(files)} models; give one for each, in the same order")
    inside = read_same_frames(files, ref_forces, ref_energy)
    outside = read_same_frames(ood_files, ref_forces, ref_energy, required=False)
    if inside[0].frames == outside[0].frames or _difference(inside[0], outside[0]) is None:
        raise InputError(
            f"--ood {ood_files[0]}: holds the same frames as {files[0]}; give predictions for other frames, those out "
            "of distribution"
        )
    for label, a, b in zip(labels, inside, outside, strict=True):
        if a.family is not b.family:
            raise InputError(
                f"--ood {b.path}: has {_kind(b)}, but {a.path} has {_kind(a)}, and both are to be of model '{label}'; "
                "give the models' files in the same order"
            )
        if a.uq_model and b.uq_model and a.uq_model != b.uq_model:
            raise InputError(
                f"--ood {b.path}: is of {b.uq_model}, but {a.path} of {a.uq_model}, and both are to be of model "
                f"'{label}'; give the models' files in the same order"
            )
    return (
        [_score(label, p, c) for label, p, c in zip(labels, inside, calibrations, strict=True)],
        [_score(label, p, c) for label, p, c in zip(labels, outside, calibrations, strict=True)],
    )


def read_same_frames(
    files: Sequence[Path],
    ref_forces: Optional[str] = None,
    ref_energy: Optional[str] = None,
    required: bool = True,
    copies: bool = False,
) -> List[Predictions]:
    """Predictions of several models; `InputError` unless they are for the same frames in the same order.

    With ``required`` every file needs a reference force; without ``copies`` a frame counts once.
    """
    # Given twice, it is as it is and calibrated.
    read = {p: read_predictions(p, ref_forces, ref_energy, required) for p in files}
    if not copies:
        read = {p: distinct(found, strict=False) for p, found in read.items()}
    predictions = [read[p] for p in files]
    for p in predictions:
        if required and not p.labelled:
            raise InputError(f"{p.path}: no atom has a finite reference force")
    for other in predictions[1:]:
        problem = _difference(predictions[0], other)
        if problem:
            raise InputError(problem)
    return predictions


def _kind(p: Predictions) -> str:
    return f"uncertainties of family '{p.family.uq_family}'" if p.family else "no uncertainties"


def _difference(a: Predictions, b: Predictions) -> Optional[str]:
    """Where two files differ in number of frames, species or reference forces, for the user; None: nowhere.

    Without references it is positions that must agree, apart from where the origin is.
    """
    if len(a.sizes) != len(b.sizes):
        return (
            f"{b.path}: has {len(b.sizes)} frames, but {a.path} has {len(a.sizes)}; compare predictions for the same "
            "frames (NequIP's xyz writer appends to a file that is already there)"
        )
    if a.labelled != b.labelled:
        with_them, without = (a, b) if a.labelled else (b, a)
        return f"{without.path}: has no reference forces, but {with_them.path} has; give both with them, or neither"
    ends = np.cumsum(a.sizes)
    for i, (size, other_size) in enumerate(zip(a.sizes, b.sizes, strict=True)):
        atoms = slice(ends[i] - size, ends[i])
        if size != other_size or (a.species[atoms] != b.species[atoms]).any():
            return f"{b.path}: the species of frame {b.index[i]} differ from those in {a.path}"
        x, y = (p.reference_forces[atoms] if p.labelled else _from_centre(p.positions[atoms]) for p in (a, b))
        if not np.allclose(x, y, rtol=REFERENCE_RTOL, atol=REFERENCE_ATOL, equal_nan=True):
            what = "reference forces" if a.labelled else "positions"
            return (
                f"{b.path}: the {what} of frame {b.index[i]} differ from those in {a.path}; compare predictions for "
                "the same frames in the same order"
            )
    return None


def _from_centre(positions: np.ndarray) -> np.ndarray:
    return positions - positions.mean(0)


def _one_each(files: List[Path], calibrations: Sequence[Optional[Calibration]]) -> List[Optional[Calibration]]:
    if calibrations and len(calibrations) != len(files):
        raise InputError(
            f"--calibration: {len(calibrations)} for {len(files)} models; give one for each, in the same order, or "
            "none for a model that is to stay as it is"
        )
    return list(calibrations) or [None] * len(files)


def _labels(
    paths: List[Path], labels: Optional[Sequence[str]], calibrations: Sequence[Optional[Calibration]]
) -> List[str]:
    if not paths:
        raise InputError("nothing to compare: give at least one extxyz file with predictions")
    if labels is None:
        # A file may be given twice, as it is and calibrated.
        different = len({p.resolve() for p in paths})
        labels = [p.stem for p in paths]
        if len(set(labels)) < different:
            # NequIP names all its files alike, one run a folder.
            labels = [p.resolve().parent.name for p in paths]
        if len(set(labels)) < different:
            labels = [f"{p.resolve().parent.name}/{p.stem}" for p in paths]
        if len(calibrations) == len(labels):
            pairs = list(zip(labels, calibrations, strict=True))
            labels = [label if c is None else f"{label} calibrated" for label, c in pairs]
            if len(set(labels)) < len(labels):  # one file with several calibrations
                labels = [label if c is None else f"{label}, {Path(c.path).stem}" for label, c in pairs]
    if len(labels) != len(paths):
        raise InputError(f"--labels: {len(labels)} labels for {len(paths)} files")
    for label, count in Counter(labels).items():
        if count > 1:
            raise InputError(f"--labels: '{label}' stands for {count} files; give each its own label")
    return list(labels)


def _score(label: str, p: Predictions, calibration: Optional[Calibration]) -> Model:
    if calibration is not None:
        p = _calibrated(p, calibration)
    kept, error = np.ones(len(p.species), dtype=bool), None
    if p.labelled:
        kept = np.isfinite(p.reference_forces).all(-1)
        error = (p.reference_forces - p.forces)[kept]
    law = law_of(p.family, {name: values[kept] for name, values in p.parameters.items()}) if p.family else None
    energy_error = (p.reference_energy - p.energy) / p.sizes
    return Model(
        label=label,
        predictions=p,
        kept=kept,
        scores=score_atoms(error, law, None if p.leverage is None else p.leverage[kept]),
        species=p.species[kept],
        energy_error=energy_error[np.isfinite(energy_error)],
        calibration=calibration,
    )


def _calibrated(p: Predictions, calibration: Calibration) -> Predictions:
    if p.calibration is not None:
        raise InputError(f"{p.path}: was calibrated already, with {p.calibration}; give the predictions without that")
    calibration.check(p.family, p.species, str(p.path), p.uq_model)
    calibration.check_frames(p.frames, str(p.path))
    assert p.family is not None
    return replace(p, parameters=calibration.apply_numpy(p.family, p.parameters, p.species))


def compare(models: List[Model], ood: Sequence[Model] = ()) -> dict:
    """Every figure of the report, over all atoms and per species, ready for JSON.

    Forces in eV/Å and energies in eV; NLL and energy score in kcal/mol/Å as well (``*_kcal``). What
    cannot be computed, such as the NLL of a deterministic model, is None. Coverages and calibration errors have 95 %
    intervals (``interval95``), and ``file_calibration`` names what a file was calibrated with when it was written.

    With the same models' predictions out of distribution, in the same order, ``ood`` holds the same figures of those
    (``models``) and how well each model tells the frames of both sets apart (``frame_auroc``).
    """
    result = {
        "e2ip_version": __version__,
        "units": {
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
        },
        "levels": CALIBRATION_LEVELS.tolist(),
        "models": [_report(m) for m in models],
    }
    if ood:
        result["ood"] = {
            "models": [_report(m) for m in ood],
            "frame_auroc": [_frame_auroc(a, b) for a, b in zip(models, ood, strict=True)],
        }
    return result


def _frame_auroc(inside: Model, outside: Model) -> Dict[str, Optional[float]]:
    """By every score of a frame: probability that a frame out of distribution has a larger one than one in it."""
    a, b = _frame_scores(inside.predictions), _frame_scores(outside.predictions)
    return {"label": inside.label} | _finite({name: auroc(b[name], a[name]) for name in a})


def _frame_scores(p: Predictions) -> Dict[str, np.ndarray]:
    # Of all atoms: no reference is needed to tell frames apart.
    epistemic = law_of(p.family, p.parameters).epistemic_std() if p.family else None
    # Families without such a part rank nothing by it.
    return frame_scores(p.sizes, p.leverage, epistemic if epistemic is not None and epistemic.any() else None)


def _report(model: Model) -> dict:
    overall = {"atoms": len(model.species)} | _with_kcal(summarise(model.scores))
    overall["energy_mae"] = float(np.abs(model.energy_error).mean()) if len(model.energy_error) else None
    pit = model.scores.get("pit")
    return {
        "label": model.label,
        "file": str(model.predictions.path),
        "uq_family": model.predictions.family.uq_family if model.predictions.family else None,
        "frames": len(model.predictions.sizes),
        "masked_atoms": model.masked,
        "left_out": model.left_out,
        "overall": _finite(overall),
        "species": {str(symbol): _of_species(model, symbol) for symbol in np.unique(model.species)},
        "observed_coverage": None if pit is None else observed_coverage(pit).tolist(),
        "interval95": _intervals(model),
        "file_calibration": model.predictions.calibration,
        "calibration": None if model.calibration is None else _of_calibration(model, model.calibration),
    }


def _intervals(model: Model) -> Optional[dict]:
    """95 % intervals by a bootstrap of whole configurations: of the curve of observed coverage and of its figures."""
    if model.band is None:
        return None
    species = {}
    for symbol in np.unique(model.species):
        chosen = model.species == symbol
        species[str(symbol)] = _of_band(coverage_band(model.scores["pit"][chosen], model.frame[chosen]))
    return {
        "overall": _of_band(model.band),
        "species": species,
        "observed_coverage": {"low": model.band.low.tolist(), "high": model.band.high.tolist()},
    }


def _of_band(band: Optional[CoverageBand]) -> Optional[dict]:
    if band is None:
        return None
    coverages = {f"coverage{round(100 * level)}": list(band.coverage(level)) for level in COVERAGE_LEVELS}
    return {"calibration_error": list(band.calibration_error), **coverages}


def _of_calibration(model: Model, calibration: Calibration) -> dict:
    """What was applied, and what share of the atoms of a configuration conformal regions hold, on average over those.

    The regions' guarantee is for configurations that count alike, whatever their size.
    """
    conformal = {}
    if "z_scores" in model.scores:
        distance = np.linalg.norm(model.scores["z_scores"], axis=-1)
        _, frame = np.unique(model.frame, return_inverse=True)
        atoms = np.bincount(frame)
        conformal = {
            f"{level:g}": {
                "radius": radius,
                "coverage": float(np.mean(np.bincount(frame, distance <= radius) / atoms)),
            }
            for level, radius in calibration.radii.items()
            if np.isfinite(radius)
        }
    return {
        "file": calibration.path,
        "methods": list(calibration.methods),
        "factor": {symbol: constant.value for symbol, constant in calibration.factor.items()},
        "floor": calibration.floor.value,
        "conformal": conformal,
    }


def _of_species(model: Model, symbol: str) -> dict:
    chosen = model.species == symbol
    scores = {name: values[chosen] for name, values in model.scores.items()}
    return _finite({"atoms": int(chosen.sum())} | _with_kcal(summarise(scores)))


def _with_kcal(summary: dict) -> dict:
    """A density in (kcal/mol/Å)⁻³ is KCAL³ times the one in (eV/Å)⁻³: the NLL loses 3 ln KCAL."""
    nll = summary["nll"]
    summary["nll_kcal"] = None if nll is None else nll - 3.0 * float(np.log(KCAL_PER_MOL))
    for name in ("energy_score", "energy_score_error"):
        summary[f"{name}_kcal"] = None if summary[name] is None else summary[name] / KCAL_PER_MOL
    return summary


def _finite(summary: dict) -> dict:
    # JSON has neither NaN nor infinity, and an undefined figure is an empty cell like a missing one.
    return {k: None if v is None or not np.isfinite(v) else v for k, v in summary.items()}
