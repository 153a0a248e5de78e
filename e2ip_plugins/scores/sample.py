"""Atoms of a validation file, to which a calibration is fitted."""

from typing import Dict, NamedTuple, Optional, Tuple, Type

import numpy as np
import torch

from e2ip_plugins.errors import InputError
from e2ip_plugins.families.interface import Family
from e2ip_plugins.families.laws import Law, law_of
from e2ip_plugins.predictions.prediction_files import Predictions
from e2ip_plugins.readout.vanishing import vanishing
from e2ip_plugins.scores import references
from e2ip_plugins.scores.calibration import Calibration


class Sample(NamedTuple):
    """Validation atoms with finite reference forces.

    Attributes
    ----------
    family : subclass of Family
    parameters : dict
        Of the family, (N, …).
    error : (N, 3)
        Reference minus predicted force in eV/Å.
    species : (N,) str
        Chemical symbols.
    frame : (N,) int
        Configuration of every atom.
    file : str
        Name of the validation file.
    fingerprints : tuple of str
        Of all frames of the file except those of isolated atoms, which are all alike, and those whose forces have
        weight 0.
    vanishing, unlabelled : int
        Atoms that were left out: for a force that vanishes by symmetry, for a reference force that is not finite.
    uq_model : str or None
        Name of the readout, where it is known.
    doubt : str or None
        See `e2ip_plugins.scores.references`.
    """

    family: Type[Family]
    parameters: Dict[str, np.ndarray]
    error: np.ndarray
    species: np.ndarray
    frame: np.ndarray
    file: str = "the validation set"
    fingerprints: Tuple[str, ...] = ()
    vanishing: int = 0
    unlabelled: int = 0
    uq_model: Optional[str] = None
    doubt: Optional[str] = None

    @classmethod
    def of(cls, p: Predictions) -> "Sample":
        """Return the sample of some predictions; `InputError` for those that cannot be calibrated."""
        if p.family is None:
            raise InputError(f"{p.path}: has no predicted distribution to calibrate, forces only")
        if p.calibration is not None:
            raise InputError(f"{p.path}: was calibrated already, with {p.calibration}; give predictions without that")
        # Numbers that do not depend on the order of the frames in the file: so does not what is drawn or halved.
        place = np.empty(len(p.frames), dtype=int)
        place[np.argsort(p.frames, kind="stable")] = np.arange(len(p.frames))
        errors = p.reference_forces - p.forces
        labelled, counted = np.isfinite(errors).all(-1), p.counted[p.frame_of_atom]
        if not labelled.any():
            raise InputError(f"{p.path}: no atom has a finite reference force whose weight is not zero")
        zero = labelled & vanishing(p.forces, errors).numpy()
        if not (labelled & ~zero).any():
            raise InputError(f"{p.path}: all forces vanish by symmetry (isolated atoms, perfect crystals)")
        everything = cls(
            p.family,
            p.parameters,
            errors,
            p.species,
            place[p.frame_of_atom],
            str(p.path),
            fingerprints=tuple(p.frames[i] for i in np.unique(p.frame_of_atom[~zero & counted])),
            vanishing=int(zero.sum()),
            unlabelled=int((~labelled & counted).sum()),
            uq_model=p.uq_model,
            doubt=references.doubt(p.reference_forces[labelled], p.forces[labelled]),
        )
        return everything.only(labelled & ~zero)

    def only(self, chosen: np.ndarray) -> "Sample":
        """Return the atoms of a mask (N,)."""
        return self._replace(
            parameters={name: values[chosen] for name, values in self.parameters.items()},
            error=self.error[chosen],
            species=self.species[chosen],
            frame=self.frame[chosen],
        )

    def law(self) -> Law:
        """Return the predicted distributions."""
        return law_of(self.family, self.parameters)

    def calibrated(self, calibration: Calibration) -> "Sample":
        """Return the sample with calibrated covariances."""
        return self._replace(parameters=calibration.apply_numpy(self.family, self.parameters, self.species))

    def widened(self, factor: np.ndarray, floor: np.ndarray) -> "Sample":
        """Return the sample with other covariances, see `Family.widen`; factor and floor (N,)."""
        tensors = {name: torch.as_tensor(values, dtype=torch.float64) for name, values in self.parameters.items()}
        wide = self.family.widen(tensors, torch.as_tensor(factor), torch.as_tensor(floor))
        return self._replace(parameters={name: values.numpy() for name, values in wide.items()})

    def numbered(self) -> Tuple[np.ndarray, int]:
        """Return configurations counted from 0 (N,), and their number."""
        frames, index = np.unique(self.frame, return_inverse=True)
        return index, len(frames)
