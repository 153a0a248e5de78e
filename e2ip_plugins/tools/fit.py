"""Fit of the leverage: moments of the features from training atoms, two constants from validation configurations.

Hosts do it at the end of a training, ``e2ip fit`` for any model. It needs one pass over the training set without forces
and one over the validation set. Nothing of it depends on a seed or on the order of the data, but for rounding and, in
species with more than `MAX_ATOMS` atoms, for which of them are kept.
"""

import math
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Dict, Iterable, Iterator, List, Sequence, Tuple

import numpy as np
import torch
from scipy.cluster.vq import kmeans2
from scipy.optimize import minimize
from torch import Tensor

from e2ip_plugins.errors import InputError
from e2ip_plugins.families.interface import Family, Support, inflate
from e2ip_plugins.readout.leverage import FAR, Leverage
from e2ip_plugins.readout.readout import Readout

#: ρ of (C + ρ)⁻¹ in units of the mean variance of a feature.
RIDGE = 1e-5

#: A species has a region for every so many atoms per feature, at most so many; `MAX_REGIONS` for all species together.
ATOMS_PER_FEATURE, MAX_REGIONS_OF_SPECIES, MAX_REGIONS = 8, 16, 64

#: How much of its species' covariance enters that of a region: between two regions is not outside.
SHARED = 0.3

#: Atoms whose distance, by feature, is smaller on average are alike: hosts' features have seven digits.
ALIKE = 1e-6

#: Atoms of a kind that are kept, of many evenly spaced ones. More change moments of a few hundred features little.
MAX_ATOMS = 32768

#: Where the growth a is expected, and how many e-folds around it (docs/uncertainty.md): validation configurations come
#: from where the training set does and say little about it.
PRIOR_GROWTH, PRIOR_WIDTH = 2.5, 0.3
_STARTS = (PRIOR_GROWTH, 0.2)


@dataclass
class Labelled:
    """Predictions for a batch of validation atoms.

    Attributes
    ----------
    residual : (N, 3)
        Reference minus predicted forces in eV/Å; atoms with one that is not finite are left out, as are those of a
        species without training atoms.
    frames : (N,) int
        Configuration of every atom, counted from 0 in each batch.
    """

    residual: Tensor
    frames: Tensor


@dataclass
class Constants:
    """What was fitted for one data set of the host.

    Attributes
    ----------
    growth : float
        a; the standard deviation grows by 1 + a (h + h̄).
    growth_interval : tuple of float
        What the configurations leave open, one standard error up and down.
    log_scale : float
        Logarithm of the factor on the variance at leverage 1.
    log_scale_error : float
        Its standard error.
    nll : tuple of float
        Mean over configurations of the mean over atoms before and after, in nats for a density in (eV/Å)⁻³.
    configurations, atoms : int
        Number of those with finite reference forces.
    """

    growth: float
    growth_interval: Tuple[float, float]
    log_scale: float
    log_scale_error: float
    nll: Tuple[float, float]
    configurations: int
    atoms: int


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
    """

    atoms: Dict[Tuple[int, int], int] = field(default_factory=dict)
    shrinkage: Dict[Tuple[int, int], float] = field(default_factory=dict)
    constants: Dict[int, Constants] = field(default_factory=dict)
    regions: int = 0
    warnings: List[str] = field(default_factory=list)

    def lines(self, heads: Sequence[str] = ()) -> List[str]:
        """The fit in words, one line per data set."""
        lines = [
            f"leverage: features of {sum(self.atoms.values())} training atoms, {len(self.atoms)} species in "
            f"{self.regions} regions"
        ]
        for head, c in self.constants.items():
            where = f" (head {heads[head]})" if len(self.constants) > 1 and heads else ""
            low, high = c.growth_interval
            lines.append(
                f"leverage{where}: growth {c.growth:.3g} ({low:.2g} to {high:.2g}), standard deviation times "
                f"{math.exp(0.5 * c.log_scale):.3g} +- {0.5 * c.log_scale_error * math.exp(0.5 * c.log_scale):.2g} at "
                "leverage 1; NLL of "
                f"{c.configurations} validation configurations {c.nll[0]:.3f} -> {c.nll[1]:.3f}"
            )
        return lines


class TrainingAtoms:
    """Features of training atoms, per kind (head and species)."""

    def __init__(self, kinds: int) -> None:
        self.broken = 0
        self.count = np.zeros(kinds, dtype=np.int64)
        self.log_variance = np.zeros(kinds)
        self.stride = np.ones(kinds, dtype=np.int64)
        self.kept: List[List[np.ndarray]] = [[] for _ in range(kinds)]

    def add(self, scalars: Tensor, kinds: Tensor, log_variance: Tensor) -> None:
        """Atoms of a batch."""
        features, which = scalars.cpu().numpy(), kinds.cpu().numpy()
        variance = log_variance.cpu().double().numpy()
        self.broken += int((~np.isfinite(features)).any(-1).sum())
        for kind in np.unique(which):
            own = which == kind
            before, number = self.count[kind], int(own.sum())
            self.count[kind] += number
            self.log_variance[kind] += variance[own].sum()
            # Every stride-th atom; once there are too many, every second one of those.
            self.kept[kind].append(features[own][(before + np.arange(number)) % self.stride[kind] == 0])
            self._thin(kind)

    def _thin(self, kind: int) -> None:
        while sum(map(len, self.kept[kind])) > MAX_ATOMS:
            self.kept[kind] = [np.concatenate(self.kept[kind])[::2]]
            self.stride[kind] *= 2

    def gather(self) -> None:
        """Atoms of all processes of a distributed training; `InputError`, in all of them, for features not finite."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            gathered: List[Any] = [None] * torch.distributed.get_world_size()
            mine = self.broken, self.count, self.log_variance, self.stride, self.kept
            torch.distributed.all_gather_object(gathered, mine)
            brokens, counts, variances, strides, kepts = zip(*gathered, strict=True)
            self.broken, self.count, self.log_variance = sum(brokens), sum(counts), sum(variances)
            # An atom counts as much whichever process has it.
            self.stride = np.max(strides, axis=0)
            for kind, stride in enumerate(self.stride.tolist()):
                steps = [stride // int(own[kind]) for own in strides]
                parts = zip((part[kind] for part in kepts), steps, strict=True)
                self.kept[kind] = [np.concatenate(part)[::step] for part, step in parts if part]
                self._thin(kind)
        if self.broken:
            raise InputError(
                f"the model's features of {self.broken} training atoms are not finite: the training has diverged, or "
                "two atoms of a frame are at the same place"
            )

    def features(self, kind: int) -> np.ndarray:
        """Kept atoms of a kind (n, D), in an order that does not depend on that of the data."""
        features = np.concatenate(self.kept[kind]).astype(np.float64)
        return features[np.lexsort(features.T[:2])]

    def store(self, leverage: Leverage, ridge: float = RIDGE) -> Dict[int, float]:
        """Moments into the leverage's buffers; gives the weight of the pool in those of every kind.

        A species with few atoms has too flat a covariance: it is shrunk towards the one within all species, as if that
        had been seen on as many atoms as there are features.
        """
        seen = np.flatnonzero(self.count).tolist()
        features = {kind: self.features(kind) for kind in seen}
        own = {kind: np.cov(x.T, bias=True).reshape(x.shape[1], -1) for kind, x in features.items()}
        pooled = sum(len(features[kind]) * own[kind] for kind in seen) / sum(map(len, features.values()))
        most = max(1, min(MAX_REGIONS_OF_SPECIES, MAX_REGIONS // len(seen)))
        regions: List[Tuple[int, np.ndarray, np.ndarray]] = []
        weights = {}
        for kind in seen:
            x = features[kind]
            weights[kind] = x.shape[1] / (x.shape[1] + len(x))
            shrunk = (1.0 - weights[kind]) * own[kind] + weights[kind] * pooled
            centre = x.mean(0)
            leverage.centres[kind] = torch.from_numpy(centre).to(leverage.centres)
            leverage.log_variance[kind] = self.log_variance[kind] / self.count[kind]
            regions += [(kind, *region) for region in _regions(x - centre, shrunk, most, ridge)]
        leverage.resize(len(regions))
        for row, (kind, offset, whitening) in enumerate(regions):
            leverage.region_kinds[row] = kind
            leverage.region_offsets[row] = torch.from_numpy(offset @ whitening).to(leverage.centres)
            leverage.region_whitening[:, row] = torch.from_numpy(whitening).to(leverage.centres)
        # So that the mean over the training atoms of a kind is 1, whatever shrinks it. A single atom is where its own
        # moments are, as are atoms that are all alike: how far others are is then a matter of the pool.
        means = {kind: float(_distance(leverage, features[kind], kind).mean()) for kind in seen}
        least = ALIKE * leverage.centres.shape[1]
        usual = np.mean([mean for mean in means.values() if mean > least] or [1.0])
        for kind, mean in means.items():
            leverage.region_norms[leverage.region_kinds == kind] = 1.0 / (mean if mean > least else float(usual))
        return weights


def _regions(x: np.ndarray, covariance: np.ndarray, most: int, ridge: float) -> Iterator[Tuple[np.ndarray, np.ndarray]]:
    """Centre (D,) and whitening matrix (D, D) of every region of a kind, from its centred features (n, D)."""
    count, size = x.shape
    number = min(count // (ATOMS_PER_FEATURE * size), most)
    if number < 2:
        yield np.zeros(size), _whitening(covariance, ridge)
        return
    # The directions that vary most are those in which phases and sites differ.
    _, axes = np.linalg.eigh(covariance)
    projected = x @ axes[:, -16:]
    starts = projected[np.argsort(projected[:, -1])[(np.arange(number) * 2 + 1) * count // (2 * number)]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of regions that stay empty
        _, label = kmeans2(projected, starts, iter=30, minit="matrix")
    parts = [part for part in (x[label == i] for i in range(number)) if len(part) > 1]
    within = sum(len(part) * np.cov(part.T, bias=True) for part in parts) / count
    for part in parts:
        weight = size / (size + len(part))
        local = (1.0 - weight) * np.cov(part.T, bias=True) + weight * within
        yield part.mean(0), _whitening((1.0 - SHARED) * local + SHARED * covariance, ridge)


def _whitening(covariance: np.ndarray, ridge: float) -> np.ndarray:
    values, vectors = np.linalg.eigh(covariance)
    values = values.clip(min=0.0)
    # A species with a single atom, or all of them alike, has no variance at all.
    return vectors / np.sqrt(values + max(ridge * values.mean(), 1e-12))


def _distance(leverage: Leverage, features: np.ndarray, kind: int) -> np.ndarray:
    """The leverage's own distance of training atoms, in its precision."""
    scalars = torch.from_numpy(features).to(leverage.centres)
    with torch.no_grad():
        parts = [leverage._distance(x, torch.full((len(x),), kind, device=x.device)) for x in scalars.split(4096)]
    return torch.cat(parts).double().cpu().numpy()


@contextmanager
def _seen_by(readout: Readout) -> Iterator[Dict[str, Any]]:
    """What the readout's last call was given and gave: scalars, kinds, heads, support, outputs."""
    seen: Dict[str, Any] = {}

    def of_leverage(module: Any, inputs: Tuple[Any, ...], support: Support) -> None:
        scalars, species, heads = inputs[0], inputs[1], inputs[2]
        per_head = len(module.centres) // len(module.growth)
        heads = torch.zeros_like(species) if heads is None or len(module.growth) == 1 else heads
        support = Support(*(value.detach() for value in support))
        seen.update(scalars=scalars.detach(), kinds=heads * per_head + species, heads=heads, support=support)

    def of_readout(module: Any, inputs: Any, outputs: Dict[str, Tensor]) -> None:
        seen["outputs"] = {name: value.detach() for name, value in outputs.items()}

    handles = [readout.leverage.register_forward_hook(of_leverage), readout.register_forward_hook(of_readout)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def fit_leverage(
    readout: Readout,
    training: Iterable[Any],
    validation: Iterable[Labelled],
    species: Sequence[str] = (),
    constant: bool = False,
    ridge: float = RIDGE,
) -> Report:
    """Fit the leverage of a readout, and with it the constants of a family that takes it.

    Parameters
    ----------
    readout : Readout
        Its buffers are filled in place.
    training : iterable
        Taking the next item runs the model, and with it the readout, on the next batch of training atoms.
    validation : iterable of Labelled
        The same for validation atoms. Not taken for families that do not take the leverage.
    species : sequence of str
        Names of the model's species, for messages.
    constant : bool
        For a readout whose trunks are constant (`Trunk.make_constant`): fit its 0e coefficients, too, and a scale for
        every species. This is what a model gets that was trained without a readout.
    ridge : float
        See `RIDGE`.

    Raises
    ------
    InputError
        Training set without atoms, features that are not finite, validation set without forces.
    """
    leverage, report = readout.leverage, Report()
    leverage.reset()
    # For species and heads without atoms to fit them to.
    for buffer in (leverage.centres, leverage.log_variance, leverage.log_factor):
        buffer.zero_()
    leverage.growth.fill_(PRIOR_GROWTH)
    atoms = TrainingAtoms(len(leverage.centres))
    with _seen_by(readout) as seen:
        for _ in training:
            outputs = seen["outputs"]
            parameters = {key.name: outputs[key.name] for key in readout.family.parameter_keys}
            takes = readout.family.takes_support
            log_variance = readout.family.log_variance(parameters) if takes else torch.zeros(len(seen["kinds"]))
            atoms.add(seen["scalars"], seen["kinds"], log_variance)
    atoms.gather()
    if not atoms.count.any():
        raise InputError("the training set has no atoms: there is nothing to fit the leverage to")
    weights = atoms.store(leverage, ridge)
    per_head = len(leverage.centres) // len(leverage.growth)
    report.atoms = {divmod(kind, per_head): int(atoms.count[kind]) for kind in weights}
    report.shrinkage = {divmod(kind, per_head): weight for kind, weight in weights.items()}
    report.regions = len(leverage.region_kinds)
    report.warnings += _warnings(report, leverage, species)
    if readout.family.takes_support:
        fit = _fit_constant if constant else _fit_trained
        report.constants = {
            head: fit(readout, head, table) for head, table in _collect(readout, validation, report).items()
        }
        for found in () if constant else report.constants.values():
            if found.nll[1] > found.nll[0]:
                report.warnings.append(
                    f"the {found.configurations} validation configurations are described worse than without leverage "
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


def _warnings(report: Report, leverage: Leverage, species: Sequence[str]) -> List[str]:
    def name(kind: int) -> str:
        return species[kind] if kind < len(species) else f"species {kind}"

    found, features = [], leverage.centres.shape[1]
    few = sorted({kind for (_, kind), count in report.atoms.items() if count < features})
    if few:
        listed = ", ".join(
            f"{name(kind)} ({report.atoms[key]} atoms, {report.shrinkage[key]:.0%} of the pooled moments)"
            for key in sorted(report.atoms)
            for kind in [key[1]]
            if report.atoms[key] < features
        )
        found.append(f"fewer training atoms than features ({features}): {listed}")
    missing = [name(kind) for kind in range(len(species)) if kind not in {kind for _, kind in report.atoms}]
    if missing:
        found.append(
            f"no training atoms of {', '.join(missing)}: their leverage is {FAR:g}, their epistemic variance at its "
            "ceiling"
        )
    return found


class _Samples:
    """Validation atoms with finite reference forces, and their negative log likelihood as a function of the constants.

    Parameters
    ----------
    law : Law
        Of the parameters without support.
    residual : (N, 3)
    support : Support
        CPU, float64.
    log_variance : (N,)
        `Family.log_variance` without support.
    frames, kinds : (N,) int
    """

    def __init__(
        self,
        law: Any,
        residual: np.ndarray,
        support: Support,
        log_variance: Tensor,
        frames: np.ndarray,
        kinds: np.ndarray,
    ) -> None:
        self.law, self.residual, self.support, self.log_variance = law, residual, support, log_variance
        _, self.frames = np.unique(frames, return_inverse=True)
        self.sizes = np.bincount(self.frames)
        self.kinds = kinds

    def per_configuration(self, constants: np.ndarray) -> np.ndarray:
        """Mean over the atoms of every configuration, at (ln a, ln scale)."""
        one = torch.ones(1, dtype=torch.float64)
        support = self.support._replace(
            growth=one * math.exp(constants[0]), log_scale=self.support.log_scale + constants[1]
        )
        log_factor, excess = inflate(support, self.log_variance)
        return self._mean((log_factor + torch.log1p(excess)).numpy())

    def as_trained(self) -> np.ndarray:
        """The same without support."""
        return self._mean(self.support.log_scale.numpy())

    def _mean(self, log_factor: np.ndarray) -> np.ndarray:
        # A factor on the covariance is a factor on the unit of the error.
        nll = self.law.negative_log_likelihood(self.residual * np.exp(-0.5 * log_factor)[:, None]) + 1.5 * log_factor
        return np.bincount(self.frames, nll) / self.sizes

    def fit(self) -> Constants:
        """Constants of the largest posterior density, a configuration counting like one atom.

        The atoms of a configuration are no independent witnesses. The likelihood has flat and false minima (a -> 0).
        """
        starts = [np.array([math.log(start), 0.0]) for start in _STARTS]
        found = min((minimize(self._objective, s, method="BFGS") for s in starts), key=lambda f: f.fun)
        return self._constants(found.x)

    def fit_by_species(self) -> Tuple[Constants, Dict[int, float]]:
        """The same with a scale for every species, for a readout that knows nothing of the atoms but that.

        Returns
        -------
        constants : Constants
        log_scale : dict
            By kind.
        """
        kinds, index = np.unique(self.kinds, return_inverse=True)
        square = np.bincount(index, np.square(self.residual).mean(-1)) / np.bincount(index)
        start = np.log(square.clip(min=1e-12)) - np.bincount(index, self.log_variance.numpy()) / np.bincount(index)

        def objective(constants: np.ndarray) -> float:
            scaled = self.support._replace(log_scale=torch.from_numpy(constants[1:][index]))
            return _Samples._objective(self._with(scaled), np.array([constants[0], 0.0]))

        starts = [np.concatenate([[math.log(growth)], start]) for growth in _STARTS]
        found = min((minimize(objective, s, method="BFGS") for s in starts), key=lambda f: f.fun)
        scaled = self._with(self.support._replace(log_scale=torch.from_numpy(found.x[1:][index])))
        log_scale = dict(zip(kinds.tolist(), found.x[1:].tolist(), strict=True))
        return scaled._constants(np.array([found.x[0], 0.0])), log_scale

    def _with(self, support: Support) -> "_Samples":
        return _Samples(self.law, self.residual, support, self.log_variance, self.frames, self.kinds)

    def _objective(self, constants: np.ndarray) -> float:
        prior = 0.5 * ((constants[0] - math.log(PRIOR_GROWTH)) / PRIOR_WIDTH) ** 2
        return float(self.per_configuration(constants).sum()) + prior

    def _constants(self, found: np.ndarray) -> Constants:
        error = self._standard_errors(found)
        return Constants(
            growth=math.exp(found[0]),
            growth_interval=(math.exp(found[0] - error[0]), math.exp(found[0] + error[0])),
            log_scale=float(found[1]),
            log_scale_error=float(error[1]),
            nll=(float(self.as_trained().mean()), float(self.per_configuration(found).mean())),
            configurations=len(self.sizes),
            atoms=len(self.residual),
        )

    def _standard_errors(self, constants: np.ndarray, step: float = 1e-2) -> np.ndarray:
        """Of both constants, by the sandwich estimator over configurations."""
        prior_curvature = np.diag([PRIOR_WIDTH**-2, 0.0])
        at = {
            (i, j): self.per_configuration(constants + step * np.array([i, j])) for i in (-1, 0, 1) for j in (-1, 0, 1)
        }
        score = np.stack([at[1, 0] - at[-1, 0], at[0, 1] - at[0, -1]]) / (2.0 * step)
        curvature = np.empty((2, 2))
        curvature[0, 0] = (at[1, 0] - 2.0 * at[0, 0] + at[-1, 0]).sum()
        curvature[1, 1] = (at[0, 1] - 2.0 * at[0, 0] + at[0, -1]).sum()
        curvature[0, 1] = curvature[1, 0] = (at[1, 1] - at[1, -1] - at[-1, 1] + at[-1, -1]).sum() / 4.0
        inverse = np.linalg.pinv(curvature / step**2 + prior_curvature, hermitian=True)
        if score.shape[1] < 2:  # nothing scatters
            return np.sqrt(np.diag(inverse).clip(min=0.0))
        return np.sqrt(np.diag(inverse @ (np.cov(score) * score.shape[1] + prior_curvature) @ inverse).clip(min=0.0))


def _collect(readout: Readout, validation: Iterable[Labelled], report: Report) -> Dict[int, Dict[str, np.ndarray]]:
    """Run the validation set; what its atoms are, by head, and the same in every process of a distributed training."""
    parts: List[Dict[str, np.ndarray]] = []
    frames = left_out = 0
    with _seen_by(readout) as seen:
        for batch in validation:
            # What a species without training atoms does to its neighbours says nothing about those that have some.
            known = torch.isin(seen["kinds"], readout.leverage.region_kinds)
            supported = torch.ones(int(batch.frames.max()) + 1, dtype=torch.bool, device=known.device)
            supported[batch.frames[~known]] = False
            usable = torch.isfinite(batch.residual).all(-1) & supported[batch.frames]
            left_out += int((~supported).sum())
            support = seen["support"]
            part = {key.name: seen["outputs"][key.name] for key in readout.family.parameter_keys}
            part |= {"residual": batch.residual, "frames": batch.frames + frames}
            part |= {"heads": seen["heads"], "kinds": seen["kinds"]}
            part |= {"distance": support.distance, "typical": support.log_variance}
            parts.append({name: value[usable].detach().cpu().numpy() for name, value in part.items()})
            frames += int(batch.frames.max()) + 1
    parts = _from_all_processes(parts)
    if not sum(len(part["residual"]) for part in parts):
        raise InputError(
            "the validation set has no configuration with finite reference forces whose species the training set has: "
            "the constants of evidence mode 'leverage' are fitted to those; give it such configurations"
        )
    if not any(np.abs(part["residual"]).max(initial=0.0) for part in parts):
        raise InputError(
            "all validation errors are zero: isolated atoms have no forces to fit to; give other validation "
            "configurations"
        )
    if left_out:
        report.warnings.append(f"{left_out} validation configurations left out: the training set lacks their species")
    table = {name: np.concatenate([part[name] for part in parts]).astype(np.float64) for name in parts[0]}
    of_head = {int(head): table["heads"] == head for head in np.unique(table["heads"])}
    return {head: {name: values[chosen] for name, values in table.items()} for head, chosen in of_head.items()}


def _samples(family: Family, parameters: Dict[str, np.ndarray], table: Dict[str, np.ndarray]) -> _Samples:
    none = torch.zeros(1, dtype=torch.float64)
    support = Support(
        leverage=none,
        distance=torch.from_numpy(table["distance"]),
        growth=none,
        log_variance=torch.from_numpy(table["typical"]),
        log_scale=torch.zeros(len(table["distance"]), dtype=torch.float64),
        fitted=torch.tensor(True),
    )
    log_variance = family.log_variance({name: torch.from_numpy(values) for name, values in parameters.items()})
    frames, kinds = table["frames"].astype(int), table["kinds"].astype(int)
    return _Samples(family.law(parameters), table["residual"], support, log_variance, frames, kinds)


def _fit_trained(readout: Readout, head: int, table: Dict[str, np.ndarray]) -> Constants:
    """Constants into the leverage's buffers."""
    leverage = readout.leverage
    found = _samples(readout.family, {key.name: table[key.name] for key in readout.family.parameter_keys}, table).fit()
    leverage.growth[head] = found.growth
    leverage.log_factor[_kinds(leverage, head)] = found.log_scale
    return found


def _fit_constant(readout: Readout, head: int, table: Dict[str, np.ndarray]) -> Constants:
    """The same, with the 0e coefficients that the trunk gives to every atom and a scale for every species."""
    leverage, family, atoms = readout.leverage, readout.family, len(table["residual"])
    best: Any = None
    for scalars in family.constant_scalars():
        coefficients = torch.zeros(1, family.num_scalars + 5 * family.num_tensors, dtype=torch.float64)
        coefficients[0, : family.num_scalars] = torch.tensor(scalars, dtype=torch.float64)
        outputs = family(coefficients, readout.force_unit.double().cpu())
        parameters = {key.name: outputs[key.name].expand(atoms, *key.shape).numpy() for key in family.parameter_keys}
        variance = family.log_variance({name: torch.from_numpy(values) for name, values in parameters.items()})
        found, log_scale = _samples(family, parameters, {**table, "typical": variance.numpy()}).fit_by_species()
        if best is None or found.nll[1] < best[0].nll[1]:
            best = found, log_scale, scalars, float(variance[0])
    found, log_scale, scalars, variance = best
    trunk: Any = readout.trunks[head]
    trunk.make_constant(scalars)
    leverage.growth[head] = found.growth
    # A species that only the training set has gets the mean of the others.
    leverage.log_factor[_kinds(leverage, head)] = float(np.mean(list(log_scale.values())))
    leverage.log_variance[_kinds(leverage, head)] = variance
    for kind, value in log_scale.items():
        leverage.log_factor[kind] = value
    return found


def _kinds(leverage: Leverage, head: int) -> slice:
    species = len(leverage.centres) // len(leverage.growth)
    return slice(head * species, (head + 1) * species)


def _from_all_processes(parts: List[Dict[str, np.ndarray]]) -> List[Dict[str, np.ndarray]]:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return parts
    gathered: List[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, parts)
    together, first = [], 0
    for own in gathered:
        together += [{**part, "frames": part["frames"] + first} for part in own]
        first = max((int(part["frames"].max(initial=-1)) + 1 for part in together), default=first)
    return together
