"""Predictions and references from extxyz files as the hosts' own tools write them.

=====================  =====================================  ==================================
                       NequIP (``TestTimeXYZFileWriter``)     MACE (``mace_eval_configs``)
=====================  =====================================  ==================================
predicted forces       ``forces``                             ``MACE_forces`` (any prefix)
reference forces       ``original_dataset_forces``            the data set's, e.g. ``REF_forces``
parameters             ``e2ip_log_sigma0``, …                 ``MACE_e2ip_log_sigma0``, …
leverage, if any       ``e2ip_leverage``                      ``MACE_e2ip_leverage``
=====================  =====================================  ==================================

Energies and leverage follow the prefix of the forces.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple, Type, Union

import numpy as np

from e2ip_plugins import families
from e2ip_plugins.errors import InputError
from e2ip_plugins.families.interface import Family
from e2ip_plugins.files import readable_frames
from e2ip_plugins.keys import (
    CALIBRATION_KEY,
    FAMILY_KEY,
    FORCE_VIEWS,
    LEVERAGE,
    MODEL_KEY,
    REFERENCE_PREFIX,
    UNFITTED,
)
from e2ip_plugins.predictions.fingerprints import fingerprint


@dataclass(frozen=True)
class Predictions:
    """F frames with N atoms in all.

    Attributes
    ----------
    path : Path
    sizes : (F,)
        Atoms per frame.
    species : (N,)
        Chemical symbols.
    positions : (N, 3)
        In Å.
    reference_forces, forces : (N, 3)
        In eV/Å; references may be NaN or Inf.
    reference_energy, energy : (F,)
        In eV; NaN where the file has none.
    family : subclass of Family, or None
        None for deterministic predictions.
    parameters : dict of str to array
        The family's parameters, by their unprefixed key.
    leverage : (N,) or None
        Dimensionless, at least 0, may be infinite; NaN for atoms without one. None where the file has no such column.
    frames : (F,) str
        `e2ip_plugins.predictions.fingerprints.fingerprint` of every frame.
    calibration : str or None
        Name of the calibration that has been applied to the file already.
    uq_model : str or None
        Name of the readout that predicted; None where the file has none.
    index : (F,) int
        Number of every frame in the file.
    repeats : tuple of str
        What `distinct` has to say of frames that were there more than once.
    """

    path: Path
    sizes: np.ndarray
    species: np.ndarray
    positions: np.ndarray
    reference_forces: np.ndarray
    forces: np.ndarray
    reference_energy: np.ndarray
    energy: np.ndarray
    family: Optional[Type[Family]]
    parameters: Dict[str, np.ndarray]
    leverage: Optional[np.ndarray] = None
    frames: Tuple[str, ...] = ()
    calibration: Optional[str] = None
    uq_model: Optional[str] = None
    index: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=int))
    repeats: Tuple[str, ...] = ()

    @property
    def labelled(self) -> bool:
        """Whether any atom has a finite reference force."""
        return bool(np.isfinite(self.reference_forces).all(-1).any())

    @property
    def frame_of_atom(self) -> np.ndarray:
        """Index of every atom's frame (N,)."""
        return np.repeat(np.arange(len(self.sizes)), self.sizes)


def read_predictions(
    path: Union[str, Path],
    ref_forces: Optional[str] = None,
    ref_energy: Optional[str] = None,
    required: bool = True,
) -> Predictions:
    """Read one file of predictions.

    Parameters
    ----------
    path
        extxyz file with predicted and reference forces.
    ref_forces, ref_energy
        Names of the reference columns; found by their usual prefixes when not given.
    required
        Whether a file without reference forces is an error; else they are NaN there, and the reference energy.

    Raises
    ------
    InputError
        File missing or unreadable; forces, references or parameters missing, ambiguous or invalid; leverage invalid.
    """
    path = Path(path)
    frames = _read_frames(path)
    # Isolated atoms, which come first in many files, have none.
    first = next((frame for frame in frames if _reference_name(path, frame, ref_forces, False)), frames[0])
    reference = _reference_name(path, first, ref_forces, required)
    prefix = _prediction_prefix(path, first, reference)
    family = _family(path, frames, prefix)

    if reference and ref_energy is not None and ref_energy not in first["info"]:
        numbers = [name for name, value in first["info"].items() if isinstance(value, float)]
        raise InputError(f"{path}: no energy named '{ref_energy}' (--ref-energy); there is: {_listed(numbers)}")
    parameters = {}
    for key in family.parameter_keys if family else ():
        values = _column(path, frames, prefix + key.name, key.shape)
        bad = ~(np.isfinite(values) & (values > key.above))
        _refuse(path, frames, bad, f"{prefix + key.name} is not finite or outside its range")
        parameters[key.name] = values
    forces = _column(path, frames, prefix + "forces", (3,))
    _refuse(path, frames, ~np.isfinite(forces), f"{prefix}forces is not finite")
    energy_name = ref_energy or reference[: -len("forces")] + "energy" if reference else None
    return Predictions(
        path=path,
        sizes=np.array([len(f["species"]) for f in frames]),
        species=np.concatenate([f["species"] for f in frames]),
        positions=np.concatenate([f["arrays"]["positions"] for f in frames]),
        reference_forces=_reference(path, frames, reference) if reference else np.full_like(forces, np.nan),
        forces=forces,
        reference_energy=_energies(path, frames, energy_name),
        energy=_energies(path, frames, prefix + "energy"),
        family=family,
        parameters=parameters,
        leverage=_leverage(path, frames, prefix + LEVERAGE.name),
        frames=tuple(f["fingerprint"] for f in frames),
        calibration=_said(path, frames, prefix, CALIBRATION_KEY),
        uq_model=_said(path, frames, prefix, MODEL_KEY),
        index=np.arange(len(frames)),
    )


def distinct(p: Predictions, strict: bool = True) -> Predictions:
    """Without further copies of a frame, which say nothing new; ``repeats`` says what was left out.

    Of copies with and without references those with them are kept.

    Raises
    ------
    InputError
        With ``strict``, for a structure that is there with other predictions or references, too; else ``repeats`` says
        so.
    """
    ends = np.cumsum(p.sizes)
    kept: Dict[str, List[int]] = {}
    others: List[Tuple[int, int, str]] = []
    lacking = np.bincount(p.frame_of_atom, np.isnan(p.reference_forces).sum(-1), len(ends))
    for i in np.argsort(lacking, kind="stable").tolist():
        known = kept.setdefault(p.frames[i], [])
        differences = [_difference(p, ends, j, i) for j in known]
        if all(differences):
            others += [(known[0], i, differences[0])] if known else []
            known.append(i)
    chosen = np.array(sorted(i for known in kept.values() for i in known), dtype=int)
    texts = []
    if others:
        first, second, what = others[0]
        (j, i), more = sorted(p.index[[first, second]]), f" ({len(others)} such frames)" if len(others) > 1 else ""
        text = f"frames {j} and {i} are the same structure with different {what}{more}: of two "
        text += (
            "models? (NequIP's xyz writer appends to a file that is already there)"
            if what == "predictions"
            else "methods?"
        )
        if strict:
            raise InputError(f"{p.path}: {text}")
        texts.append(text)
    copies = len(p.sizes) - len(chosen)
    if copies:
        texts.append(f"{copies} frame{'s are' if copies > 1 else ' is'} there more than once, and count once")
    atoms = np.isin(p.frame_of_atom, chosen)
    of_atoms = ("species", "positions", "reference_forces", "forces", "leverage")
    less: Dict[str, Any] = {name: getattr(p, name)[chosen] for name in ("sizes", "reference_energy", "energy", "index")}
    less |= {name: None if getattr(p, name) is None else getattr(p, name)[atoms] for name in of_atoms}
    less["parameters"] = {name: values[atoms] for name, values in p.parameters.items()}
    return replace(p, frames=tuple(p.frames[i] for i in chosen), repeats=tuple(texts), **less)


def _difference(p: Predictions, ends: np.ndarray, i: int, j: int) -> str:
    """What two frames of one structure differ in, predictions or reference forces where both have them; or nothing."""
    a, b = (slice(ends[k] - p.sizes[k], ends[k]) for k in (i, j))
    # One model gives no more than that in other batches, on other machines.
    tolerances: Dict[str, Any] = {"rtol": 1e-3, "atol": 1e-4, "equal_nan": True}
    if not all(np.allclose(values[a], values[b], **tolerances) for values in (p.forces, *p.parameters.values())):
        return "predictions"
    both = np.isfinite(p.reference_forces[a]) & np.isfinite(p.reference_forces[b])
    same = np.allclose(p.reference_forces[a][both], p.reference_forces[b][both], **tolerances)
    return "" if same else "reference forces"


def _read_frames(path: Path) -> List[dict]:
    """Columns and info of every frame; ASE's own calculator results are columns like any other."""
    if not path.exists():
        raise InputError(f"{path}: no such file")
    import ase.io

    try:
        atoms_list = ase.io.read(path, index=":", format="extxyz")
    # ASE's reader lets whatever goes wrong inside it through.
    except Exception as error:
        reason, number = " ".join(f"{type(error).__name__}: {error}".split()), readable_frames(path, "extxyz")
        raise InputError(f"{path}: frame {number} cannot be read as extxyz ({reason})") from error
    if not atoms_list:
        raise InputError(f"{path}: holds no frames")
    frames = []
    for atoms in atoms_list:
        results = atoms.calc.results if atoms.calc is not None else {}
        frames.append(
            {
                "species": np.array(atoms.get_chemical_symbols()),
                "arrays": {**atoms.arrays, **{k: v for k, v in results.items() if np.shape(v)[:1] == (len(atoms),)}},
                "info": {**atoms.info, **{k: v for k, v in results.items() if np.size(v) == 1}},
                "fingerprint": fingerprint(atoms),
            }
        )
    return frames


def _force_names(frame: dict) -> List[str]:
    return [n for n, v in frame["arrays"].items() if n.endswith("forces") and np.shape(v)[1:] == (3,)]


def _reference_name(path: Path, frame: dict, wanted: Optional[str], required: bool) -> Optional[str]:
    """Column of the reference forces; None where there is none and none is ``required``."""
    all_names = _force_names(frame)
    names = [n for n in all_names if not _has_uncertainties(frame, n[: -len("forces")])]
    if wanted in all_names and wanted not in names:
        raise InputError(f"{path}: '{wanted}' (--ref-forces) are the predictions; references are others")
    if wanted is not None and np.shape(frame["arrays"].get(wanted))[1:] == (3,):
        return wanted
    if wanted is not None and required:
        raise InputError(f"{path}: no forces named '{wanted}' (--ref-forces); there are: {_listed(names)}")
    found = [n for n in names if REFERENCE_PREFIX.match(n)] if wanted is None else []
    if not found and not required:
        return None
    if not found:
        raise InputError(
            f"{path}: no reference forces (REF_forces, dft_forces, original_dataset_forces …); there are: "
            f"{_listed(names)}. Name them with --ref-forces. NequIP's xyz writer keeps "
            "references with output_fields_from_original_dataset: [total_energy, forces]; mace_eval_configs keeps them "
            "unless they are called 'energy' and 'forces'"
        )
    if len(found) > 1:
        raise InputError(f"{path}: several columns may be the reference: {_listed(found)}; choose with --ref-forces")
    return found[0]


def _prediction_prefix(path: Path, frame: dict, reference: Optional[str]) -> str:
    """What stands before ``forces`` in the name of the predictions; uncertainties tell which they are."""
    names = [n for n in _force_names(frame) if n != reference]
    uncertain = [n for n in names if _uncertain(frame, n[: -len("forces")])]
    found = uncertain or names
    if len(found) != 1:
        problem = "no predicted forces" if not found else f"several columns may be the prediction: {_listed(found)}"
        raise InputError(f"{path}: {problem}" + (f" beside the reference '{reference}'" if reference else ""))
    return found[0][: -len("forces")]


def _uncertain(frame: dict, prefix: str) -> bool:
    """Whether forces of this prefix come with a family's name, parameters or views."""
    return prefix + FAMILY_KEY in frame["info"] or _has_uncertainties(frame, prefix)


def _has_uncertainties(frame: dict, prefix: str) -> bool:
    views = any(prefix + key.name in frame["arrays"] for key in FORCE_VIEWS)
    return views or _of_columns(frame, prefix) is not None


def _of_columns(frame: dict, prefix: str) -> Optional[Type[Family]]:
    return families.of_outputs(n[len(prefix) :] for n in frame["arrays"] if n.startswith(prefix))


def _family(path: Path, frames: List[dict], prefix: str) -> Optional[Type[Family]]:
    """Predictive family of a file: the one that it names, else the one whose parameters it holds."""
    frame, named = frames[0], _said(path, frames, prefix, FAMILY_KEY)
    family = families.of_file(named, str(path)) if named is not None else _of_columns(frame, prefix)
    if family is None and not _uncertain(frame, prefix):
        return None
    # Without name and parameters there is nothing to tell which family the views are of.
    possible = families.table().values() if family is None else [family]
    missing = {
        f.uq_family: [prefix + key.name for key in f.parameter_keys if prefix + key.name not in frame["arrays"]]
        for f in possible
    }
    if all(missing.values()):
        wanted = " or ".join(f"{_listed(columns)} ({name})" for name, columns in missing.items())
        raise InputError(
            f"{path}: has uncertainties, but not the columns {wanted} that scores are computed from; "
            "NequIP's xyz writer wants them in extra_fields"
        )
    return family


def _said(path: Path, frames: List[dict], prefix: str, key: str) -> Optional[str]:
    """What every frame says of its uncertainties; `InputError` where they differ."""
    names = [f["info"].get(prefix + key, f["info"].get(key)) for f in frames]
    for i, name in enumerate(names):
        if name != names[0]:
            raise InputError(
                f"{path}: {key} is '{names[0]}' in frame 0 and '{name}' in frame {i}; one file holds the predictions "
                "of one model, all calibrated alike (NequIP's xyz writer appends to a file that is already there)"
            )
    return None if names[0] is None else str(names[0])


def _column(path: Path, frames: List[dict], name: str, shape: tuple) -> np.ndarray:
    for i, frame in enumerate(frames):
        if np.shape(frame["arrays"].get(name)) != (len(frame["species"]), *shape):
            raise InputError(
                f"{path}: frame {i} has no column '{name}' of {int(np.prod(shape))} numbers per atom; leave such "
                "frames out"
            )
    return np.concatenate([f["arrays"][name] for f in frames]).astype(np.float64)


def _reference(path: Path, frames: List[dict], name: str) -> np.ndarray:
    """Reference forces, NaN in frames that have none."""
    given = [
        f if name in f["arrays"] else {**f, "arrays": {name: np.full((len(f["species"]), 3), np.nan)}} for f in frames
    ]
    return _column(path, given, name, (3,))


def _leverage(path: Path, frames: List[dict], name: str) -> Optional[np.ndarray]:
    if not any(name in f["arrays"] for f in frames):
        return None
    values = _column(path, frames, name, LEVERAGE.shape)
    values[values == UNFITTED] = np.nan
    _refuse(path, frames, values < 0.0, f"{name} is negative")
    return values


def _energies(path: Path, frames: List[dict], name: Optional[str]) -> np.ndarray:
    values = np.full(len(frames), np.nan)
    for i, frame in enumerate(frames):
        if name in frame["info"]:
            try:
                values[i] = np.asarray(frame["info"][name], dtype=np.float64).item()
            except ValueError as error:
                raise InputError(f"{path}: '{name}' of frame {i} is not a number") from error
    return values


def _refuse(path: Path, frames: List[dict], bad: np.ndarray, problem: str) -> None:
    atoms = bad.reshape(len(bad), -1).any(-1)
    if atoms.any():
        ends = np.cumsum([len(f["species"]) for f in frames])
        first = int(np.argmax(atoms))
        frame = int(np.searchsorted(ends, first, side="right"))
        raise InputError(f"{path}: {problem} for {int(atoms.sum())} atoms, first in frame {frame}")


def _listed(names) -> str:
    return ", ".join(names) or "none"
