"""Predictions and references from extxyz files, as MACE's and NequIP's own tools write them.

=====================  =====================================  ==================================
                       NequIP (``TestTimeXYZFileWriter``)     MACE (``mace_eval_configs``)
=====================  =====================================  ==================================
predicted forces       ``forces``                             ``MACE_forces`` (any prefix)
reference forces       ``original_dataset_forces``            the data set's, e.g. ``REF_forces``
parameters             ``e2ip_log_sigma0``, …                 ``MACE_e2ip_log_sigma0``, …
leverage, if any       ``e2ip_leverage``                      ``MACE_e2ip_leverage``
energy's, if any       ``energy_uncertainty``, …              ``MACE_energy_uncertainty``, …
=====================  =====================================  ==================================

The names of energies, their uncertainties and the leverage have the prefix of the predicted forces.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Tuple, Type, Union

import numpy as np
from ase import Atoms

from e2ip_plugins import families, keys
from e2ip_plugins.errors import InputError, plural
from e2ip_plugins.families.interface import Family
from e2ip_plugins.predictions import energy_columns
from e2ip_plugins.predictions.columns import our_names
from e2ip_plugins.predictions.fingerprints import are_predictions, fingerprint
from e2ip_plugins.predictions.labelled import weight_in_words, weight_of
from e2ip_plugins.predictions.reference_names import energy_beside, method_last
from e2ip_plugins.predictions.trajectories import read_all


@dataclass(frozen=True)
class Predictions:
    """Predictions for F frames with N atoms in total.

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
        Name of the calibration that had been applied when the file was written.
    uq_model : str or None
        Name of the readout that predicted; None where the file has none.
    index : (F,) int
        Number of every frame in the file.
    counted : (F,) bool
        False for frames whose forces have weight 0: their reference forces are NaN, and no constant or threshold is
        fitted to their uncertainties. Frames that have weight 0 themselves are left out.
    total : int
        Frames in the file.
    remarks : tuple of str
        What was left out: frames of weight 0, and by `distinct` frames that the file has more than once.
    energy_uncertainty : (F,)
        Standard deviation of the energy in eV; NaN where a frame has none.
    energy_error_vector : (F, M) or None
        In eV, see `e2ip_plugins.leverage.energies`; NaN where a frame has none. None where the file has none.
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
    counted: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=bool))
    total: int = 0
    remarks: Tuple[str, ...] = ()
    energy_uncertainty: np.ndarray = field(default_factory=lambda: np.empty(0))
    energy_error_vector: Optional[np.ndarray] = None

    @property
    def labelled(self) -> bool:
        """Whether any atom has a finite reference force."""
        return bool(np.isfinite(self.reference_forces).all(-1).any())

    @property
    def has_energy_uncertainties(self) -> bool:
        """Whether any frame has an uncertainty of its energy."""
        return bool(np.isfinite(self.energy_uncertainty).any())

    @property
    def frame_of_atom(self) -> np.ndarray:
        """Index of every atom's frame (N,)."""
        return np.repeat(np.arange(len(self.sizes)), self.sizes)

    @cached_property
    def atoms_of(self) -> List[slice]:
        """Atoms of every frame."""
        return [slice(end - size, end) for end, size in zip(np.cumsum(self.sizes), self.sizes, strict=True)]

    def with_forces_of(self, counted: np.ndarray) -> "Predictions":
        """Return the predictions with reference forces of some frames alone, which a mask (F,) names."""
        reference_forces = np.where(counted[self.frame_of_atom, None], self.reference_forces, np.nan)
        return replace(self, counted=counted, reference_forces=reference_forces)

    def only(self, chosen: np.ndarray) -> "Predictions":
        """Return the predictions for some of the frames (M,), in their order in the file."""
        atoms = np.isin(self.frame_of_atom, chosen)
        fields: Dict[str, Any] = {n: values[chosen] for n in _OF_FRAMES if (values := getattr(self, n)) is not None}
        fields |= {name: values[atoms] for name in _OF_ATOMS if (values := getattr(self, name)) is not None}
        parameters = {name: values[atoms] for name, values in self.parameters.items()}
        return replace(self, frames=tuple(self.frames[i] for i in chosen), parameters=parameters, **fields)


#: Arrays of `Predictions` with an entry for every frame, and for every atom.
_OF_FRAMES = ("sizes", "index", "counted", *energy_columns.FIELDS)
_OF_ATOMS = ("species", "positions", "reference_forces", "forces", "leverage")


def read_predictions(
    path: Union[str, Path],
    ref_forces: Optional[str] = None,
    ref_energy: Optional[str] = None,
    required: bool = True,
) -> Predictions:
    """Return the predictions of one file, except for frames of weight 0 (``config_weight``).

    Parameters
    ----------
    path
        extxyz file with predicted and reference forces.
    ref_forces, ref_energy
        Names of the reference columns; recognised by their usual prefixes when not given.
    required
        Whether a file without reference forces is an error; otherwise its reference forces and energies are NaN.

    Raises
    ------
    InputError
        File missing or unreadable; columns missing, ambiguous or invalid; forces that are not those which were
        predicted; no frame of a weight other than 0.
    """
    path = Path(path)
    file = _File(path, [_FrameColumns.of(atoms) for atoms in read_all(path, "extxyz")])
    # Isolated atoms, which come first in many files, have no reference.
    first = next((f for f in file.frames if _reference_name(path, f, ref_forces, False)), file.frames[0])
    reference = _reference_name(path, first, ref_forces, required)
    prefix = _prediction_prefix(path, first, reference)
    family = _family(file, prefix)
    if reference and ref_energy is not None and ref_energy not in first.info:
        numbers = [name for name, value in first.info.items() if isinstance(value, float)]
        raise InputError(f"{path}: no energy named '{ref_energy}' (--energy-key); there is: {_listed(numbers)}")
    parameters = {}
    for key in family.parameter_keys if family else ():
        values = file.column(prefix + key.name, key.shape)
        bad = ~(np.isfinite(values) & (values > key.above))
        file.refuse(bad, f"{prefix + key.name} is not finite or outside its range")
        parameters[key.name] = values
    forces = file.column(prefix + "forces", (3,))
    file.refuse(~np.isfinite(forces), f"{prefix}forces is not finite")
    file.check_sizes(prefix, forces)
    energy_name = ref_energy or energy_beside(reference) if reference else ""
    predictions = Predictions(
        path=path,
        sizes=file.sizes,
        species=np.concatenate([f.species for f in file.frames]),
        positions=file.column("positions", (3,)),
        reference_forces=file.column(reference, (3,), np.nan) if reference else np.full_like(forces, np.nan),
        forces=forces,
        family=family,
        parameters=parameters,
        leverage=_leverage(file, prefix + keys.LEVERAGE.name),
        frames=tuple(f.fingerprint for f in file.frames),
        calibration=file.agreed(prefix, keys.CALIBRATION_KEY),
        uq_model=file.agreed(prefix, keys.MODEL_KEY),
        index=np.arange(len(file.frames)),
        total=len(file.frames),
        **energy_columns.read_all(path, [frame.info for frame in file.frames], prefix, energy_name),
    )
    return _weighted(predictions, *file.weights())


def _weighted(p: Predictions, frames: np.ndarray, forces: np.ndarray, energies: np.ndarray) -> Predictions:
    """Leave out what has no weight above 0, given the weights (F,) of frames, their forces and their energies."""
    counted, chosen = frames * forces > 0.0, np.flatnonzero(frames > 0.0)
    if not len(chosen):
        raise InputError(
            f"{p.path}: all of its frames have {weight_in_words(frames)} (config_weight), and count nowhere"
        )
    remarks = []
    if len(chosen) < p.total:
        word = weight_in_words(frames[frames <= 0.0])
        remarks.append(f"{plural(p.total - len(chosen), 'frame')} of {word} (config_weight) left out")
    if without := int((~counted[chosen]).sum()):
        word = weight_in_words(forces[chosen][~counted[chosen]])
        remarks.append(f"forces of {plural(without, 'frame')} have {word} (config_forces_weight) and are left out")
    reference_energy = np.where(frames * energies > 0.0, p.reference_energy, np.nan)
    weighted = replace(p, reference_energy=reference_energy, remarks=tuple(remarks)).with_forces_of(counted)
    return weighted.only(chosen)


class _FrameColumns(NamedTuple):
    """Columns and info of one frame; ASE's own calculator results are columns like any other."""

    species: np.ndarray
    arrays: Dict[str, np.ndarray]
    info: Dict[str, Any]
    fingerprint: str

    @classmethod
    def of(cls, atoms: Atoms) -> "_FrameColumns":
        results = atoms.calc.results if atoms.calc is not None else {}
        arrays = {name: np.asarray(v) for name, v in results.items() if np.shape(v)[:1] == (len(atoms),)}
        info = {name: value for name, value in results.items() if np.size(value) == 1}
        symbols = np.array(atoms.get_chemical_symbols())
        return cls(symbols, {**atoms.arrays, **arrays}, {**atoms.info, **info}, fingerprint(atoms))

    def force_prefixes(self) -> List[str]:
        """Return the prefixes of all columns that may be forces."""
        names = [n for n, v in self.arrays.items() if n.endswith("forces") and v.shape[1:] == (3,)]
        return [name.removesuffix("forces") for name in names]

    def vectors_of_others(self) -> List[str]:
        """Return the columns of three numbers per atom, except positions and predictions with uncertainties."""
        predicted = [f"{prefix}forces" for prefix in self.force_prefixes() if self.has_uncertainties(prefix)]
        names = [name for name, values in self.arrays.items() if values.shape[1:] == (3,)]
        known, ours = ("positions", "momenta", *predicted), tuple(our_names())
        return [name for name in names if name not in known and not name.endswith(ours)]

    def family_of(self, prefix: str) -> Optional[Type[Family]]:
        """Return the family whose parameters the columns of a prefix hold."""
        return families.of_outputs(name[len(prefix) :] for name in self.arrays if name.startswith(prefix))

    def has_uncertainties(self, prefix: str) -> bool:
        """Return whether forces of this prefix come with a family's parameters or views."""
        views = any(prefix + key.name in self.arrays for key in keys.FORCE_VIEWS)
        return views or self.family_of(prefix) is not None


class _File(NamedTuple):
    """The frames of a file, with columns that all of them must have."""

    path: Path
    frames: List[_FrameColumns]

    @property
    def sizes(self) -> np.ndarray:
        return np.array([len(frame.species) for frame in self.frames])

    def column(self, name: str, shape: tuple, default: Optional[float] = None) -> np.ndarray:
        """Return a column of all atoms, in frames without it the ``default``; `InputError` where there is none."""
        columns = []
        for i, frame in enumerate(self.frames):
            expected = (len(frame.species), *shape)
            values = frame.arrays.get(name)
            if values is None and default is not None:
                values = np.full(expected, default)
            if values is None or values.shape != expected:
                raise InputError(
                    f"{self.path}: frame {i} has no column '{name}' of {int(np.prod(shape))} numbers per atom; leave "
                    "such frames out"
                )
            columns.append(values)
        return np.concatenate(columns).astype(np.float64)

    def weights(self) -> Tuple[np.ndarray, ...]:
        """Return the weights (F,) of frames, their forces and their energies, 1 where the file has none."""
        places = [(frame.info, f"{self.path}, frame {i}") for i, frame in enumerate(self.frames)]
        return tuple(np.array([weight_of(info, where, key) for info, where in places]) for key in keys.WEIGHT_KEYS)

    def check_sizes(self, prefix: str, forces: np.ndarray) -> None:
        """Raise `InputError` where forces (N, 3) are other ones than the file's uncertainties were predicted with."""
        by_frame = np.split(forces, np.cumsum(self.sizes)[:-1])
        for i, (frame, of_frame) in enumerate(zip(self.frames, by_frame, strict=True)):
            if prefix + keys.PREDICTED_KEY in frame.info and not are_predictions(frame.info, of_frame, prefix):
                raise InputError(
                    f"{self.path}: '{prefix}forces' of frame {i} are not those that were predicted with its "
                    "uncertainties: it was labelled afterwards; e2ip evaluate predicts anew and keeps such labels"
                )

    def agreed(self, prefix: str, key: str) -> Optional[str]:
        """Return the info that all frames have under a key; `InputError` where they differ."""
        values = [frame.info.get(prefix + key, frame.info.get(key)) for frame in self.frames]
        for i, value in enumerate(values):
            if value != values[0]:
                raise InputError(
                    f"{self.path}: {key} is '{values[0]}' in frame 0 and '{value}' in frame {i}; one file holds the "
                    "predictions of one model, all calibrated alike (NequIP's xyz writer appends to a file that is "
                    "already there)"
                )
        return None if values[0] is None else str(values[0])

    def refuse(self, bad: np.ndarray, problem: str) -> None:
        """Raise `InputError` if any entry of a mask over atoms or their components is True."""
        atoms = bad.reshape(len(bad), -1).any(-1)
        if atoms.any():
            frame = int(np.searchsorted(np.cumsum(self.sizes), np.argmax(atoms), side="right"))
            raise InputError(f"{self.path}: {problem} for {int(atoms.sum())} atoms, first in frame {frame}")


def _reference_name(path: Path, frame: _FrameColumns, wanted: Optional[str], required: bool) -> Optional[str]:
    """Return the column of the reference forces; None where the frame has none and none is ``required``."""
    prefixes = frame.force_prefixes()
    names = [f"{prefix}forces" for prefix in prefixes if not frame.has_uncertainties(prefix)]
    others = frame.vectors_of_others()
    if wanted is not None:
        if wanted not in names and wanted.endswith("forces") and wanted.removesuffix("forces") in prefixes:
            raise InputError(f"{path}: '{wanted}' (--forces-key) are the predictions; references are others")
        if wanted in frame.arrays and frame.arrays[wanted].shape[1:] == (3,):
            return wanted
        if required:
            raise InputError(f"{path}: no forces named '{wanted}' (--forces-key); there are: {_listed(others)}")
        return None
    candidates = [name for name in names if keys.REFERENCE_PREFIX.match(name)] or method_last(others)
    if len(candidates) > 1:
        raise InputError(
            f"{path}: several columns may be the reference: {_listed(candidates)}; choose with --forces-key"
        )
    if not candidates and required:
        raise InputError(
            f"{path}: no reference forces (REF_forces, dft_forces, original_dataset_forces, forces_pbe …) beside the "
            f"predictions; other columns of three numbers per atom: {_listed(others)}. Name them with --forces-key. "
            "NequIP's xyz writer keeps references with output_fields_from_original_dataset: [total_energy, forces]; "
            "mace_eval_configs those not called 'energy' and 'forces'"
        )
    return candidates[0] if candidates else None


def _prediction_prefix(path: Path, frame: _FrameColumns, reference: Optional[str]) -> str:
    """Return what stands before ``forces`` in the name of the predictions; uncertainties tell which they are."""
    prefixes = [prefix for prefix in frame.force_prefixes() if f"{prefix}forces" != reference]
    candidates = [prefix for prefix in prefixes if _uncertain(frame, prefix)] or prefixes
    if len(candidates) != 1:
        several = f"several columns may be the prediction: {_listed(f'{prefix}forces' for prefix in candidates)}"
        beside = f" beside the reference '{reference}'" if reference else ""
        way = "" if candidates else "; e2ip evaluate MODEL IN.xyz OUT.xyz writes a file that has them"
        raise InputError(f"{path}: {several if candidates else 'no predicted forces'}{beside}{way}")
    return candidates[0]


def _uncertain(frame: _FrameColumns, prefix: str) -> bool:
    """Return whether forces of this prefix come with a family's name, parameters or views."""
    return prefix + keys.FAMILY_KEY in frame.info or frame.has_uncertainties(prefix)


def _family(file: _File, prefix: str) -> Optional[Type[Family]]:
    """Return the predictive family that a file names, otherwise the one whose parameters it holds."""
    frame, name = file.frames[0], file.agreed(prefix, keys.FAMILY_KEY)
    family = families.of_file(name, str(file.path)) if name is not None else frame.family_of(prefix)
    if family is None and not _uncertain(frame, prefix):
        return None
    # Without name and parameters the views may be of any family.
    missing = {
        f.uq_family: [prefix + key.name for key in f.parameter_keys if prefix + key.name not in frame.arrays]
        for f in (families.table().values() if family is None else [family])
    }
    if all(missing.values()):
        wanted = " or ".join(f"{_listed(columns)} ({name})" for name, columns in missing.items())
        raise InputError(
            f"{file.path}: has uncertainties, but not the columns {wanted} that scores are computed from; "
            "NequIP's xyz writer wants them in extra_fields"
        )
    return family


def _leverage(file: _File, name: str) -> Optional[np.ndarray]:
    if not any(name in frame.arrays for frame in file.frames):
        return None
    values = file.column(name, keys.LEVERAGE.shape)
    values[values == keys.UNFITTED] = np.nan
    file.refuse(values < 0.0, f"{name} is negative")
    return values


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
