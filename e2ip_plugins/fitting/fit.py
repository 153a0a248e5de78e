"""Fit of the leverage: moments of the features from training atoms, constants from configurations with forces.

Hosts do it at the end of a training, ``e2ip fit`` for any model. It needs one pass over the training set without
forces, one over the validation set, and one over some training configurations (`some`) for their errors. Nothing of it
depends on a seed or on the order of the data, but for rounding, for which training configurations are those, and, in
species with more than `MAX_ATOMS` atoms, for which of them are kept.
"""

import math
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor

from e2ip_plugins.errors import InputError
from e2ip_plugins.families.interface import Family
from e2ip_plugins.fitting.constants import PRIOR_GROWTH, Constants, Samples
from e2ip_plugins.fitting.training_atoms import RIDGE, TrainingAtoms, distributed
from e2ip_plugins.leverage.form import FAR, Support
from e2ip_plugins.leverage.module import Leverage
from e2ip_plugins.readout.readout import Readout
from e2ip_plugins.scores import references

#: Validation configurations below which a warning says that they are few: of ten, a factor on the variance is known to
#: a tenth (docs/calibrate.md).
FEW = 10

#: Training configurations for each of the validation set, about, whose errors are compared with those there.
TRAINING_PER_VALIDATION = 4

#: What to do with a model that was not fitted at the end of its training.
WAY_OUT = "fit it: e2ip fit MODEL --train … --valid … --output FITTED"

#: Rise of the NLL on validation configurations, in nats per atom, that is worth a warning.
WORSE = 0.1


@dataclass
class Labelled:
    """Predictions for a batch of validation atoms, or of training atoms whose errors are compared with those.

    Attributes
    ----------
    residual : (N, 3)
        Reference minus predicted forces in eV/Å; atoms with one that is not finite are left out, as are those of a
        species without training atoms.
    frames : (N,) int
        Configuration of every atom, counted from 0 in each batch.
    forces : (N, 3), optional
        Predicted, in eV/Å: atoms whose force vanishes by symmetry are left out, see `vanishing`.
    """

    residual: Tensor
    frames: Tensor
    forces: Optional[Tensor] = None


@dataclass
class Report:
    """What a fit found.

    Attributes
    ----------
    atoms : dict
        Training atoms by (head, species).
    shrinkage : dict
        Weight of the pooled moments in those of species with few atoms.
    constants : dict
        `Constants` by head; empty for families that do not take the leverage.
    regions : int
        Of all species.
    warnings : list of str
    species_std : dict
        By head and name of the species, standard deviation at leverage 1 in eV/Å, where a readout that knows the
        species alone was fitted.
    """

    atoms: Dict[Tuple[int, int], int] = field(default_factory=dict)
    shrinkage: Dict[Tuple[int, int], float] = field(default_factory=dict)
    constants: Dict[int, Constants] = field(default_factory=dict)
    regions: int = 0
    warnings: List[str] = field(default_factory=list)
    species_std: Dict[int, Dict[str, float]] = field(default_factory=dict)

    def lines(self, heads: Sequence[str] = ()) -> List[str]:
        """The fit in words, one line per data set."""
        data_sets, species = {head for head, _ in self.atoms}, {kind for _, kind in self.atoms}
        lines = [
            f"leverage: features of {sum(self.atoms.values())} training atoms, {len(species)} species"
            + (f" of {len(data_sets)} heads" if len(data_sets) > 1 else "")
            + f" in {self.regions} regions"
        ]
        for head, c in self.constants.items():
            where = f" (head {heads[head]})" if len(self.constants) > 1 and heads else ""
            low, high = c.growth_interval
            factor, error = math.exp(0.5 * c.log_scale), 0.5 * c.log_scale_error
            size = f"standard deviation times {factor:.3g} +- {error * factor:.2g} at leverage 1"
            if head in self.species_std:
                listed = ", ".join(f"{name} {std:.3g}" for name, std in self.species_std[head].items())
                size = f"standard deviation at leverage 1 {listed} eV/Å, all together +- {error:.0%}"
            lines.append(
                f"leverage{where}: growth {c.growth:.3g} ({low:.2g} to {high:.2g}), {size}; NLL on "
                f"{c.configurations} validation configuration{'s' * (c.configurations != 1)}, "
                f"{c.nll[0]:.3f} -> {c.nll[1]:.3f}"
                + (" (higher: the growth is for frames unlike them)" if c.nll[1] > c.nll[0] else "")
            )
            ratio = math.exp(0.5 * c.optimism)
            if ratio > 1.0:
                lines.append(
                    f"leverage{where}: errors {ratio:.3g} +- {0.5 * c.optimism_error * ratio:.2g} times those of "
                    "training atoms of equal uncertainty: more growth on what is strange"
                )
        return lines


@contextmanager
def seen_by(readout: Readout) -> Iterator[Dict[str, Any]]:
    """What the readout's last call was given and gave: scalars, kinds, heads, support, outputs."""
    seen: Dict[str, Any] = {}

    def of_leverage(module: Any, inputs: Tuple[Any, ...], support: Support) -> None:
        scalars, species, heads = inputs[0], inputs[1], inputs[2]
        heads = torch.zeros_like(species) if heads is None or len(module.growth) == 1 else heads
        support = Support(*(value.detach() for value in support))
        seen.update(
            scalars=scalars.detach(), kinds=heads * module.species_per_head() + species, heads=heads, support=support
        )

    def of_readout(module: Any, inputs: Any, outputs: Dict[str, Tensor]) -> None:
        seen["outputs"] = {name: value.detach() for name, value in outputs.items()}

    handles = [readout.leverage.register_forward_hook(of_leverage), readout.register_forward_hook(of_readout)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def is_constant(readout: Any) -> bool:
    """Whether nothing of a readout's coefficients depends on features: what a fit gives a model without a readout."""
    return not any(bool(trunk.out.weight.any()) for trunk in readout.trunks)


def in_words(error: Exception) -> str:
    """Why a fit at the end of a training failed, for a warning."""
    if isinstance(error, InputError):
        return str(error)
    return f"{type(error).__name__}: {error}; what is wrong put right, {WAY_OUT}"


def some(training: int, validation: int) -> range:
    """Which of so many training configurations to compare with so many of the validation set, in `fit_leverage`."""
    return range(0, training, max(1, training // max(1, TRAINING_PER_VALIDATION * validation)))


def fit_leverage(
    readout: Readout,
    training: Iterable[Optional[Tensor]],
    validation: Iterable[Labelled],
    species: Sequence[str] = (),
    constant: bool = False,
    ridge: float = RIDGE,
    known: Iterable[Labelled] = (),
) -> Report:
    """Fit the leverage of a readout, and with it the constants of a family that takes it.

    Parameters
    ----------
    readout : Readout
        Its buffers are filled in place.
    training : iterable
        Taking the next item runs the model, and with it the readout, on the next batch of training atoms; it is the
        mask (N,) of those that count, or None: all of them.
    validation : iterable of Labelled
        The same for validation atoms. Not taken for families that do not take the leverage.
    species : sequence of str
        Names of the model's species, for messages.
    constant : bool
        For a readout whose trunks are constant (`Trunk.make_constant`): fit its 0e coefficients, too, and a scale for
        every species. This is what a model gets that was trained without a readout.
    ridge : float
        See `RIDGE`.
    known : iterable of Labelled
        Like ``validation``, of training configurations, see `some`: their errors say how much the network knows by
        heart. Those without forces do not count; without any it is taken to be nothing.

    Raises
    ------
    InputError
        Training set without atoms, features that are not finite, validation set without forces.
    """
    leverage, report = readout.leverage, Report()
    leverage.reset()
    # For species and heads without atoms to fit them to.
    for buffer in (leverage.centres, leverage.log_factor, leverage.surplus):
        buffer.zero_()
    leverage.growth.fill_(PRIOR_GROWTH)
    atoms = TrainingAtoms(len(leverage.centres))
    with seen_by(readout) as seen:
        for counted in training:
            log_variance = torch.zeros(len(seen["kinds"]))
            if readout.family.takes_support:
                parameters = {key.name: seen["outputs"][key.name] for key in readout.family.parameter_keys}
                log_variance = readout.family.log_variance(parameters).cpu()
            chosen = slice(None) if counted is None else counted.cpu()
            atoms.add(seen["scalars"].cpu()[chosen], seen["kinds"].cpu()[chosen], log_variance[chosen])
    atoms.gather()
    if not atoms.count.any():
        raise InputError("the training set has no atoms: there is nothing to fit the leverage to")
    weights = atoms.store(leverage, ridge)
    per_head = leverage.species_per_head()
    report.atoms = {divmod(kind, per_head): int(atoms.count[kind]) for kind in weights}
    report.shrinkage = {divmod(kind, per_head): weight for kind, weight in weights.items()}
    report.regions = int(leverage.regions().sum())
    report.warnings += _warnings(report, leverage, species)
    if readout.family.takes_support:
        tables = _by_head(_of_validation(readout, validation, report))
        tables_known = _by_head(_collect(readout, known)[0])
        for head, table in tables.items():
            if constant:
                found, by_kind = _fit_constant(readout, head, table, tables_known.get(head))
                report.species_std[head] = {_name(kind % per_head, species): std for kind, std in by_kind.items()}
            else:
                found = _fit_trained(readout, head, table, tables_known.get(head))
            report.constants[head] = found
            leverage.growth[head], leverage.surplus[head] = found.growth, found.surplus
        for found in report.constants.values():
            if found.configurations < FEW:
                report.warnings.append(
                    f"{found.configurations} validation configuration{'s' * (found.configurations != 1)} can hardly "
                    "tell how large the error bars must be: give some dozens"
                )
            # The growth being for frames unlike them, they may be described a little worse, which the report shows.
            if not constant and found.nll[1] > found.nll[0] + WORSE:
                report.warnings.append(
                    f"the validation configurations ({found.configurations}) are described worse than without leverage "
                    f"(NLL {found.nll[0]:.3f} -> {found.nll[1]:.3f}): are they few, or unlike what the model was "
                    "trained on?"
                )
        lacking = sorted({head for head, _ in report.atoms} - set(report.constants))
        if lacking:
            report.warnings.append(
                f"no validation atoms with forces for head {', '.join(map(str, lacking))}: the growth is the expected "
                f"{PRIOR_GROWTH:g}, the standard deviation at leverage 1 as it was trained"
            )
    leverage.fitted.fill_(True)
    return report


def _name(kind: int, species: Sequence[str]) -> str:
    return species[kind] if kind < len(species) else f"species {kind}"


def _warnings(report: Report, leverage: Leverage, species: Sequence[str]) -> List[str]:
    found, features = [], leverage.centres.shape[1]
    few = sorted({kind for (_, kind), count in report.atoms.items() if count < features})
    if few:
        listed = ", ".join(
            f"{_name(key[1], species)} ({count} atoms, {report.shrinkage[key]:.0%} of the moments from all species)"
            for key, count in sorted(report.atoms.items())
            if count < features
        )
        found.append(f"fewer training atoms than features ({features}): {listed}")
    missing = [_name(kind, species) for kind in range(len(species)) if kind not in {kind for _, kind in report.atoms}]
    if missing:
        found.append(
            f"no training atoms of {', '.join(missing)}: their leverage is {FAR:g}, their epistemic variance at its "
            "ceiling"
        )
    return found


def _collect(readout: Readout, batches: Iterable[Labelled]) -> Tuple[Dict[str, np.ndarray], int]:
    """Run batches; what their atoms are, the same in every process of a distributed training.

    Also returns the number of configurations that were left out for species without training atoms.
    """
    parts: List[Dict[str, np.ndarray]] = []
    frames = left_out = 0
    with seen_by(readout) as seen:
        for batch in batches:
            # What a species without training atoms does to its neighbours says nothing about those that have some.
            known = readout.leverage.regions()[seen["kinds"]] > 0
            supported = torch.ones(int(batch.frames.max()) + 1, dtype=torch.bool, device=known.device)
            supported[batch.frames[~known]] = False
            usable = torch.isfinite(batch.residual).all(-1) & supported[batch.frames]
            left_out += int((~supported).sum())
            if batch.forces is not None:
                zero = references.vanishing(batch.forces.detach().cpu().numpy(), batch.residual.detach().cpu().numpy())
                usable &= ~torch.from_numpy(zero).to(usable.device)
            support = seen["support"]
            part = {key.name: seen["outputs"][key.name] for key in readout.family.parameter_keys}
            part |= {"residual": batch.residual, "frames": batch.frames + frames}
            part |= {"heads": seen["heads"], "kinds": seen["kinds"]}
            part |= {"distance": support.distance, "typical": support.log_variance}
            part |= {"forces": torch.full_like(batch.residual, np.nan) if batch.forces is None else batch.forces}
            parts.append({name: value[usable].detach().cpu().numpy() for name, value in part.items()})
            frames += int(batch.frames.max()) + 1
    parts, left_out = _from_all_processes(parts, left_out)
    names = parts[0] if parts else {}
    return {name: np.concatenate([part[name] for part in parts]).astype(np.float64) for name in names}, left_out


def _of_validation(readout: Readout, validation: Iterable[Labelled], report: Report) -> Dict[str, np.ndarray]:
    """Atoms of the validation set, each configuration once; `InputError` if they say nothing."""
    table, left_out = _collect(readout, validation)
    if not table or not len(table["residual"]):
        raise InputError(
            "the validation set has no configuration with finite reference forces whose species the training set has, "
            "or all forces vanish by symmetry (isolated atoms, perfect crystals): the constants of evidence mode "
            "'leverage' are fitted to those; give it such configurations"
        )
    if not np.abs(table["residual"]).max():
        raise InputError(
            "all validation errors are zero: there is nothing to fit to; give other validation configurations"
        )
    if left_out:
        report.warnings.append(f"{left_out} validation configurations left out: the training set lacks their species")
    copies = _copies(table)
    if copies:
        report.warnings.append(
            f"{len(copies)} validation configuration{'s are' if len(copies) > 1 else ' is'} there more than once, and "
            "count once"
        )
        once = ~np.isin(table["frames"], copies)
        table = {name: values[once] for name, values in table.items()}
    told = np.isfinite(table["forces"]).all(-1)
    doubt = references.doubt((table["residual"] + table["forces"])[told], table["forces"][told])
    report.warnings += [f"validation set: {doubt}"] if doubt else []
    return table


def _by_head(table: Dict[str, np.ndarray]) -> Dict[int, Dict[str, np.ndarray]]:
    of_head = {int(head): table["heads"] == head for head in np.unique(table["heads"])} if table else {}
    return {head: {name: values[chosen] for name, values in table.items()} for head, chosen in of_head.items()}


def _copies(table: Dict[str, np.ndarray]) -> List[int]:
    """Configurations that were there before, with the same errors and leverages to the precision of a network."""
    frames, index = np.unique(table["frames"], return_inverse=True)
    bounds = np.searchsorted(np.sort(index), np.arange(len(frames) + 1))
    atoms = np.argsort(index, kind="stable")
    size = np.bincount(index, np.square(table["residual"]).sum(-1))
    found: List[int] = []
    last: List[int] = []
    # Copies are neighbours in this order.
    for i in np.argsort(size, kind="stable"):
        last = [j for j in last if size[i] - size[j] <= 1e-3 * size[i]]
        own = atoms[bounds[i] : bounds[i + 1]]
        if any(_alike(table, own, atoms[bounds[j] : bounds[j + 1]]) for j in last):
            found.append(int(frames[i]))
        else:
            last.append(i)
    return found


def _alike(table: Dict[str, np.ndarray], a: np.ndarray, b: np.ndarray) -> bool:
    return (
        len(a) == len(b)
        and all(np.array_equal(table[name][a], table[name][b]) for name in ("heads", "kinds"))
        and np.allclose(table["residual"][a], table["residual"][b], rtol=1e-3, atol=1e-4)
        and np.allclose(table["distance"][a], table["distance"][b], rtol=1e-3)
    )


def _samples(family: Family, parameters: Dict[str, np.ndarray], table: Dict[str, np.ndarray]) -> Samples:
    none = torch.zeros(1, dtype=torch.float64)
    support = Support(
        leverage=none,
        distance=torch.from_numpy(table["distance"]),
        growth=none,
        surplus=none,
        log_variance=torch.from_numpy(table["typical"]),
        log_scale=torch.zeros(len(table["distance"]), dtype=torch.float64),
        fitted=torch.tensor(True),
    )
    log_variance = family.log_variance({name: torch.from_numpy(values) for name, values in parameters.items()})
    frames, kinds = table["frames"].astype(int), table["kinds"].astype(int)
    return Samples(family.law(parameters), table["residual"], support, log_variance, frames, kinds)


def _fit_trained(
    readout: Readout, head: int, table: Dict[str, np.ndarray], known: Optional[Dict[str, np.ndarray]]
) -> Constants:
    """Constants, and what is by kind into the leverage's buffers."""
    family = readout.family

    def samples(table: Dict[str, np.ndarray]) -> Samples:
        return _samples(family, {key.name: table[key.name] for key in family.parameter_keys}, table)

    found = samples(table).fit(samples(known) if known else None)
    readout.leverage.log_factor[_kinds(readout.leverage, head)] = found.log_scale
    return found


def _constant_samples(family: Family, outputs: Dict[str, Tensor], table: Dict[str, np.ndarray]) -> Samples:
    """Of atoms that all have the same parameters."""
    atoms = len(table["residual"])
    parameters = {key.name: outputs[key.name].expand(atoms, *key.shape).numpy() for key in family.parameter_keys}
    variance = family.log_variance({name: torch.from_numpy(values) for name, values in parameters.items()})
    return _samples(family, parameters, {**table, "typical": variance.numpy()})


def _fit_constant(
    readout: Readout, head: int, table: Dict[str, np.ndarray], known: Optional[Dict[str, np.ndarray]]
) -> Tuple[Constants, Dict[int, float]]:
    """The same, with the 0e coefficients that the trunk gives to every atom and a scale for every species.

    Also returns the standard deviation at leverage 1 by kind, in eV/Å.
    """
    leverage, family = readout.leverage, readout.family
    best: Any = None
    for scalars in family.constant_scalars():
        coefficients = torch.zeros(1, family.num_columns(), dtype=torch.float64)
        coefficients[0, : family.num_scalars] = torch.tensor(scalars, dtype=torch.float64)
        outputs = family(coefficients, readout.force_unit.double().cpu())
        of_validation = _constant_samples(family, outputs, table)
        found, log_scale = of_validation.fit_by_species(_constant_samples(family, outputs, known) if known else None)
        if best is None or found.nll[1] < best[0].nll[1]:
            std = float(of_validation.law.total_std()[0])
            best = found, log_scale, scalars, float(of_validation.log_variance[0]), std
    found, log_scale, scalars, variance, std = best
    trunk: Any = readout.trunks[head]
    trunk.make_constant(scalars)
    # A species that only the training set has gets the mean of the others.
    leverage.log_factor[_kinds(leverage, head)] = float(np.mean(list(log_scale.values())))
    leverage.log_variance[_kinds(leverage, head)] = variance
    for kind, value in log_scale.items():
        leverage.log_factor[kind] = value
    return found, {kind: std * math.exp(0.5 * value) for kind, value in log_scale.items()}


def _kinds(leverage: Leverage, head: int) -> slice:
    species = leverage.species_per_head()
    return slice(head * species, (head + 1) * species)


def _from_all_processes(parts: List[Dict[str, np.ndarray]], left_out: int) -> Tuple[List[Dict[str, np.ndarray]], int]:
    if not distributed():
        return parts, left_out
    gathered: List[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, (parts, left_out))
    together, first = [], 0
    for own, _ in gathered:
        together += [{**part, "frames": part["frames"] + first} for part in own]
        first = max((int(part["frames"].max(initial=-1)) + 1 for part in together), default=first)
    return together, sum(number for _, number in gathered)
