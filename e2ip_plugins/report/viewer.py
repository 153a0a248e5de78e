"""One HTML page of predictions: structures with covariance ellipsoids, and the scatter of errors linked to them.

The page is made with chemiscope, whose script it contains. It needs no network, and forbids itself to use one.
"""

import html
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple, Union

import numpy as np
from ase import Atoms

from e2ip_plugins import __version__
from e2ip_plugins.errors import InputError
from e2ip_plugins.families.laws import law_of
from e2ip_plugins.files import replacing
from e2ip_plugins.predictions.prediction_files import Predictions, read_predictions
from e2ip_plugins.predictions.trajectories import read_all
from e2ip_plugins.report.scored_model import calibrated
from e2ip_plugins.scores.calibration import Calibration
from e2ip_plugins.scores.frame_maxima import principal_std

#: Frames that a page shows unless the user chooses others, evenly spaced through the file.
DEFAULT_FRAMES = 100

#: Atoms that a page may hold: 15 MB of data, which browsers open in some seconds.
MOST_ATOMS = 30_000

#: Half axis in Å of the median ellipsoid, and the longest that is drawn.
MEDIAN_AXIS, LONGEST_AXIS = 0.5, 2.0

#: Names of the properties on the page.
DEVIATION, EPISTEMIC, ERROR, LEVERAGE = "force deviation", "epistemic deviation", "force error", "leverage"

#: Palette, and the share of it that is used: from dark blue to orange. Yellow cannot be seen on a white page.
PALETTE, USED = "plasma", 0.8

#: What the page may colour atoms by.
COLOURS = {"deviation": DEVIATION, "epistemic": EPISTEMIC, "error": ERROR, "leverage": LEVERAGE}


class Shown(NamedTuple):
    """Frames of a page.

    Attributes
    ----------
    predictions : Predictions
    frames : list of ase.Atoms
        The structures, in the order of ``predictions``.
    values, covariance
        What `atom_values` returns of them.
    scale : float
        Å of an ellipsoid's half axis for 1 eV/Å.
    """

    predictions: Predictions
    frames: List[Atoms]
    values: Dict[str, np.ndarray]
    covariance: np.ndarray
    scale: float


def write_page(
    path: Union[str, Path],
    output: Union[str, Path],
    frames: Optional[str] = None,
    colour: str = "deviation",
    scale: Optional[float] = None,
    calibration: Optional[Calibration] = None,
    ref_forces: Optional[str] = None,
) -> str:
    """Write a page of the predictions in a file, and return in words what it shows.

    Parameters
    ----------
    path
        extxyz file with predictions, as `e2ip_plugins.predictions.prediction_files.read_predictions` takes them.
    output
        The HTML page; an existing one is replaced.
    frames
        Number of a frame or slice of the file, such as ``::10``; 100 frames evenly spaced by default.
    colour
        ``deviation``, ``epistemic``, ``error`` or ``leverage``: what atoms and ellipsoids are coloured by.
    scale
        Å of an ellipsoid's half axis for a standard deviation of 1 eV/Å; by default the median half axis is 0.5 Å.
    calibration
        Applied to the covariances first.
    ref_forces
        Column of the reference forces; recognised by its name when it is not given.

    Raises
    ------
    InputError
        chemiscope is not installed; the file cannot be read, or has no uncertainties; no such frame; too many atoms;
        a colour that the file has no values for.
    """
    chemiscope, script = load_chemiscope()
    predictions = read_predictions(path, ref_forces, required=False)
    if predictions.family is None:
        raise InputError(f"{path}: has no uncertainties to show; e2ip evaluate predicts them with a fitted model")
    if calibration is not None:
        predictions = calibrated(predictions, calibration)
    chosen = predictions.only(choose_frames(predictions, frames))
    every = read_all(Path(path), "extxyz")
    values, covariance = atom_values(chosen)
    if COLOURS[colour] not in values:
        missing = {"error": "reference forces", "leverage": "leverage"}[colour]
        raise InputError(f"--colour {colour}: {path} has no {missing}; take --colour deviation")
    scale = _scale(covariance) if scale is None else scale
    shown = Shown(chosen, [every[i] for i in chosen.index], values, covariance, scale)
    words = _in_words(shown, len(predictions.sizes))
    dataset = _dataset(chemiscope, shown, COLOURS[colour], words)
    with replacing(output) as unfinished:
        unfinished.write_text(_page(Path(path).name, words, dataset, script, chemiscope.__version__), encoding="utf-8")
    return words


def load_chemiscope() -> Tuple[Any, str]:
    """Return chemiscope and its script for browsers; `InputError` where it is not installed."""
    way = "install it into this environment: pip install 'e2ip-plugins[view]'"
    try:
        import chemiscope
    except ModuleNotFoundError as error:
        raise InputError(f"e2ip view needs chemiscope, which is not installed ({error}); {way}") from error
    # Its own headless browser takes the script from the same place.
    script = resources.files(chemiscope) / "sphinx" / "static" / "chemiscope.min.js"
    if not script.is_file():
        raise InputError(f"chemiscope {chemiscope.__version__} comes without its script for browsers; {way}")
    return chemiscope, script.read_text(encoding="utf-8")


def choose_frames(predictions: Predictions, frames: Optional[str] = None) -> np.ndarray:
    """Return which of the frames a page shows, given the option ``--frames``; `InputError` for none or too many.

    Frames count as in the file that was read, except for those of weight 0.
    """
    count = len(predictions.sizes)
    if frames is None:
        chosen = np.unique(np.linspace(0, count - 1, min(count, DEFAULT_FRAMES)).round().astype(int))
    else:
        chosen = _sliced(frames, count)
    if not len(chosen):
        raise InputError(f"--frames {frames}: none of the {count} frames of {predictions.path}")
    atoms = int(predictions.sizes[chosen].sum())
    if atoms > MOST_ATOMS:
        raise InputError(
            f"{predictions.path}: {len(chosen)} frames have {atoms} atoms, and a page holds {MOST_ATOMS}; choose fewer "
            f"frames, such as --frames ::{-(-count * atoms // (len(chosen) * MOST_ATOMS))}"
        )
    return chosen


def _sliced(frames: str, count: int) -> np.ndarray:
    parts = frames.split(":")
    if not re.fullmatch(r"-?\d+|(-?\d*:){1,2}-?\d*", frames) or parts[2:] == ["0"]:
        raise InputError(f"--frames {frames}: give the number of a frame or a slice, such as 0, :50 or ::10")
    if len(parts) > 1:
        return np.sort(np.arange(count)[slice(*(int(part) if part else None for part in parts))])
    number = int(frames)
    return np.arange(count)[number:][:1] if -count <= number < count else np.empty(0, dtype=int)


def atom_values(p: Predictions) -> Tuple[Dict[str, np.ndarray], np.ndarray]:
    """Return what the page knows of every atom, by its name there, and the covariances (N, 3, 3) in eV²/Å².

    Deviations and errors are those of a component in eV/Å, (tr Σ / 3)^½ and ‖error‖/√3, so that they are alike where
    the covariance is calibrated. Errors are NaN for atoms without a reference.
    """
    assert p.family is not None
    law = law_of(p.family, p.parameters)
    values = {DEVIATION: law.total_std(), EPISTEMIC: law.epistemic_std()}
    if p.labelled:
        error = np.linalg.norm(p.reference_forces - p.forces, axis=-1) / np.sqrt(3.0)
        values[ERROR] = np.where(np.isfinite(error), error, np.nan)
    if p.leverage is not None and not np.isnan(p.leverage).all():
        # Browsers cannot draw infinity.
        values[LEVERAGE] = np.where(np.isposinf(p.leverage), np.nan, p.leverage)
    return values, law.covariance()


def ellipsoid(covariance: np.ndarray, scale: float) -> Dict[str, List[float]]:
    """Return half axes in Å and orientation (x, y, z, w) of the ellipsoid of one standard deviation.

    Parameters
    ----------
    covariance : (3, 3)
        In eV²/Å².
    scale : float
        Å for 1 eV/Å. Ellipsoids with a half axis of more than `LONGEST_AXIS` are shrunk to it as a whole.

    Examples
    --------
    >>> ellipsoid(np.diag([0.01, 0.04, 0.09]), 2.0)["semiaxes"]
    [0.2, 0.4, 0.6]
    """
    from scipy.spatial.transform import Rotation

    variances, axes = np.linalg.eigh(covariance)
    half_axes = scale * np.sqrt(variances.clip(min=0.0))
    half_axes *= min(1.0, LONGEST_AXIS / max(half_axes[-1], 1e-12))
    # An axis may point either way; those of a rotation are right-handed.
    axes[:, 0] *= np.sign(np.linalg.det(axes))
    # chemiscope refuses orientations that are rounded.
    orientation = Rotation.from_matrix(axes).as_quat()
    return {"semiaxes": half_axes.round(4).tolist(), "orientation": orientation.tolist()}


def _scale(covariance: np.ndarray) -> float:
    """Return the Å for 1 eV/Å at which the median half axis is `MEDIAN_AXIS`, with two digits."""
    median = float(np.nanmedian(principal_std(covariance)))
    return float(f"{MEDIAN_AXIS / max(median, 1e-6):.2g}")


def _in_words(shown: Shown, total: int) -> str:
    frames, atoms = len(shown.frames), int(shown.predictions.sizes.sum())
    return (
        f"{frames} of {total} frames, {atoms} atoms; ellipsoids: one standard deviation, 1 eV/Å is {shown.scale:g} Å; "
        f"half axes over {LONGEST_AXIS:g} Å are drawn shorter"
        + ("; dashed line: error = deviation" if shown.predictions.labelled else "; no errors, for want of references")
    )


def _dataset(chemiscope: Any, shown: Shown, colour: str, words: str) -> Dict[str, Any]:
    """Return what chemiscope draws, ready for JSON."""
    p, values = shown.predictions, shown.values
    properties: Dict[str, Dict[str, Any]] = {}
    for name, numbers in values.items():
        unit = {} if name == LEVERAGE else {"units": "eV/Å"}
        properties[name] = {"target": "atom", "values": np.round(numbers, 6), **unit}
    properties["element"] = {"target": "atom", "values": p.species}
    properties["frame of the file"] = {"target": "structure", "values": p.index.astype(float)}
    shapes = {"covariance": _shape("ellipsoid", [ellipsoid(matrix, shown.scale) for matrix in shown.covariance])}
    if ERROR in values:
        shapes["error"] = _shape("arrow", _arrows(p, shown.scale))
    structures = [Atoms(a.numbers, a.positions, cell=a.cell, pbc=a.pbc) for a in shown.frames]
    return chemiscope.create_input(
        structures,
        properties=properties,
        environments=chemiscope.all_atomic_environments(structures, cutoff=4.0),
        shapes=shapes,
        settings=_settings(values, colour, any(a.pbc.any() for a in structures)),
        metadata={"name": p.path.name, "description": words},
    )


def _shape(kind: str, of_atoms: List[Dict[str, Any]]) -> Dict[str, Any]:
    return {"kind": kind, "parameters": {"global": {}, "atom": of_atoms}}


def _arrows(p: Predictions, scale: float) -> List[Dict[str, Any]]:
    """Return arrows of the errors, reference - prediction, on the scale of the ellipsoids."""
    error = np.nan_to_num(scale * (p.reference_forces - p.forces), nan=0.0, posinf=0.0, neginf=0.0)
    length = np.linalg.norm(error, axis=-1, keepdims=True)
    error *= np.minimum(1.0, 2.0 * LONGEST_AXIS / length.clip(min=1e-12))
    size = {"baseRadius": 0.06, "headRadius": 0.12, "headLength": 0.2, "color": "#202020"}
    return [{"vector": vector.round(4).tolist(), **size} for vector in error]


def _settings(values: Dict[str, np.ndarray], colour: str, periodic: bool) -> Dict[str, Any]:
    """Return chemiscope's settings: error over deviation with logarithmic axes, atoms coloured by ``colour``."""
    other = next(name for name in (ERROR, LEVERAGE, EPISTEMIC) if name in values)
    numbers = values[colour]
    low, high = float(np.nanmin(numbers)), float(np.nanquantile(numbers, 0.99))
    palette = {"palette": PALETTE, "min": low, "max": low + (high - low) / USED}
    return {
        "target": "atom",
        "map": {
            "x": {"property": DEVIATION, "scale": "log"},
            "y": {"property": other, "scale": "log"},
            "color": {"property": colour, **palette},
            "size": {"factor": 25},
        },
        "structure": [
            {
                "color": {"property": colour, **palette},
                "shape": "covariance",
                "environments": {"activated": False},
                "unitCell": periodic,
                "keepOrientation": True,
            }
        ],
    }


def _page(title: str, words: str, dataset: Dict[str, Any], script: str, chemiscope_version: str) -> str:
    """Return the text of the page; chemiscope's script and the data are parts of it."""
    template = (resources.files("e2ip_plugins.report") / "viewer.html").read_text(encoding="utf-8")
    # JSON has no NaN, which the page puts back.
    for of_atoms in dataset["properties"].values():
        of_atoms["values"] = ["NaN" if value != value else value for value in of_atoms["values"]]
    # A slash after `<` would end the script of the page.
    data = json.dumps(dataset, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
    texts = {"title": html.escape(title), "words": html.escape(words), "data": data, "script": script}
    texts |= {"version": __version__, "chemiscope": chemiscope_version, "deviation": DEVIATION, "error": ERROR}
    return re.sub(r"\{\{(\w+)\}\}", lambda match: texts[match[1]], template)
