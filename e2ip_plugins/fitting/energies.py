"""The constants of `e2ip_plugins.leverage.energies`, from energies and stresses of validation frames."""

import math
from typing import Any, Dict, Iterable, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor

from e2ip_plugins.fitting.force_errors import kinds_of, last_call_of
from e2ip_plugins.fitting.records import Records, recorded
from e2ip_plugins.fitting.report import FitReport, species_name
from e2ip_plugins.fitting.training_atoms import Record
from e2ip_plugins.leverage.energies import FLOOR
from e2ip_plugins.processes import gather_objects
from e2ip_plugins.readout.readout import Readout

#: Frames whose energy errors must differ: one error has no spread.
LEAST_FRAMES = 2

#: An offset per atom is one where it is so many times the errors that it leaves. Energies of another reference differ
#: by electronvolts an atom, those of a model that has just been trained by less than they scatter.
OFFSET = 5.0

#: So many degrees of freedom must be left for that, because a few errors are alike by chance. With fewer, errors of so
#: many eV an atom are taken for an offset.
LEAST_FREE, LARGE = 5, 0.5


class EnergyResiduals(NamedTuple):
    """Energy errors of a batch of frames.

    Attributes
    ----------
    residual : (F,)
        Reference minus predicted total energy in eV; frames with one that is not finite are left out.
    frames : (N,) int
        Frame of every atom.
    stress : (F, 3, 3), optional
        Likewise of the stress in eV/Å³.
    volumes : (F,), optional
        In Å³.
    """

    residual: Tensor
    frames: Tensor
    stress: Optional[Tensor] = None
    volumes: Optional[Tensor] = None


class FittedStress(NamedTuple):
    """Fitted factors of stresses.

    Attributes
    ----------
    factors, errors : (float, float)
        Hydrostatic and deviatoric, and their standard errors.
    offset, offset_error : float
        Mean of reference minus predicted hydrostatic stress, a third of the trace, in eV/Å³, and its standard error.
    frames : int
    """

    factors: Tuple[float, float]
    errors: Tuple[float, float]
    offset: float
    offset_error: float
    frames: int


class FittedLength(NamedTuple):
    """A fitted length.

    Attributes
    ----------
    length, error : float
        ℓ and its standard error in Å.
    frames : int
    offset, spread : float
        Mean and standard deviation, over frames, of reference minus predicted energy, in eV per atom.
    """

    length: float
    error: float
    frames: int
    offset: float
    spread: float


#: Columns of frames by name: ``residual``, ``head``, ``counts`` (F, species), and what |u|² is made of, with f a
#: floor: |grown|² + 2 f (grown · level) + f² |level|².
_Table = Dict[str, np.ndarray]


def fit_energies(
    readout: Readout,
    batches: Iterable[Optional[EnergyResiduals]],
    report: FitReport,
    species: Sequence[str] = (),
    records: Optional[Records] = None,
) -> None:
    """Fit the lengths of all heads, which stay as they are (0, unless fitted before) where it is impossible.

    The report says why.

    ℓ is that of largest likelihood for errors that are Gaussian with standard deviation |u|.

    Parameters
    ----------
    readout : Readout
        With a fitted leverage; filled in place.
    batches : iterable of EnergyResiduals or None
        Taking the next item runs the model, and with it the readout, on the next frames; None: they have no energies.
    report : FitReport
    species : sequence of str
        Names of the model's species, for messages.
    records : Records, optional
    """
    energies = readout.leverage.energies
    table, log_std = _collect(readout, batches, records)
    for head in report.fitted_heads:
        chosen = table["head"] == head if table else np.zeros(0, bool)
        frames = {name: values[chosen] for name, values in table.items()}
        problem = _problem(frames, int(chosen.sum()), species)
        if problem:
            fitted_before = bool(energies.lengths[:, kinds_of(readout.leverage, head)].any())
            text = "error bars of energies stay as they were" if fitted_before else "no error bars of energies"
            report.warnings.append(f"{text}{report.of_head(head)}: {problem}")
            continue
        total, atoms = log_std[head]
        floor = FLOOR * math.exp(total / atoms)
        squares = frames["grown"] + 2.0 * floor * frames["mixed"] + floor**2 * frames["level"]
        length, error = _factor(frames["residual"] ** 2 / squares)
        per_atom = frames["residual"] / frames["counts"].sum(1)
        offset, spread = float(per_atom.mean()), float(per_atom.std(ddof=1))
        report.energies[head] = FittedLength(length, error, len(squares), offset, spread)
        energies.set_head(head, length, floor)
        fitted = _fit_stress(frames, length * np.sqrt(squares))
        if fitted is not None:
            if not len(energies.stress_factors):
                energies.make_stress_factors()
            energies.stress_factors[head] = energies.stress_factors.new_tensor(fitted.factors)
            report.stresses[head] = fitted


def _collect(
    readout: Readout, batches: Iterable[Optional[EnergyResiduals]], records: Optional[Records]
) -> Tuple[_Table, np.ndarray]:
    """Return a table of frames, and by head sum and number of the logarithms of σ, the same in every process."""
    with last_call_of(readout) as call, torch.no_grad():

        def make(errors: Optional[EnergyResiduals]) -> Record:
            return {} if errors is None else _columns(readout, call, errors)

        parts = [part for part in recorded(records, "energies", batches, make) if part]
    log_std = np.zeros((len(readout.leverage.energies.floors), 2))
    for part in parts:
        log_std += part.pop("log_std")
    gathered = gather_objects((parts, log_std))
    tables = [table for of_process, _ in gathered for table in of_process]
    names = tables[0] if tables else {}
    joined = {name: np.concatenate([table[name] for table in tables]) for name in names}
    return joined, np.sum([sums for _, sums in gathered], axis=0)


def _columns(readout: Readout, call: Dict[str, Any], errors: EnergyResiduals) -> Record:
    """Return the columns of a batch that the model has been run on, and by head sum and number of ln σ."""
    energies, per_head = readout.leverage.energies, readout.leverage.species_per_head()
    support, kinds, count = call["support"], call["kinds"], len(errors.residual)
    lacking = torch.zeros(count, dtype=torch.bool, device=kinds.device)
    lacking[errors.frames[readout.leverage.regions()[kinds] == 0]] = True
    std = torch.linalg.vector_norm(call["outputs"]["forces_uncertainty"], dim=-1)
    std, species = std.to(support.whitened.dtype), kinds % per_head
    grown = energies.amplitudes(support, std, torch.zeros_like(std), readout.family.takes_support)
    vectors = [
        energies.sums(support.whitened, amplitudes, species, errors.frames, count).double()
        for amplitudes in (grown, torch.ones_like(std))
    ]
    heads = torch.zeros(count, dtype=torch.long, device=kinds.device)
    heads[errors.frames] = call["heads"]
    composition = torch.zeros(count, per_head, dtype=torch.double, device=kinds.device)
    composition.index_put_((errors.frames, species), torch.ones_like(std).double(), accumulate=True)
    columns = {
        **{"residual": errors.residual, "head": heads, "counts": composition},
        **{"grown": vectors[0].square().sum(1), "level": vectors[1].square().sum(1)},
        "mixed": (vectors[0] * vectors[1]).sum(1),
    }
    stress = torch.full((count, 3, 3), float("nan"), dtype=torch.double, device=kinds.device)
    columns["stress"] = stress if errors.stress is None else errors.stress.double()
    columns["volumes"] = stress[:, 0, 0] if errors.volumes is None else errors.volumes.double()
    usable = torch.isfinite(errors.residual) & ~lacking
    table = {name: values[usable].detach().cpu().numpy() for name, values in columns.items()}
    logarithms, log_std = (std.double() * energies.per_component).log(), np.zeros((len(energies.floors), 2))
    for head in range(len(log_std)):
        of_head = logarithms[(call["heads"] == head) & torch.isfinite(logarithms)]
        log_std[head] = float(of_head.sum()), len(of_head)
    return {**table, "log_std": log_std}


def _fit_stress(frames: _Table, std: np.ndarray) -> Optional[FittedStress]:
    """Return the factors for frames whose energies have these standard deviations (F,); None without stresses.

    What the errors of all frames have in common is no scatter.
    """
    chosen = np.isfinite(frames["stress"]).all((1, 2)) & (frames["volumes"] > 0.0)
    count = int(chosen.sum())
    if count < LEAST_FRAMES:
        return None
    stress, unit = frames["stress"][chosen], std[chosen] / frames["volumes"][chosen]
    pressure = np.trace(stress, axis1=1, axis2=2) / 3.0
    weight = unit**-2.0
    offset, offset_error = float((weight * pressure).sum() / weight.sum()), float(pressure.std(ddof=1) / count**0.5)
    deviatoric = stress - pressure[:, None, None] * np.eye(3)
    # One pressure; five components of the deviatoric part.
    hydrostatic = ((pressure - offset) / unit) ** 2 * count / (count - 1)
    rest = np.square(deviatoric).sum((1, 2)) / unit**2 / 5.0
    (first, first_error), (second, second_error) = _factor(hydrostatic), _factor(rest, degrees=5)
    return FittedStress((first, second), (first_error, second_error), offset, offset_error, count)


def _factor(ratios: np.ndarray, degrees: int = 1) -> Tuple[float, float]:
    """Return the factor on standard deviations, and its error, from squared errors in units of variances (F,)."""
    factor = math.sqrt(ratios.mean())
    # Of a Gaussian ratio, at least.
    spread = max(float(ratios.std(ddof=1) / ratios.mean()) if ratios.any() else 0.0, math.sqrt(2.0 / degrees))
    return factor, 0.5 * factor * spread / math.sqrt(len(ratios))


def _problem(frames: _Table, count: int, species: Sequence[str]) -> str:
    """Return why nothing can be fitted to the errors of some frames; empty if it can."""
    if not count:
        return "the validation set has no energies (e2ip fit takes their name as --energy-key)"
    if count < LEAST_FRAMES:
        return "the validation set has a single energy (under the name that --energy-key takes); give some dozens"
    if not np.abs(frames["residual"]).max():
        return "all validation energies are predicted exactly: are they predictions of this model?"
    offset = _offset(frames["counts"], frames["residual"])
    if offset is None:
        return ""
    listed = ", ".join(f"{species_name(int(kind), species)} {value:.4g}" for kind, value in offset.items())
    listed += " eV"
    if not offset:
        mean = frames["residual"].sum() / frames["counts"].sum()
        listed = f"{mean:.4g} eV an atom on average; these compositions do not tell it by species"
    return (
        f"the validation energies differ from the model's by the same amount for every atom of a species ({listed}), "
        "beside which they scatter little. They are of another reference than those of the training (isolated atoms, "
        "level of theory), or the model's atomic energies do not hold for these compositions, or its training was "
        "short. For error bars of differences, subtract that amount from the energies and fit again"
    )


def _offset(counts: np.ndarray, residual: np.ndarray) -> Optional[Dict[int, float]]:
    """Return the offset per atom by species if the errors (F,) of frames are one, beside which the rest is small.

    Empty where the frames' compositions do not tell how it is divided among species; None where it is no offset.
    """
    present = np.flatnonzero(counts.any(0))
    weight = 1.0 / np.sqrt(counts.sum(1))
    solution, _, rank, _ = np.linalg.lstsq(counts[:, present] * weight[:, None], residual * weight, rcond=None)
    free = len(residual) - int(rank)
    rest = (residual - counts[:, present] @ solution) * weight
    size = np.square(residual * weight).sum()
    if free < LEAST_FREE and np.median(np.abs(residual) * weight**2) < LARGE:
        return None
    if size <= OFFSET**2 * np.square(rest).sum() * len(residual) / max(free, 1):
        return None
    return dict(zip(present.tolist(), solution.tolist(), strict=True)) if rank == len(present) else {}
