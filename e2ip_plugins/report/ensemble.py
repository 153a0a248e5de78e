"""Predictions of an ensemble from those of its members: mean and covariance of their mixture."""

import hashlib
from itertools import combinations
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple

import ase.io
import numpy as np
import torch
from ase import Atoms

from e2ip_plugins.errors import InputError
from e2ip_plugins.families.ensemble import Ensemble
from e2ip_plugins.families.interface import force_views
from e2ip_plugins.families.laws import law_of
from e2ip_plugins.files import replacing
from e2ip_plugins.keys import ENERGY_UNCERTAINTY, FAMILY_KEY, LEVERAGE, MODEL_KEY, PREDICTED_KEY, UNFITTED, WEIGHT_KEYS
from e2ip_plugins.maths.spd import log_spd, matrix_to_sym6
from e2ip_plugins.predictions.fingerprints import STATE, force_sizes
from e2ip_plugins.predictions.prediction_files import Predictions
from e2ip_plugins.predictions.trajectories import read_all
from e2ip_plugins.readout.vanishing import ROUNDING
from e2ip_plugins.report.same_frames import read_same_frames

#: Least number of members whose sample covariance of three components may have full rank.
FULL_RANK_MEMBERS = 4

#: Standard deviation of atoms on which all members agree, in units of the others' (root mean square).
_AGREED = 1e-3


def moments(forces: np.ndarray, covariances: np.ndarray, epistemic: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    """Return aleatoric and epistemic part of the covariance of an equally weighted mixture (N, 3, 3).

    Law of total variance. The members' disagreement is epistemic; its denominator is K - 1, because members are a
    sample of what training may give.

    Parameters
    ----------
    forces : (K, N, 3)
        In eV/Å; K ≥ 2.
    covariances : (K, N, 3, 3)
        Of each member, zero for one without uncertainties, in eV²/Å².
    epistemic : (K, N, 3, 3)
        Epistemic parts of the covariances.
    """
    deviation = forces - forces.mean(0)
    spread = np.einsum("kni,knj->nij", deviation, deviation) / (len(forces) - 1)
    return (covariances - epistemic).mean(0), spread + epistemic.mean(0)


def energy_std(energies: np.ndarray, stds: np.ndarray) -> np.ndarray:
    """Return the standard deviations of the energies of an equally weighted mixture (F,), in eV.

    Law of total variance, as for forces (`moments`): variance of the means, with K - 1, plus mean of the variances.

    Parameters
    ----------
    energies, stds : (K, F)
        Energies of the members and their standard deviations in eV; K ≥ 2. NaN where a frame of a member has none.

    Examples
    --------
    >>> energy_std(np.array([[0.0], [2.0]]), np.array([[1.0], [3.0]])).round(4)
    array([2.6458])
    """
    return np.sqrt(energies.var(0, ddof=1) + np.square(stds).mean(0))


def combine(
    files: Sequence[Path],
    output: Path,
    ref_forces: Optional[str] = None,
    ref_energy: Optional[str] = None,
    isotropic: bool = False,
) -> List[str]:
    """Write the ensemble's predictions; return warnings.

    Parameters
    ----------
    files
        Predictions of K ≥ 2 members of any families, or of none, for the same frames.
    output
        extxyz file with ``forces``, the mean of the members' distributions; ``energy``; the parameters of `Ensemble`;
        covariances, of which each part is that of the members; references, where the members have some, as
        ``REF_forces`` and ``REF_energy``; the mean leverage of members that have one; ``energy_uncertainty`` if all
        members have it, without an error vector; and a ``uq_model`` if a member has one.
    isotropic : bool
        Whether every covariance is replaced by a third of its trace times the unit matrix: one number per atom, as
        committees are mostly used. A few members determine that better than the shape of a matrix.

    Raises
    ------
    InputError
        Fewer than two members, a member given twice, two of one ``uq_model``; files that cannot be read or are for
        different frames.
    """
    members = _read_members([Path(file) for file in files], ref_forces, ref_energy)
    warnings = _warnings(members, isotropic)
    means, covariances, epistemic = (np.stack(arrays) for arrays in zip(*map(_distribution, members), strict=True))
    parts = np.stack(moments(means, covariances, epistemic))
    warnings += _widen_agreed(parts, means, members[0])
    if isotropic:
        parts = np.trace(parts, axis1=2, axis2=3)[..., None, None] / 3.0 * np.eye(3)
    full = matrix_to_sym6(torch.from_numpy(parts.sum(0)))
    _, share = np.trace(parts, axis1=2, axis2=3) / np.trace(parts.sum(0), axis1=1, axis2=2)
    columns = {"ensemble_log_cov": log_spd(full).numpy(), "ensemble_epistemic_share": share}
    # The parts themselves: what follows from the parameters has the shape of the whole.
    columns |= {name: value.numpy() for name, value in force_views(*map(torch.from_numpy, parts)).items()}
    fitted = [m.leverage for m in members if m.leverage is not None and not np.isnan(m.leverage).all()]
    if fitted:
        columns[LEVERAGE.name] = np.nan_to_num(np.mean(fitted, axis=0), nan=UNFITTED, posinf=np.inf)
    columns["forces"] = means.mean(0)
    if members[0].labelled:
        columns["REF_forces"] = members[0].reference_forces
    energies = {"energy": np.mean([member.energy for member in members], axis=0)}
    energies["REF_energy"] = members[0].reference_energy
    if all(member.has_energy_uncertainties for member in members):
        stds = np.stack([member.energy_uncertainty for member in members])
        energies[ENERGY_UNCERTAINTY.name] = energy_std(np.stack([member.energy for member in members]), stds)
    _write(output, members[0], columns, energies, _name(members, isotropic))
    return warnings


def _read_members(files: List[Path], ref_forces: Optional[str], ref_energy: Optional[str]) -> List[Predictions]:
    """Return the members' predictions; `InputError` for fewer than two, and for copies of a member."""
    copies = "members that are copies say nothing of each other"
    if len(files) < 2:
        raise InputError(f"an ensemble has at least two members, got {len(files)}: give one prediction file for each")
    for i, file in enumerate(files):
        if any(file.exists() and other.exists() and file.samefile(other) for other in files[:i]):
            raise InputError(f"{file} is given twice; {copies}")
    members = read_same_frames(files, ref_forces, ref_energy, required=False)
    for other, member in combinations(members, 2):
        if member.uq_model and member.uq_model == other.uq_model:
            raise InputError(f"{other.path} and {member.path} are of one model, {member.uq_model}; {copies}")
        if member.uq_model is None and np.array_equal(member.forces, other.forces) and member.forces.any():
            raise InputError(f"{other.path} and {member.path} have the same forces, all of them; {copies}")
    return members


def _warnings(members: List[Predictions], isotropic: bool) -> List[str]:
    warnings = [f"{member.path}: {text}" for member in members for text in member.remarks]
    stock = [str(member.path) for member in members if member.family is None]
    if len(stock) == len(members) < FULL_RANK_MEMBERS and not isotropic:
        warnings.append(
            f"covariances of {len(members)} members have no full rank: variances and rankings mean something, NLL and "
            f"coverage do not; take {FULL_RANK_MEMBERS} members or more, --isotropic, or calibrate with a floor"
        )
    calibrated = [str(member.path) for member in members if member.calibration is not None]
    if 0 < len(calibrated) < len(members):
        warnings.append(f"{', '.join(calibrated)}: calibrated, while other members are not")
    if 0 < len(stock) < len(members):
        warnings.append(
            f"{', '.join(stock)}: no uncertainties; counted as covariances of zero in the mean of the members'"
        )
    leverages = {str(member.path): member.leverage for member in members if member.leverage is not None}
    unfitted = [path for path, leverage in leverages.items() if np.isnan(leverage).all()]
    if 0 < len(unfitted) < len(leverages):
        warnings.append(f"{', '.join(unfitted)}: leverage never fitted; the ensemble's is the mean of the others'")
    return warnings


def _widen_agreed(parts: np.ndarray, forces: np.ndarray, frames: Predictions) -> List[str]:
    """Give atoms on which all members agree a small epistemic covariance, in place; return a warning, if any.

    Raises
    ------
    InputError
        Members agree on an atom whose force does not vanish, or on all atoms.
    """
    same = ~parts.any((0, 2, 3))
    # By symmetry every model predicts the same force, zero to rounding, of an isolated atom or a site in a crystal.
    suspect = same & (np.abs(forces) > ROUNDING).any((0, 2))
    if suspect.any() or same.all():
        suspect = suspect if suspect.any() else same
        first = frames.index[frames.frame_of_atom[np.argmax(suspect)]]
        raise InputError(
            f"{frames.path}: all members predict the same forces for {int(suspect.sum())} atoms, first in frame "
            f"{first}: are these files of different models?"
        )
    if not same.any():
        return []
    variance = np.trace(parts[:, ~same].sum(0), axis1=1, axis2=2).mean() / 3.0
    parts[1, same] = _AGREED**2 * variance * np.eye(3)
    return [
        f"{int(same.sum())} atoms whose force vanishes by symmetry (isolated atoms, perfect crystals), on which "
        f"all members agree: their standard deviation is {_AGREED:g} of the others'"
    ]


def _distribution(member: Predictions) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return mean (N, 3), covariance and its epistemic part (N, 3, 3).

    The mean differs from the forces where a family's distribution is shifted.
    """
    if member.family is None:
        none = np.zeros((len(member.species), 3, 3))
        return member.forces, none, none
    parameters = {name: torch.from_numpy(values) for name, values in member.parameters.items()}
    epistemic = member.family.derive(parameters)["forces_epistemic_cov"].numpy()
    law = law_of(member.family, member.parameters)
    return member.forces + law.mean(), law.covariance(), epistemic


def _name(members: Sequence[Predictions], isotropic: bool) -> Optional[str]:
    """Return a name that depends on the members and their calibrations, not on their order; None if none has one."""
    if all(member.uq_model is None for member in members):
        return None
    names = sorted(f"{member.uq_model} {member.calibration}" for member in members)
    names += ["isotropic"] if isotropic else []
    return f"ensemble-{hashlib.sha256(' '.join(names).encode()).hexdigest()[:12]}"


def _write(
    output: Path,
    frames: Predictions,
    columns: Dict[str, np.ndarray],
    energies: Dict[str, np.ndarray],
    uq_model: Optional[str],
) -> None:
    structures = read_all(frames.path, "extxyz")
    written = []
    for i, (number, rows) in enumerate(zip(frames.index, frames.atoms_of, strict=True)):
        structure = structures[number]
        atoms = Atoms(structure.numbers, structure.positions, cell=structure.cell, pbc=structure.pbc)
        atoms.info |= {name: structure.info[name] for name in (*STATE, *WEIGHT_KEYS) if name in structure.info}
        for name, values in columns.items():
            atoms.new_array(name, values[rows].reshape(len(atoms), *([-1] if values.ndim > 1 else [])))
        atoms.info |= {name: float(values[i]) for name, values in energies.items() if np.isfinite(values[i])}
        atoms.info |= {FAMILY_KEY: Ensemble.uq_family} | ({} if uq_model is None else {MODEL_KEY: uq_model})
        atoms.info[PREDICTED_KEY] = force_sizes(columns["forces"][rows])
        written.append(atoms)
    with replacing(output) as unfinished:
        ase.io.write(unfinished, written, format="extxyz")
