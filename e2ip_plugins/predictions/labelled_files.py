"""The reader of a user's labelled files, and what is said about files that are of no use."""

from pathlib import Path
from typing import Callable, Dict, Iterable, List, Optional, Tuple

import numpy as np

from e2ip_plugins.errors import InputError, plural
from e2ip_plugins.keys import FAMILY_KEY
from e2ip_plugins.predictions.checks import check_apart, check_structure
from e2ip_plugins.predictions.labelled import LabelledFrame, is_isolated, labelled, weight_in_words
from e2ip_plugins.predictions.reference_names import USUAL_NAMES


def read_frames(
    paths: Iterable[Path],
    forces_key: Optional[str] = None,
    need_forces: bool = True,
    on_note: Callable[[str], None] = lambda text: None,
    energy_key: Optional[str] = None,
) -> List[LabelledFrame]:
    """Return the frames of some files, except isolated atoms and frames that count nowhere.

    Isolated atoms are those with ``config_type=IsolatedAtom`` (MACE's E0s). Weights are MACE's: ``config_weight`` of a
    frame, ``config_forces_weight`` and ``config_energy_weight`` of its labels; 1 where the frame does not have them.

    Parameters
    ----------
    paths
        Anything that ASE reads.
    forces_key : str, optional
        Array with the reference forces; default: see `e2ip_plugins.predictions.reference_names`.
    need_forces : bool
        Whether a file without a finite reference force is an error, and a frame with predicted forces alone.
    on_note : callable
        Takes what was left out, in words.
    energy_key : str, optional
        Where frames have the reference energy; default: likewise.

    Raises
    ------
    InputError
        Missing, unreadable and empty files, those without the forces, an array that holds something else, and what
        `check_structure` and `check_apart` refuse.
    """
    keys = forces_key, energy_key
    return [frame for path in map(Path, paths) for frame in _read_file(path, keys, need_forces, on_note)]


def _read_file(
    path: Path, keys: Tuple[Optional[str], Optional[str]], need_forces: bool, on_note: Callable[[str], None]
) -> List[LabelledFrame]:
    # ASE's readers: this module is imported while MACE is.
    from e2ip_plugins.predictions.trajectories import read_all

    check = FileCheck(path, keys, need_forces)
    atoms = ((i, atoms) for i, atoms in enumerate(read_all(path)) if not is_isolated(atoms))
    frames = [frame for i, atoms in atoms if check.counts(frame := labelled(atoms, f"{path}, frame {i}", *keys))]
    check.finish(on_note)
    return frames


class FileCheck:
    """Looks at the frames of a file, one after another, and then says what is wrong with the file.

    Parameters
    ----------
    path : Path
    keys : tuple of str or None
        Those of forces and energies.
    need_forces : bool
        See `read_frames`.
    """

    def __init__(self, path: Path, keys: Tuple[Optional[str], Optional[str]], need_forces: bool) -> None:
        self.path, (self.forces_key, self.energy_key), self.need_forces = path, keys, need_forces
        self.has_energies = False
        #: Names of the references that are taken.
        self.names: Dict[str, None] = {}
        self.frames = self.counting = self.weightless = self.predicted = 0
        self.first_predicted: Optional[LabelledFrame] = None
        self.has_forces = False
        self._example: Optional[LabelledFrame] = None
        # One weight of each sign is enough to say what they are.
        self._weights: Dict[bool, float] = {}
        self._weights_unused: Dict[bool, float] = {}
        self._weights_of_forces: Dict[bool, float] = {}

    def counts(self, frame: LabelledFrame) -> bool:
        """Return whether a frame counts.

        Raises
        ------
        InputError
            What `check_structure` and `check_apart` refuse.
        """
        check_structure(frame.atoms, frame.where)
        check_apart(frame.atoms.positions, frame.atoms.cell.array, frame.atoms.pbc, frame.where)
        self.frames += 1
        least = frame.least_weight
        self._weights[least < 0.0] = least
        if not frame.counts:
            self._weights_unused[least < 0.0] = least
            return False
        self.counting += 1
        self._example = self._example or frame
        if frame.forces is not None and frame.forces.weight <= 0.0:
            self.weightless += 1
            self._weights_of_forces[frame.forces.weight < 0.0] = frame.forces.weight
        if frame.forces is not None and frame.forces.predicted:
            self.predicted += 1
            self.first_predicted = self.first_predicted or frame
        self.has_forces = self.has_forces or bool(np.isfinite(frame.counted_forces).any())
        self.has_energies = self.has_energies or frame.energy is not None
        self.names.update(
            (x.key, None) for x in (frame.forces, frame.energy, frame.stress) if x is not None and x.counts
        )
        return True

    def finish(self, on_note: Callable[[str], None]) -> None:
        """Say what was left out; `InputError` for a file of no use."""
        path = self.path
        if not self.frames:
            raise InputError(f"{path}: has no frames")
        if not self.counting:
            word = weight_in_words(self._weights.values())
            raise InputError(f"{path}: all of its frames have {word} (config_weight), and count nowhere")
        if self.counting < self.frames:
            word = weight_in_words(self._weights_unused.values())
            on_note(f"{path}: {plural(self.frames - self.counting, 'frame')} of {word} left out")
        word = weight_in_words(self._weights_of_forces.values())
        if self.weightless:
            frames = plural(self.weightless, "frame")
            on_note(f"{path}: forces of {frames} have {word} (config_forces_weight) and are left out")
        self._tell_of_predicted(on_note)
        if self.need_forces and self.weightless == self.counting:
            raise InputError(f"{path}: the forces of all of its frames have {word} (config_forces_weight)")
        if self.need_forces and not self.has_forces:
            wanted = f"'{self.forces_key}'" if self.forces_key else f"any of {', '.join(USUAL_NAMES['forces'])}"
            raise InputError(
                f"{path}: no atom has finite reference forces under {wanted}; columns of three numbers per atom: "
                f"{self._columns('forces')}. Name forces with --forces-key, and energies with --energy-key"
            )
        if self.need_forces and self.energy_key and not self.has_energies:
            problem = f"no frame has a reference energy under '{self.energy_key}' (--energy-key)"
            on_note(f"{path}: {problem}; numbers in the comment lines: {self._columns('energy')}")

    def _columns(self, kind: str) -> str:
        """Return names of the first frame that may be a reference of a kind, ``forces`` or ``energy``."""
        assert self._example is not None
        atoms = self._example.atoms
        if kind == "forces":
            names = [name for name, values in atoms.arrays.items() if values.shape[1:] == (3,) and name != "positions"]
        else:
            names = [str(name) for name, value in atoms.info.items() if isinstance(value, (int, float, np.number))]
        return ", ".join(names) or "none"

    def _tell_of_predicted(self, on_note: Callable[[str], None]) -> None:
        """Raise `InputError`, or tell, where forces of frames are a model's predictions and no references."""
        first = self.first_predicted
        if first is None:
            return
        assert first.forces is not None
        problem = (
            f"'{first.forces.key}' are predictions of a model ({FAMILY_KEY} is in the frame), no reference forces; "
            "name references with --forces-key, or put them into the frames as REF_forces"
        )
        if self.need_forces:
            raise InputError(f"{first.where}: {problem}")
        on_note(f"{self.path}: the forces of {plural(self.predicted, 'frame')} are not used: {problem}")
