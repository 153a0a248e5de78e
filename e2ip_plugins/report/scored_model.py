"""One file's predictions with the scores of every atom."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Dict, List, Optional

import numpy as np

from e2ip_plugins.errors import InputError
from e2ip_plugins.families.laws import law_of
from e2ip_plugins.predictions.prediction_files import Predictions
from e2ip_plugins.readout.vanishing import vanishing
from e2ip_plugins.scores import energies, references
from e2ip_plugins.scores.bootstrap import CoverageBand, coverage_band
from e2ip_plugins.scores.calibration import Calibration
from e2ip_plugins.scores.metrics import AtomScores, score_atoms


@dataclass(frozen=True)
class ScoredModel:
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
        Applied to ``predictions`` and ``scores``.
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
        """Number of atoms without a finite reference force, in frames whose forces have a weight other than 0."""
        return int(np.count_nonzero(~self.kept & self.predictions.counted[self.predictions.frame_of_atom]))

    @property
    def frame(self) -> np.ndarray:
        """Configuration of every kept atom."""
        return self.predictions.frame_of_atom[self.kept]

    @cached_property
    def band(self) -> Optional[CoverageBand]:
        """Intervals of the coverages over all atoms; None without a distribution or with one configuration."""
        return coverage_band(self.scores["pit"], self.frame) if "pit" in self.scores else None

    @cached_property
    def energy_residuals(self) -> Dict[str, energies.EnergyResiduals]:
        """Errors of energies with uncertainties: of ``frames``, and of ``pairs`` where there are error vectors."""
        residuals_of = {"frames": energies.of_frames(self.predictions), "pairs": energies.of_pairs(self.predictions)}
        return {name: residuals for name, residuals in residuals_of.items() if residuals is not None}

    @property
    def left_out(self) -> List[str]:
        """Warnings: what the scores leave out, and doubts."""
        p = self.predictions
        texts = list(p.remarks)
        if p.labelled and (doubt := references.doubt(p.reference_forces[self.kept], p.forces[self.kept])):
            texts.append(doubt)
        if "error" not in self.scores:
            texts.append("no reference forces: nothing but leverage, standard deviations and the AUROC of frames")
        elif zero := int(vanishing(p.forces[self.kept], self.scores["error"]).sum()):
            texts.append(
                f"{zero} atoms whose force vanishes by symmetry (isolated atoms, perfect crystals) "
                "are counted, with an error of 0; e2ip fit and calibrate leave them out"
            )
        if self.masked:
            texts.append(f"{self.masked} atoms without finite reference forces left out")
        if singular := np.count_nonzero(self.scores.get("singular", ())):
            texts.append(
                f"covariances of {singular} atoms have no full rank, as those of ensembles of two or three: their NLL "
                "and coverages mean nothing; e2ip ensemble --isotropic, or a calibration with method floor, mends that"
            )
        if self.energy_residuals and (doubt := energies.reference_doubt(p)):
            texts.append(doubt)
        missing = np.count_nonzero(~np.isfinite(p.reference_energy))
        if 0 < missing < len(p.sizes):
            texts.append(f"{missing} frames without a finite reference energy left out of the energy MAE")
        leverage = self.scores.get("leverage", np.empty(0))
        # Every atom of a model that was never fitted to its training set has NaN.
        if not np.isfinite(leverage).all() and not np.isnan(leverage).all():
            texts.append(
                f"{np.count_nonzero(~np.isfinite(leverage))} atoms with NaN or Inf leverage left out of its mean"
            )
        return texts


def score(label: str, p: Predictions, calibration: Optional[Calibration]) -> ScoredModel:
    """Return predictions with their scores, calibrated first if a calibration is given."""
    if calibration is not None:
        p = calibrated(p, calibration)
    kept, error = np.ones(len(p.species), dtype=bool), None
    if p.labelled:
        kept = np.isfinite(p.reference_forces).all(-1)
        error = (p.reference_forces - p.forces)[kept]
    law = law_of(p.family, {name: values[kept] for name, values in p.parameters.items()}) if p.family else None
    energy_error = (p.reference_energy - p.energy) / p.sizes
    return ScoredModel(
        label=label,
        predictions=p,
        kept=kept,
        scores=score_atoms(error, law, None if p.leverage is None else p.leverage[kept]),
        species=p.species[kept],
        energy_error=energy_error[np.isfinite(energy_error)],
        calibration=calibration,
    )


def calibrated(p: Predictions, calibration: Calibration) -> Predictions:
    if p.calibration is not None:
        raise InputError(f"{p.path}: was calibrated already, with {p.calibration}; give the predictions without that")
    calibration.check(p.family, p.species, str(p.path), p.uq_model)
    calibration.check_frames(p.frames, str(p.path))
    assert p.family is not None
    factor, vectors = calibration.energy_factor, p.energy_error_vector
    return replace(
        p,
        parameters=calibration.apply_numpy(p.family, p.parameters, p.species),
        energy_uncertainty=factor * p.energy_uncertainty,
        energy_error_vector=None if vectors is None else factor * vectors,
    )
