"""Fit of the leverage: moments of the features from training atoms, constants from configurations with forces.

The adapters do it at the end of a training, ``e2ip fit`` for any model. It needs one pass over the training set without
forces, two over the validation set, and one over a subset of the training set
(`e2ip_plugins.fitting.sample.training_subset`) for its errors. ``e2ip update`` fits the constants alone, to new
configurations. Nothing of it depends on a seed. Only rounding, the choice of that subset and, where there are more
atoms or frames than are kept (`e2ip_plugins.fitting.sample`), which of them these are depend on the order of the data.
Memory does not grow with the number of frames.
"""

import math
from pathlib import Path
from typing import Dict, Iterable, NamedTuple, Optional, Sequence, Tuple, cast

import numpy as np
import torch
from torch import Tensor

from e2ip_plugins.errors import InputError, plural
from e2ip_plugins.families.interface import Family
from e2ip_plugins.fitting import force_errors
from e2ip_plugins.fitting.constants import FittedConstants, PreviousFit, Samples
from e2ip_plugins.fitting.energies import EnergyResiduals, fit_energies
from e2ip_plugins.fitting.force_errors import AtomTable, ForceErrors, by_head, kinds_of, parameters_of
from e2ip_plugins.fitting.records import TRAINING, TRAINING_ERRORS, Records, recorded
from e2ip_plugins.fitting.report import FEW_CONFIGURATIONS, FitReport, species_name
from e2ip_plugins.fitting.training_atoms import Record, TrainingAtoms, TrainingBatch
from e2ip_plugins.leverage.form import FORM, LeverageForm
from e2ip_plugins.leverage.module import Leverage
from e2ip_plugins.predictions.labelled import LabelledFrame
from e2ip_plugins.readout.readout import Readout
from e2ip_plugins.readout.trunk import Trunk


def is_constant(readout: Readout) -> bool:
    """Return whether no coefficient of a readout depends on features: what a fit gives a model without a readout."""
    return not any(bool(cast(Trunk, trunk).out.weight.any()) for trunk in readout.trunks)


def check_update(readout: Readout, frames: Sequence[LabelledFrame], path: Path) -> None:
    """Raise `InputError` where the constants of a readout in the file ``path`` cannot be fitted to new frames."""
    if not readout.family.takes_support:
        raise InputError(
            f"{path}: the uncertainty of its readout '{readout.family_name}' does not grow with the leverage, so that "
            "there are no constants to be updated; e2ip calibrate scales any uncertainty"
        )
    number = sum(bool(np.isfinite(frame.counted_forces).all(-1).any()) for frame in frames)
    if number < FEW_CONFIGURATIONS:
        raise InputError(
            f"--frames: {plural(number, 'frame')} with reference forces; an update needs "
            f"{FEW_CONFIGURATIONS}, and 20 to 50 are better"
        )


def fit_leverage(
    readout: Readout,
    training: Optional[Iterable[TrainingBatch]],
    validation: Iterable[ForceErrors],
    species: Sequence[str] = (),
    constant_readout: bool = False,
    training_errors: Iterable[ForceErrors] = (),
    form: LeverageForm = FORM,
    heads: Sequence[str] = (),
    energies: Optional[Iterable[Optional[EnergyResiduals]]] = None,
    records: Optional[Records] = None,
) -> FitReport:
    """Fit the leverage of a readout, and with it the constants of a family that takes it.

    Parameters
    ----------
    readout : Readout
        Its buffers are filled in place.
    training : iterable
        Taking the next item runs the model, and with it the readout, on the next batch of training atoms. Features and
        outputs are not returned: `last_call_of` records them. Without training atoms (None), a leverage that was
        fitted before keeps what these say, moments and surplus, and all else is fitted anew.
    validation : iterable of ForceErrors
        The same for validation atoms. Not taken for families that do not take the leverage.
    species, heads : sequence of str
        Names of the model's species and heads, for messages.
    constant_readout : bool
        For a readout whose trunks are constant (`Trunk.make_constant`): fit its 0e coefficients, too, and a scale for
        every species. This is what a model gets that was trained without a readout.
    training_errors : iterable of ForceErrors
        Like ``validation``, of training configurations, see `e2ip_plugins.fitting.sample.training_subset`: their errors
        say how much the network is overfitted. Those without forces do not count; without any the optimism is 0.
    form : LeverageForm
        For studies: what the fit uses. The passes of the model, and predictions, always use `FORM`; to change it, edit
        the default in `LeverageForm` and fit again.
    energies : iterable of EnergyResiduals or None, optional
        The validation set once more, for the error bars of energies: taken last, when forces have theirs. None: these
        are not fitted.
    records : Records, optional
        Where what is made of batches is kept, so that a killed fit goes on. All batches are then
        `e2ip_plugins.fitting.batches.Pass` es. Of a part of a fit only the pass over the training set is done.

    Raises
    ------
    InputError
        Training set without atoms, features that are not finite, validation set without forces.
    """
    leverage, report = readout.leverage, FitReport(heads=heads)
    if training is None:
        leverage.fitted.fill_(False)
    else:
        leverage.reset()
        # For species and heads without atoms to fit them to.
        for buffer in (leverage.centres, leverage.log_factor, leverage.surplus):
            buffer.zero_()
        leverage.growth.fill_(form.prior_growth)
        atoms = _training_atoms(readout, training, records)
        if records is not None and records.is_part:
            report.part = int(atoms.count.sum())
            return report
        _fit_moments(readout, atoms, report, form)
        report.warn_of_species(leverage.centres.shape[1], species)
    if readout.family.takes_support:
        # Until ``fitted`` is True the family predicts as in training; `Support.distance` is that of the moments.
        tables = by_head(force_errors.collect_validation(readout, validation, report, species, records))
        of_training, _ = force_errors.collect_errors(readout, training_errors, TRAINING_ERRORS, records)
        training_tables = by_head(of_training)
        for head, table in tables.items():
            previous = _previous_fit(leverage, head) if training is None else None
            if previous is None:
                report.warn_of_unlike(head, table["distance"])
            atoms_of = _AtomsOfHead(head, table, training_tables.get(head), form, previous)
            if constant_readout:
                constants, std = _fit_constant_readout(readout, atoms_of)
                report.species_std[head] = {species_name(kind, species): value for kind, value in std.items()}
            else:
                constants = _fit_growth_and_scale(readout, atoms_of)
            report.constants[head] = constants
            leverage.growth[head], leverage.surplus[head] = constants.growth, constants.surplus
        report.warn_of_constants(constant_readout, form.prior_growth)
    leverage.fitted.fill_(True)
    if energies is not None:
        fit_energies(readout, energies, report, species, records)
        report.warn_of_energies()
    return report


def _training_atoms(readout: Readout, training: Iterable[TrainingBatch], records: Optional[Records]) -> TrainingAtoms:
    """Run a model over training atoms, and return their features."""
    atoms = TrainingAtoms(len(readout.leverage.centres))
    with force_errors.last_call_of(readout) as call:

        def make(batch: TrainingBatch) -> Record:
            # The forward pass that made ``batch`` has just filled ``call``.
            log_own = torch.zeros(len(call["kinds"]))
            if readout.family.takes_support:
                log_own = readout.family.log_variance(parameters_of(readout, call["outputs"])).cpu()
            return atoms.record(call["scalars"], call["kinds"], log_own, batch)

        for record in recorded(records, TRAINING, training, make):
            atoms.take(record)
    return atoms


def _fit_moments(readout: Readout, atoms: TrainingAtoms, report: FitReport, form: LeverageForm) -> None:
    """Fill the buffers that follow from features of training atoms."""
    leverage = readout.leverage
    atoms.gather()
    if not atoms.count.any():
        raise InputError("the training set has no atoms: there is nothing to fit the leverage to")
    weights = atoms.store(leverage, form)
    per_head = leverage.species_per_head()
    report.atoms = {divmod(kind, per_head): int(atoms.count[kind]) for kind in weights}
    report.shrinkage = {divmod(kind, per_head): weight for kind, weight in weights.items()}
    report.regions = int(leverage.regions().sum())


def _previous_fit(leverage: Leverage, head: int) -> PreviousFit:
    """Return what the previous fit has put into the leverage."""
    log_scale = leverage.log_factor.cpu().double().clone().numpy()
    return PreviousFit(float(leverage.growth[head]), float(leverage.surplus[head]), log_scale)


class _AtomsOfHead(NamedTuple):
    """What the constants of a head are fitted to: errors in the validation set and the training set."""

    head: int
    validation: AtomTable
    training: Optional[AtomTable]
    form: LeverageForm
    previous: Optional[PreviousFit]


def _fit_growth_and_scale(readout: Readout, atoms: _AtomsOfHead) -> FittedConstants:
    """Return the constants, and put what is by kind into the leverage's buffers."""
    head, table, training, form, previous = atoms
    family = readout.family
    validation_atoms = Samples(family, parameters_of(readout, table), table, form, previous)
    training_atoms = Samples(family, parameters_of(readout, training), training, form) if training else None
    constants = validation_atoms.fit(training_atoms)
    readout.leverage.log_factor[kinds_of(readout.leverage, head)] = constants.log_scale
    return constants


def _fit_constant_readout(readout: Readout, atoms: _AtomsOfHead) -> Tuple[FittedConstants, Dict[int, float]]:
    """Fit the 0e coefficients that the trunk gives to every atom, too, and a scale for every species.

    Also returns the standard deviation at leverage 1 by species, in eV/Å.
    """
    leverage, family = readout.leverage, readout.family
    head, table, training, form, previous = atoms

    def fitted(scalars: Tuple[float, ...]) -> Tuple[FittedConstants, Dict[int, float], float, float]:
        coefficients = torch.zeros(1, family.num_columns(), dtype=torch.float64)
        coefficients[0, : family.num_scalars] = torch.tensor(scalars, dtype=torch.float64)
        outputs = family(coefficients, readout.force_unit.double().cpu())
        validation_atoms = _samples_of_constant_readout(family, outputs, table, form, previous)
        training_atoms = _samples_of_constant_readout(family, outputs, training, form, None) if training else None
        constants, log_scale = validation_atoms.fit_by_species(training_atoms)
        return constants, log_scale, float(validation_atoms.log_own[0]), float(validation_atoms.law.total_std()[0])

    trunk, candidates = cast(Trunk, readout.trunks[head]), family.constant_scalars()
    if previous is not None:  # few configurations do not tell how heavy the tails are
        candidates = (tuple(trunk.out.bias[: family.num_scalars].tolist()),)
    fits = {scalars: fitted(scalars) for scalars in candidates}
    best = min(fits, key=lambda scalars: fits[scalars][0].nll[1])
    constants, log_scale, log_own, std = fits[best]
    kinds, before = kinds_of(leverage, head), np.zeros(len(leverage.log_factor))
    if previous is None:
        trunk.make_constant(best)
        leverage.log_variance[kinds] = log_own
    else:
        before = previous.log_scale
    # A species that only the training set has gets the mean of the others, or changes as they do.
    log_factor = before[kinds] + np.mean([value - before[kind] for kind, value in log_scale.items()])
    leverage.log_factor[kinds] = torch.from_numpy(log_factor).to(leverage.log_factor)
    for kind, value in log_scale.items():
        leverage.log_factor[kind] = value
    per_head = leverage.species_per_head()
    return constants, {kind % per_head: std * math.exp(0.5 * value) for kind, value in log_scale.items()}


def _samples_of_constant_readout(
    family: Family, outputs: Dict[str, Tensor], table: AtomTable, form: LeverageForm, previous: Optional[PreviousFit]
) -> Samples:
    """Return samples of atoms that all have the same parameters."""
    atoms = len(table["residual"])
    parameters = {key.name: outputs[key.name].expand(atoms, *key.shape).numpy() for key in family.parameter_keys}
    log_own = family.log_variance({name: torch.from_numpy(values) for name, values in parameters.items()})
    typical = {"typical": log_own.numpy(), "around": np.zeros(atoms)}
    return Samples(family, parameters, {**table, **typical}, form, previous)
