"""Frames with their references: the type that everything reads.

`labelled` makes one of a frame in a file; adapters make them of what a training has loaded (``training/labels.py``).
"""

from typing import Any, Dict, Hashable, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from ase import Atoms
from ase.stress import voigt_6_to_full_3x3_stress

from e2ip_plugins.errors import InputError
from e2ip_plugins.keys import WEIGHT_KEYS
from e2ip_plugins.predictions.fingerprints import are_predictions, fingerprint
from e2ip_plugins.predictions.reference_names import USUAL_NAMES, energy_beside, method_last, prefixed


class Label(NamedTuple):
    """A reference of a frame.

    Attributes
    ----------
    values : array
        Forces (N, 3) in eV/Å, energy () in eV or stress (3, 3) in eV/Å³; NaN where there is none.
    key : str
        Name that it has in the user's file.
    weight : float
        Product of the frame's weight and that of the property. A label of weight 0 counts nowhere, nor does one of
        negative weight, from which MACE would move away.
    predicted : bool
        Whether the values are a model's output and no reference.
    """

    values: np.ndarray
    key: str = ""
    weight: float = 1.0
    predicted: bool = False

    @property
    def counts(self) -> bool:
        """Whether the label is a reference whose weight is above zero."""
        return self.weight > 0.0 and not self.predicted


class LabelledFrame(NamedTuple):
    """One configuration and its references.

    Attributes
    ----------
    atoms : ase.Atoms
        Without calculator. The numbers may be atom types, where a data set has nothing else.
    where : str
        File and number of the frame, for messages.
    forces, energy, stress : Label or None
        None where the frame has none.
    state : hashable
        Whatever else tells frames apart, beside what `fingerprint` takes from ``atoms.info``.
    weight : float
        Weight of the frame, without those of its properties.
    """

    atoms: Atoms
    where: str
    forces: Optional[Label] = None
    energy: Optional[Label] = None
    stress: Optional[Label] = None
    state: Hashable = None
    weight: float = 1.0

    @property
    def counted_forces(self) -> np.ndarray:
        """Reference forces (N, 3) in eV/Å.

        NaN everywhere unless there is a reference whose weight is above zero, and of atoms with a component that is not
        finite.
        """
        counted = np.full((len(self.atoms), 3), np.nan)
        if self.forces is not None and self.forces.counts:
            finite = np.isfinite(self.forces.values).all(-1)
            counted[finite] = self.forces.values[finite]
        return counted

    @property
    def counted_energy(self) -> np.ndarray:
        """Reference energy () in eV; NaN unless there is a reference whose weight is not zero."""
        counted = self.energy is not None and self.energy.counts and np.isfinite(self.energy.values).all()
        return np.asarray(self.energy.values if counted and self.energy is not None else np.nan, dtype=np.float64)

    @property
    def counted_stress(self) -> np.ndarray:
        """Reference stress (3, 3) in eV/Å³; NaN unless there is a reference whose weight is not zero."""
        counted = self.stress is not None and self.stress.counts and np.isfinite(self.stress.values).all()
        return self.stress.values if counted and self.stress is not None else np.full((3, 3), np.nan)

    @property
    def counts(self) -> bool:
        """Whether a training learns from the frame: its weight, and the weight of one of its labels, is above zero.

        A frame without any label is as good as one whose labels are elsewhere.
        """
        labels = [label for label in (self.forces, self.energy, self.stress) if label is not None]
        return self.weight > 0.0 and (not labels or any(label.weight > 0.0 for label in labels))

    @property
    def least_weight(self) -> float:
        """Smallest of the weights of the frame and of its labels."""
        return min(self.weight, *(x.weight for x in (self.forces, self.energy, self.stress) if x is not None), 1.0)

    @property
    def mark(self) -> Tuple[str, Hashable]:
        """What two copies of a frame have in common."""
        return fingerprint(self.atoms), self.state


def is_isolated(atoms: Atoms) -> bool:
    """Return whether a frame is an isolated atom, whose energy is one of MACE's E0s."""
    return len(atoms) == 1 and atoms.info.get("config_type") == "IsolatedAtom"


def weight_in_words(weights: Iterable[float]) -> str:
    """Return what weights are, of which none is above zero.

    >>> weight_in_words([0.0, 0.0]), weight_in_words([-1.0]), weight_in_words([0.0, -1.0])
    ('weight zero', 'negative weight', 'zero or negative weight')
    """
    negative = {weight < 0.0 for weight in weights}
    return "zero or negative weight" if len(negative) > 1 else "negative weight" if True in negative else "weight zero"


def labelled(
    atoms: Atoms, where: str, forces_key: Optional[str] = None, energy_key: Optional[str] = None
) -> LabelledFrame:
    """Return a frame of a file with the references that it holds.

    Parameters
    ----------
    atoms : ase.Atoms
        Its calculator may hold results, as ASE's readers make them of columns with their names.
    where : str
        File and number of the frame, for messages.
    forces_key, energy_key : str, optional
        See `read_frames`.

    Raises
    ------
    InputError
        Where ``forces_key`` is not three numbers per atom, ``energy_key`` or a weight no number.
    """
    weight, of_forces, of_energy = (weight_of(atoms.info, where, key) for key in WEIGHT_KEYS)
    results = atoms.calc.results if atoms.calc is not None else {}
    of_atoms, of_frame = {**atoms.arrays, **results}, {**atoms.info, **results}
    forces = _label(atoms, where, "forces", of_atoms, forces_key, weight * of_forces)
    beside = [energy_beside(forces.key)] if forces is not None and method_last([forces.key]) else []
    return LabelledFrame(
        bare(atoms),
        where,
        forces=forces,
        energy=_label(atoms, where, "energy", of_frame, energy_key, weight * of_energy, beside),
        stress=_label(atoms, where, "stress", of_frame, None, weight),
        weight=weight,
    )


def weight_of(info: Mapping[str, Any], where: str, key: str) -> float:
    """Return a weight of `WEIGHT_KEYS` of a frame, 1 where it has none; ``where`` names the frame in messages."""
    value = info.get(key, 1.0)
    try:
        weight = np.asarray(value, dtype=np.float64).item()
    except (ValueError, TypeError) as error:
        raise InputError(f"{where}: {key} is '{value}', which is no number") from error
    if not np.isfinite(weight):
        raise InputError(f"{where}: {key} is {weight}; a weight is a finite number")
    return weight


def _label(
    atoms: Atoms,
    where: str,
    kind: str,
    columns: Mapping[str, Any],
    key: Optional[str],
    weight: float,
    first: Sequence[str] = (),
) -> Optional[Label]:
    """Return the first label of a kind that is a reference, otherwise a predicted one, otherwise None.

    ``first`` are names that are tried before the usual ones.
    """
    names = [key] if key else [*first, *USUAL_NAMES[kind]]
    if not key and kind != "stress":
        names += prefixed(map(str, columns), kind)
    shaped = {name: _shaped(atoms, kind, np.asarray(columns.get(name, ()))) for name in names}
    if not key and kind == "forces" and all(values is None for values in shaped.values()):
        others = {name: _shaped(atoms, kind, np.asarray(columns[name])) for name in method_last(map(str, columns))}
        others = {name: values for name, values in others.items() if values is not None}
        shaped = others if len(others) == 1 else {}
    labels = []
    for name, values in shaped.items():
        if values is not None:
            labels.append(Label(values.astype(np.float64), name, weight, _is_predicted(atoms, name, kind)))
        elif key and key in columns:
            wanted = {"forces": "three numbers per atom", "energy": "a number"}[kind]
            raise InputError(f"{where}: '{key}' is not {wanted}; name the reference {kind} with --{kind}-key")
    return min(labels, key=lambda label: label.predicted, default=None)


def _shaped(atoms: Atoms, kind: str, values: np.ndarray) -> Optional[np.ndarray]:
    """Return values in the shape of a label; None where they are none, as the stress of a molecule."""
    if values.dtype.kind not in "fiu":
        return None
    if kind == "forces":
        return values if values.shape == (len(atoms), 3) else None
    if kind == "energy":
        return values.reshape(()) if values.size == 1 else None
    if values.size not in (6, 9) or not atoms.pbc.all():
        return None
    return voigt_6_to_full_3x3_stress(values.ravel()) if values.size == 6 else values.reshape(3, 3)


def _is_predicted(atoms: Atoms, name: str, ending: str) -> bool:
    """Return whether a label is of the model that has predicted the forces beside it."""
    prefix, columns = name.removesuffix(ending), {**atoms.arrays, **(atoms.calc.results if atoms.calc else {})}
    forces = columns.get(f"{prefix}forces")
    beside = np.zeros((len(atoms), 3)) if forces is None else np.asarray(forces)
    return name.endswith(ending) and are_predictions(atoms.info, beside, prefix)


def bare(atoms: Atoms) -> Atoms:
    """Return a copy of a frame without the results of a calculator."""
    copy = atoms.copy()
    copy.calc = None
    return copy


def once(frames: Sequence[LabelledFrame]) -> List[LabelledFrame]:
    """Return the frames without further copies of a frame, which add nothing; see `same_frames`.

    Of copies with and without forces that count, the first with forces is kept.
    """
    kept: Dict[Tuple[str, Hashable], LabelledFrame] = {}
    for frame in frames:
        known = kept.setdefault(frame.mark, frame)
        if np.isnan(known.counted_forces).all() and known is not frame:
            kept[frame.mark] = frame
    return list(kept.values())


def same_frames(a: Sequence[LabelledFrame], b: Sequence[LabelledFrame]) -> int:
    """Return how many frames of ``b`` are also in ``a``, by species, positions and, where periodic, cell."""
    known = {frame.mark for frame in a}
    return sum(frame.mark in known for frame in b)
