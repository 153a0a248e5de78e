"""Compare predictions of several models on the same frames, and on frames out of distribution."""

from collections import Counter
from pathlib import Path
from typing import List, Optional, Sequence, Tuple, Union

from e2ip_plugins import __version__
from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.prediction_files import Predictions
from e2ip_plugins.report.same_frames import difference, read_same_frames
from e2ip_plugins.report.scored_model import ScoredModel, score
from e2ip_plugins.report.summary import ENERGY_UNITS, SUMMARY_UNITS, frame_auroc, summary
from e2ip_plugins.scores.calibration import Calibration
from e2ip_plugins.scores.metrics import CALIBRATION_LEVELS


def load_models(
    paths: Sequence[Union[str, Path]],
    labels: Optional[Sequence[str]] = None,
    ref_forces: Optional[str] = None,
    ref_energy: Optional[str] = None,
    calibrations: Sequence[Optional[Calibration]] = (),
    copies: bool = False,
) -> List[ScoredModel]:
    """Read files, make sure that they are for the same frames, and score every atom.

    With ``calibrations``, one or None for each file, the calibrated predictions are scored. With ``copies`` a frame
    counts as often as the file has it.

    Raises
    ------
    InputError
        A file cannot be read or lacks columns; frames differ in number, species or reference forces; a calibration is
        not for these predictions, or was fitted to some of these frames.
    """
    files = [Path(path) for path in paths]
    labels, calibrations = _labels(files, labels, calibrations), _one_each(files, calibrations)
    return list(map(score, labels, read_same_frames(files, ref_forces, ref_energy, copies=copies), calibrations))


def load_both_sets(
    paths: Sequence[Union[str, Path]],
    ood_paths: Sequence[Union[str, Path]],
    labels: Optional[Sequence[str]] = None,
    ref_forces: Optional[str] = None,
    ref_energy: Optional[str] = None,
    calibrations: Sequence[Optional[Calibration]] = (),
) -> Tuple[List[ScoredModel], List[ScoredModel]]:
    """Do as `load_models` in distribution and out of it: one file per model and set, models in the same order.

    Raises
    ------
    InputError
        As `load_models`, for either set, except that frames out of distribution need no references; not as many files
        out of distribution as models; both sets hold the same frames; a model's two files are of different predictive
        families or models.
    """
    files, ood_files = [Path(path) for path in paths], [Path(path) for path in ood_paths]
    labels, calibrations = _labels(files, labels, calibrations), _one_each(files, calibrations)
    if len(ood_files) != len(files):
        raise InputError(f"--ood: {len(ood_files)} files for {len(files)} models; give one for each, in the same order")
    inside = read_same_frames(files, ref_forces, ref_energy)
    outside = read_same_frames(ood_files, ref_forces, ref_energy, required=False)
    if inside[0].frames == outside[0].frames or difference(inside[0], outside[0]) is None:
        raise InputError(
            f"--ood {ood_files[0]}: holds the same frames as {files[0]}; give predictions for other frames, those out "
            "of distribution"
        )
    for label, a, b in zip(labels, inside, outside, strict=True):
        _check_one_model(label, a, b)
    return list(map(score, labels, inside, calibrations)), list(map(score, labels, outside, calibrations))


def _check_one_model(label: str, a: Predictions, b: Predictions) -> None:
    """Raise `InputError` for predictions, in and out of distribution, that cannot be of one model."""
    text = ""
    if a.family is not b.family:
        text = f"has {_uncertainties(b)}, but {a.path} has {_uncertainties(a)}"
    elif a.uq_model and b.uq_model and a.uq_model != b.uq_model:
        text = f"is of {b.uq_model}, but {a.path} of {a.uq_model}"
    if text:
        raise InputError(
            f"--ood {b.path}: {text}, and both are to be of model '{label}'; give the models' files in the same order"
        )


def _uncertainties(p: Predictions) -> str:
    return f"uncertainties of family '{p.family.uq_family}'" if p.family else "no uncertainties"


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
    """Return the labels, by default made of file names, and of folders and calibrations where these are equal."""
    if not paths:
        raise InputError("nothing to compare: give at least one extxyz file with predictions")
    if labels is None:
        labels = _default_labels(paths, calibrations)
    if len(labels) != len(paths):
        raise InputError(f"--labels: {len(labels)} labels for {len(paths)} files")
    for label, count in Counter(labels).items():
        if count > 1:
            raise InputError(f"--labels: '{label}' stands for {count} files; give each its own label")
    return list(labels)


def _default_labels(paths: List[Path], calibrations: Sequence[Optional[Calibration]]) -> List[str]:
    folders = [path.resolve().parent.name for path in paths]
    stems = [path.stem for path in paths]
    # NequIP names all its files alike, one run a folder.
    choices = (stems, folders, [f"{folder}/{stem}" for folder, stem in zip(folders, stems, strict=True)])
    # A file may be given twice, as it is and calibrated.
    files = len({path.resolve() for path in paths})
    labels = next((labels for labels in choices if len(set(labels)) >= files), choices[-1])
    if len(calibrations) == len(labels):
        pairs = list(zip(labels, calibrations, strict=True))
        labels = [label if c is None else f"{label} calibrated" for label, c in pairs]
        if len(set(labels)) < len(labels):  # one file with several calibrations
            labels = [label if c is None else f"{label}, {Path(c.path).stem}" for label, c in pairs]
    return labels


def compare(models: List[ScoredModel], ood: Sequence[ScoredModel] = ()) -> dict:
    """Return every figure of the report, over all atoms and per species, ready for JSON.

    Forces are in eV/Å and energies in eV; NLL and energy score also in kcal/mol/Å (``*_kcal``). What cannot be
    computed, such as the NLL of a deterministic model, is None. Coverages and calibration errors have 95 % intervals
    (``interval95``), and ``file_calibration`` names the calibration that had been applied when a file was written.
    Models with uncertainties of energies have ``energies``: figures of ``frames``, and of ``pairs`` of frames of one
    composition, all with 95 % intervals.

    With the same models' predictions out of distribution, in the same order, ``ood`` holds the same figures for these
    (``models``), and how well each model distinguishes the frames of both sets (``frame_auroc``).
    """
    result = {
        "e2ip_version": __version__,
        "units": SUMMARY_UNITS | (ENERGY_UNITS if any(model.energy_residuals for model in [*models, *ood]) else {}),
        "levels": CALIBRATION_LEVELS.tolist(),
        "models": [summary(model) for model in models],
    }
    if ood:
        result["ood"] = {
            "models": [summary(model) for model in ood],
            "frame_auroc": [frame_auroc(a, b) for a, b in zip(models, ood, strict=True)],
        }
    return result
