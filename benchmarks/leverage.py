"""What the leverage is worth, and what its form and constants would be worth otherwise, from one trained model.

    python benchmarks/leverage.py atoms --host mace --model my.model --set train=train.xyz --set valid=… --out FOLDER
    python benchmarks/leverage.py judge FOLDER --out results.json
    python benchmarks/leverage.py committee FOLDER FOLDER … --out results.json
    python benchmarks/leverage.py table results.json … --forms "regions by the power 2" …

`atoms` runs in the environment of the host and writes every atom's features, neighbours, error and distribution
(as trained, and as the model has been fitted) to FOLDER/<set>.npz. `judge` scores the model's own leverage beside
the distribution as trained and beside alternatives, all fitted on the validation set; out of distribution nothing is
fitted. `committee` scores the spread of stock models, raw and scaled on the validation set. `calibration.py` calls
these three for the runs of its tables. `table` prints some alternatives of several models.
"""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import scipy.sparse
from scipy.cluster.vq import kmeans2
from scipy.optimize import minimize
from scipy.stats import norm
from scipy.stats import t as student_t

from e2ip_plugins import families
from e2ip_plugins.families import laws
from e2ip_plugins.families.laws import Elliptical
from e2ip_plugins.scores.metrics import auroc, score_atoms, summarise

NIW = families.get("e2ip")
SHOWN = ("nll", "calibration_error", "coverage95", "spearman_epistemic")
FIGURES = ("force_mae", "force_rmse", "nll", "calibration_error", "coverage95", "spearman_epistemic", "energy_score")

#: Number of the package's form, in results. In 6, regions had axes of their own, as in the alternative "regions with
#: axes of their own". In 5, the prior of the growth was half as wide, as in the alternative
#: "prior 2.5, narrow". In 4, errors of training configurations were not looked at, either, as in "no optimism"; within
#: it, what weighs alike in the fit was changed, and results of sets whose configurations differ in size were made anew.
#: Before, they had no number, and the growth had another slope far out.
FORM = 7

#: The form that the package has, as a variant of this file.
SHIPPED = {"features": "read", "ridge": 1e-5, "regions": 8, "axes": "kind", "shared": 0.1, "power": 4, "tau": 6.0,
           "rounds": 1, "relative": (0.5, 0.8), "familiar": 8.0, "trusted": 11.0, "slope": 0.1, "bend": 6,
           "form": "linear std", "prior": (2.5, 0.6), "tails": 0.0, "alike": "atoms",
           "optimism": 1.5, "most": 1.0, "strange": 3.0}  # fmt: skip

#: One thing changed at a time. `features`: what the package reads, with MACE both layers', with NequIP those after the
#: last, or one of these. `axes`: along which features are whitened, those of an atom's kind, of every region, or the
#: same for all kinds.
#: `relative`: power of the ratio of the species' variance to the atom's own near the training set and far from it,
#: `familiar`: where far begins; `slope`: of the growth far from it, `trusted` and `bend`: where it begins, and how
#: sharply; a `bend` of None is the form before, whose slope fell below its end on the way. `tau`: None is the squared
#: Mahalanobis distance itself. `power`: of the distance in the weights of regions; None is a smooth minimum over them,
#: which the package had before. `tails`: width of the prior of the logarithm of one more constant, a factor on ν - 5.
#: `alike`: what weighs alike in the fit; both are the same where configurations are equally large. `optimism`: how many
#: times what errors gain from training to validation atoms they gain once more where the distance passes `strange`, and
#: at `most`, both logarithms of variances.
ALTERNATIVES = {
    "as shipped, here": {},
    "features of the last layer": {"features": "last"},
    "features of both layers": {"features": "both"},
    "ridge 1e-3": {"ridge": 1e-3},
    "ridge 1e-4": {"ridge": 1e-4},
    "one region": {"regions": None},
    "regions with axes of their own": {"axes": "region", "shared": 0.3, "tau": 1.0, "slope": 0.15, "trusted": 10.0},
    "the same axes for all species": {"axes": "all"},
    "regions share nothing": {"shared": 0.0},
    "regions share 0.3": {"shared": 0.3},
    "a region for every 4 atoms per feature": {"regions": 4},
    "regions by the power 2": {"power": 2},
    "regions by the power 3": {"power": 3},
    "regions by the power 6": {"power": 6},
    "nearest region, smoothly": {"power": None},
    "own leverage alone": {"rounds": 0},
    "3 rounds": {"rounds": 3},
    "tau 1": {"tau": 1.0},
    "tau 3": {"tau": 3.0},
    "tau 12": {"tau": 12.0},
    "psi(t) = t": {"tau": None, "prior": (0.5, 0.6)},
    "psi(t) = t, variance a (h'^2 + h)": {"tau": None, "form": "quadratic", "prior": (0.5, 0.6)},
    "psi(t) = t, one region, variance a (h'^2 + h), relative 0": {
        "tau": None, "regions": None, "relative": (0.0, 0.0), "form": "quadratic", "prior": (0.5, 0.6)},
    "variance 1 + a (h' + h)": {"form": "linear variance"},
    "relative 0": {"relative": (0.0, 0.0)},
    "relative 1/2": {"relative": (0.5, 0.5)},
    "relative 1/2, far 1": {"relative": (0.5, 1.0)},
    "relative 1": {"relative": (1.0, 1.0)},
    "slope 0.1 from 9 on": {"trusted": 9.0},
    "slope 0.1 from 10 on": {"trusted": 10.0},
    "slope 0.15 far out": {"slope": 0.15},
    "slope 0.2 far out": {"slope": 0.2},
    "slope 0.05 far out": {"slope": 0.05},
    "slope 1 far out": {"slope": 1.0},
    "slope 0.4 from 16 on, with a dip": {"slope": 0.4, "trusted": 16.0, "bend": None},
    "prior 1": {"prior": (1.0, 0.6)},
    "prior 5": {"prior": (5.0, 0.6)},
    "prior 2.5, narrow": {"prior": (2.5, 0.3)},
    "prior 2.5, 0.8 wide": {"prior": (2.5, 0.8)},
    "prior 2.5, 1.5 wide": {"prior": (2.5, 1.5)},
    "prior 3, 0.8 wide": {"prior": (3.0, 0.8)},
    "a constant on nu": {"tails": 0.5},
    "configurations alike": {"alike": "configurations"},
    "no optimism": {"optimism": 0.0},
    "optimism 1": {"optimism": 1.0},
    "optimism 2": {"optimism": 2.0},
    "optimism up to 0.7": {"most": 0.7},
    "optimism without end": {"most": 1e6},
    "optimism from 4 on": {"strange": 4.0},
}  # fmt: skip


def atoms(host: str, model: str, sets: dict[str, str], out: Path) -> None:
    """Write every atom of some files, frame by frame (see the module)."""
    import torch
    from ase.io import read

    torch.set_num_threads(1)
    predict = mace_predictions(model) if host == "mace" else nequip_predictions(model)
    out.mkdir(parents=True, exist_ok=True)
    for name, path in sets.items():
        rows: dict[str, list] = {}
        first = 0
        for index, frame in enumerate(read(path, index=":")):
            found = predict(frame)
            reference = frame.arrays.get("REF_forces", np.full((len(frame), 3), np.nan))
            found |= {"forces": found["forces"], "residual": reference - found["forces"], "species": frame.numbers}
            found |= {"frame": np.full(len(frame), index), "pairs": found["pairs"] + first}
            for key, value in found.items():
                rows.setdefault(key, []).append(value)
            first += len(frame)
        table = {key: np.concatenate(value, axis=1 if key == "pairs" else 0) for key, value in rows.items()}
        np.savez(out / f"{name}.npz", **table)
        print(f"{out / name}.npz: force MAE {1000 * np.abs(table['residual']).mean():.1f} meV/Å", flush=True)


def seen(readout, run):
    """What a readout was given and gave in ``run()``, as fitted and as trained, and the run's result."""
    got = {}

    def of_leverage(module, inputs, support):
        got.update(features=inputs[0], neighbours=inputs[3])

    def of_readout(module, inputs, outputs):
        got.update({key.name: outputs[key.name] for key in NIW.parameter_keys}, leverage=outputs["e2ip_leverage"])

    handles = [readout.leverage.register_forward_hook(of_leverage), readout.register_forward_hook(of_readout)]
    try:
        result = run()
        fitted = {f"fitted_{k}": v for k, v in got.items() if k not in ("features", "neighbours")}
        was = readout.leverage.fitted.clone()
        readout.leverage.reset()
        run()
        readout.leverage.fitted.copy_(was)
    finally:
        for handle in handles:
            handle.remove()
    neighbours = got.pop("neighbours")
    found = {key: value.detach().numpy().astype(np.float64) for key, value in {**got, **fitted}.items()}
    found["pairs"] = np.stack([neighbours.receiver.numpy(), neighbours.sender.numpy()])
    found["envelope"] = neighbours.envelope.detach().numpy().astype(np.float64)
    return found, result


def mace_predictions(path: str):
    """From an ASE frame to its atoms, by a MACE model with a readout."""
    from mace.calculators import MACECalculator

    calculator = MACECalculator(model_paths=path, device="cpu")
    model = calculator.models[0]

    def predict(frame):
        batch = calculator._atoms_to_batch(frame).to_dict()
        found, output = seen(model.e2ip_readout, lambda: model(dict(batch)))
        return found | {"forces": output["forces"].detach().numpy().astype(np.float64)}

    return predict


def nequip_predictions(path: str):
    """From an ASE frame to its atoms, by a NequIP checkpoint with a readout."""
    from nequip_ext import E2IPCalculator
    from nequip_ext.model.readout import TAP_KEY, FeatureTap, find_readout

    calculator = E2IPCalculator.from_saved_model(path, device="cpu")
    readout = find_readout(calculator.model)
    tapped = {}
    tap = next(module for module in calculator.model.modules() if isinstance(module, FeatureTap))
    tap.register_forward_hook(lambda module, inputs, data: tapped.update(features=data[TAP_KEY]))
    irreps = tap.irreps_out[TAP_KEY]
    scalars = [columns for columns, (_, ir) in zip(irreps.slices(), irreps, strict=True) if str(ir) == "0e"]

    def predict(frame):
        data = calculator.atoms_to_data(frame)
        found, output = seen(readout, lambda: calculator.model(dict(data)))
        # The backbones of this project have isolated atoms behind those of the frame.
        earlier = tapped["features"][: len(frame)].detach().numpy().astype(np.float64)
        found["earlier"] = np.concatenate([earlier[:, columns] for columns in scalars], axis=1)
        return found | {"forces": output["forces"].detach().numpy().astype(np.float64)}

    return predict


def load(folder: Path, name: str):
    path = folder / f"{name}.npz"
    return SimpleNamespace(**np.load(path)) if path.exists() else None


def law_of(data, prefix: str = "") -> Elliptical:
    return laws.law_of(NIW, {key.name: getattr(data, prefix + key.name) for key in NIW.parameter_keys})


def means(data, values: np.ndarray) -> np.ndarray:
    """Mean over the atoms of every frame."""
    return np.bincount(data.frame, values) / np.bincount(data.frame)


def figures(data, law) -> dict:
    scores = summarise(score_atoms(data.residual, law))
    return {name: scores[name] for name in FIGURES}


class Alternative:
    """Leverage and growth in some form, in NumPy, written apart from the package's."""

    def __init__(
        self, train, features, ridge, regions, axes, shared, power, tau, rounds, relative, familiar, trusted, slope,
        bend, form, prior, tails, alike, optimism, most, strange
    ):  # fmt: skip
        self.features, self.alike, self.gap, self.axes = features, alike, 0.0, axes
        self.optimism, self.most, self.strange = optimism, most, strange
        self.power, self.tau, self.rounds, self.form, self.prior, self.tails = power, tau, rounds, form, prior, tails
        self.relative, self.familiar, self.trusted, self.slope, self.bend = relative, familiar, trusted, slope, bend
        kinds = np.unique(train.species)
        x = {kind: self._read(train)[train.species == kind] for kind in kinds}
        own = {kind: np.cov(x[kind].T, bias=True) for kind in kinds}
        pooled = sum(len(x[kind]) * own[kind] for kind in kinds) / len(train.species)
        common = np.linalg.eigh(pooled)[1] if axes == "all" else None
        self.regions = {k: list(self._regions(x[k], own[k], pooled, common, regions, shared, ridge)) for k in kinds}
        self.norm = dict.fromkeys(kinds, 1.0)
        leverage, _ = self.leverage(train)
        self.norm = {kind: leverage[train.species == kind].mean() for kind in kinds}
        log_variance = self._log_variance(train)
        self.typical = {kind: log_variance[train.species == kind].mean() for kind in kinds}

    def _read(self, data):
        """Features (N, D)."""
        earlier = getattr(data, "earlier", None)
        if self.features == "both" and earlier is not None:
            return np.concatenate([earlier, data.features], axis=1)
        if self.features == "last" and earlier is None:
            return data.features[:, data.features.shape[1] // 2 :]  # layers of MACE have equally many 0e channels here
        return data.features

    def _regions(self, x, own, pooled, common, regions, shared, ridge):
        count, size = x.shape
        weight = size / (size + count)
        covariance = (1 - weight) * own + weight * pooled
        number = 1 if regions is None else int(np.clip(count // (regions * size), 1, 16))
        parts, within = [x], None
        if number > 1:
            projected = (x - x.mean(0)) @ np.linalg.eigh(covariance)[1][:, -16:]
            starts = projected[np.argsort(projected[:, -1])[(np.arange(number) * 2 + 1) * count // (2 * number)]]
            _, label = kmeans2(projected, starts, iter=30, minit="matrix")
            parts = [x[label == i] for i in range(number) if (label == i).sum() > 1]
            within = sum(len(p) * np.cov(p.T, bias=True) for p in parts) / count
        for part in parts:
            matrix = covariance
            if within is not None:
                weight = size / (size + len(part))
                local = (1 - weight) * np.cov(part.T, bias=True) + weight * within
                matrix = (1 - shared) * local + shared * covariance
            vectors = common if self.axes == "all" else np.linalg.eigh(covariance if self.axes == "kind" else matrix)[1]
            values = np.einsum("ik,ij,jk->k", vectors, matrix, vectors, optimize=True)
            yield part.mean(0), vectors / np.sqrt(values.clip(0) + ridge * values.mean())

    def leverage(self, data):
        """h and h̄ (N,)."""
        h = np.full(len(data.species), 1e6)
        for kind, regions in self.regions.items():
            own = data.species == kind
            x, distances = self._read(data)[own], []
            for centre, whitening in regions:
                t = np.square((x - centre) @ whitening)
                distances.append((t if self.tau is None else 2 * self.tau * (np.sqrt(1 + t / self.tau) - 1)).sum(1))
            h[own] = self._over_regions(np.array(distances)) / self.norm[kind]
        pairs = scipy.sparse.csr_matrix((data.envelope, tuple(data.pairs)), shape=(len(h), len(h)))
        total, mean = 1 + np.asarray(pairs.sum(1)).ravel(), h
        for _ in range(self.rounds):
            mean = (mean + pairs @ mean) / total
        return h, mean

    def _over_regions(self, distances):
        if self.power is None:
            return np.mean(distances**-16.0, axis=0) ** (-1 / 16)
        return np.average(distances, axis=0, weights=distances ** -float(self.power))

    @staticmethod
    def _log_variance(data):
        return data.e2ip_log_sigma0[:, :3].mean(1) + np.log1p(1 / data.e2ip_kappa)

    def factor(self, data, growth):
        """Factor on the covariance, 1 at leverage 1 and typical variance, and its epistemic share (N,)."""
        h, mean = data.leverages
        distance = h + mean
        reach, usual = self._reach(distance), self._reach(2.0)
        excess, typical = {
            "linear std": ((1 + growth * reach) ** 2 - 1, (1 + usual * growth) ** 2),
            "linear variance": (growth * distance, 1 + 2 * growth),
            "quadratic": (growth * (mean**2 + h), 1 + 2 * growth),
        }[self.form]
        species = np.array([self.typical.get(kind, np.nan) for kind in data.species])
        near, far = self.relative
        weight = far + (near - far) / (1 + (distance / self.familiar) ** 4)
        excess = excess * np.exp(weight * (species - self._log_variance(data)))
        once_more = self.most * np.tanh(self.optimism * self.gap / self.most)
        total = (1 + excess) * np.exp(once_more / (1 + (self.strange / distance) ** 6))
        return total / typical, 1 - 1 / total

    def _reach(self, distance):
        share = distance / self.trusted
        near = 1 / (1 + share**4) if self.bend is None else (1 + share**self.bend) ** (-1 / self.bend)
        return distance * (self.slope + (1 - self.slope) * near)

    def fit(self, valid, train):
        """ln a, ln scale and, with ``tails``, ln of a factor on ν - 5; also sets the gap of the optimism."""
        self.gap, constants = 0.0, self._fit(valid)
        if self.optimism:
            every = max(1, (train.frame.max() + 1) // (4 * len(np.unique(valid.frame))))
            (here, error), (there, other) = (self._scale(d, constants, e) for d, e in ((valid, 1), (train, every)))
            self.gap = max(0.0, here - there) / (1 + (error**2 + other**2) / 0.3**2)
            constants = self._fit(valid)
        return constants

    def _scale(self, data, constants, every):
        """Logarithm of the factor that variances want, with its standard error over frames."""
        chosen, law = data.frame % every == 0, self.law(data, constants)
        law = Elliptical(law.log_scale[chosen], law.axes[chosen], law.dof[chosen])
        residual, frame = data.residual[chosen], np.unique(data.frame[chosen], return_inverse=True)[1]

        def nll(log_factor):
            return law.negative_log_likelihood(residual * np.exp(-0.5 * log_factor)) + 1.5 * log_factor

        best = minimize(lambda x: nll(x[0]).mean(), np.zeros(1), method="BFGS").x[0]
        below, at, above = (nll(best + step) for step in (-0.01, 0.0, 0.01))
        scores = np.bincount(frame, (above - below) / 0.02)
        error = np.sqrt(np.cov(scores) * len(scores)) / ((below - 2 * at + above).sum() / 0.01**2)
        return best, error * student_t.ppf(norm.cdf(1.0), len(scores) - 1)

    def _fit(self, valid):
        """Constants; atoms count like as many as configurations.

        Of different size, configurations are as many as would say as much if they were equally large (Kish).
        """
        trained = law_of(valid)

        def objective(constants):
            factor = np.log(self.factor(valid, np.exp(constants[0]))[0]) + constants[1]
            law = trained if not self.tails else self._with_tails(trained, constants[2])
            nll = law.negative_log_likelihood(valid.residual * np.exp(-0.5 * factor)[:, None]) + 1.5 * factor
            prior = 0.5 * ((constants[0] - np.log(self.prior[0])) / self.prior[1]) ** 2
            if self.tails:
                prior += 0.5 * (constants[2] / self.tails) ** 2
            if self.alike == "configurations":
                return means(valid, nll).sum() + prior
            sizes = np.bincount(valid.frame)
            return sizes.sum() / np.square(sizes).sum() * nll.sum() + prior

        others = [0.0, 0.0] if self.tails else [0.0]
        starts = [np.array([np.log(a), *others]) for a in (self.prior[0], 0.1 * self.prior[0])]
        return min((minimize(objective, start, method="BFGS") for start in starts), key=lambda f: f.fun).x

    def law(self, data, constants):
        """The law of the model with this leverage."""
        trained = law_of(data)
        if self.tails:
            trained = self._with_tails(trained, constants[2])
        factor, share = self.factor(data, np.exp(constants[0]))
        log_scale = trained.log_scale + (np.log(factor) + constants[1])[:, None]
        return Elliptical(log_scale, trained.axes, trained.dof, share)

    @staticmethod
    def _with_tails(law, log_factor):
        """The same scale matrix with ν - 5, which is the degrees of freedom less 3, times a factor."""
        return Elliptical(law.log_scale, law.axes, 3.0 + (law.dof - 3.0) * np.exp(log_factor), law.epistemic_share)


def judge(folder: Path, untrained: bool, forms=tuple(ALTERNATIVES)) -> dict:
    """Scores of a model's leverage and, for a trained readout, of the alternatives, by variant and set."""
    data = {name: load(folder, name) for name in ("train", "valid", "test", "ood", "nonsense")}
    tests = {name: data[name] for name in ("test", "ood") if data[name] is not None}
    result = {"form": FORM, "leverage": {name: figures(d, law_of(d, "fitted_")) for name, d in tests.items()}}
    for name, d in tests.items():
        result["leverage"][name]["mean_leverage"] = float(d.fitted_leverage.mean())
    if data["nonsense"] is not None:
        result["nonsense"] = nonsense(data["train"], data["nonsense"])
    if "ood" in tests:
        cold, hot = tests["test"], tests["ood"]

        def largest(prefix: str) -> float:
            return auroc(*(max_over_frames(d, law_of(d, prefix).epistemic_std()) for d in (hot, cold)))

        result["frame_auroc"] = {
            "mean leverage": auroc(means(hot, hot.fitted_leverage), means(cold, cold.fitted_leverage)),
            "largest epistemic std with leverage": largest("fitted_"),
        }
        if not untrained:
            result["frame_auroc"]["largest epistemic std as trained"] = largest("")
    if untrained:
        return result
    result["as trained"] = {name: figures(d, law_of(d)) for name, d in tests.items()}
    result["alternatives"] = {}
    for title in forms:
        alternative = Alternative(data["train"], **{**SHIPPED, **ALTERNATIVES[title]})
        for d in (data["train"], data["valid"], *tests.values()):
            d.leverages = alternative.leverage(d)
        constants = alternative.fit(data["valid"], data["train"])
        scores = {name: figures(d, alternative.law(d, constants)) for name, d in tests.items()}
        fitted = {"growth": float(np.exp(constants[0])), "optimism": float(alternative.gap)}
        result["alternatives"][title] = {**fitted, **scores}
    return result


def nonsense(train, data) -> list[dict]:
    """Of every configuration its atom of least leverage and of least epistemic standard deviation, and how many
    training atoms, of any species, have less."""
    found = []
    for frame in range(data.frame.max() + 1):
        row = {}
        for name, of in (
            ("leverage", lambda d: d.fitted_leverage),
            ("epistemic_std", lambda d: law_of(d, "fitted_").epistemic_std()),
        ):
            least = of(data)[data.frame == frame].min()
            row |= {name: float(least), f"training_below_{name}": float((of(train) < least).mean())}
        found.append(row)
    return found


def max_over_frames(data, values: np.ndarray) -> np.ndarray:
    most = np.full(data.frame.max() + 1, -np.inf)
    np.maximum.at(most, data.frame, values)
    return most


def committee(folders: list[Path]) -> dict:
    """Scores of the members' spread around their mean: a Gaussian, raw, and scaled on the validation set."""
    spread = {}
    for name in ("valid", "test", "ood"):
        members = [load(folder, name) for folder in folders]
        if members[0] is None:
            continue
        forces = np.stack([m.forces for m in members])
        residual = members[0].residual + members[0].forces - forces.mean(0)
        deviation = forces - forces.mean(0)
        covariance = np.einsum("mni,mnj->nij", deviation, deviation) / (len(members) - 1)
        spread[name] = SimpleNamespace(residual=residual, covariance=covariance, frame=members[0].frame)
    # Few members span too few directions: an isotropic variance of the same trace is what has a density.
    for d in spread.values():
        d.log_variance = np.log(np.trace(d.covariance, axis1=1, axis2=2) / 3 + 1e-12)

    def law(d, log_factor):
        axes = np.broadcast_to(np.eye(3), (len(d.frame), 3, 3))
        log_scale = np.repeat((d.log_variance + log_factor)[:, None], 3, axis=1)
        return Elliptical(log_scale, axes, epistemic_share=np.ones(len(d.frame)))

    valid = spread.pop("valid")
    square = np.square(valid.residual).sum(1) / 3
    log_factor = float(np.log(np.mean(square * np.exp(-valid.log_variance))))  # of largest likelihood
    result = {"members": len(folders), "factor_on_std": float(np.exp(0.5 * log_factor))}
    result["raw"] = {name: figures(d, law(d, 0.0)) for name, d in spread.items()}
    result["scaled"] = {name: figures(d, law(d, log_factor)) for name, d in spread.items()}
    if "ood" in spread:
        largest = [max_over_frames(spread[n], np.exp(0.5 * spread[n].log_variance)) for n in ("ood", "test")]
        result["frame_auroc"] = {"largest std": auroc(*largest)}
    return result


def table(paths: list[Path], forms: list[str]) -> None:
    """Of files that `judge` has written, named after their models."""
    columns = [f"{name}, {where}" for where in ("in", "out") for name in ("NLL", "CE", "coverage@95", "Spearman")]
    print("| model | form | " + " | ".join(columns) + " |\n|---|---|" + "---|" * len(columns))
    for path in paths:
        result = json.loads(path.read_text())
        for form in forms:
            found = result["alternatives"].get(form) or result[form]
            cells = [f"{found[s][f]:.3f}" if s in found else "" for s in ("test", "ood") for f in SHOWN]
            print(f"| {path.stem} | {form} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("atoms", help="write the atoms of one model")
    one.add_argument("--host", choices=("mace", "nequip"), required=True)
    one.add_argument("--model", required=True)
    one.add_argument(
        "--set", action="append", required=True, metavar="NAME=FILE", help="train, valid, test, ood, nonsense"
    )
    two = commands.add_parser("judge", help="score leverage and alternatives")
    two.add_argument("folder", type=Path)
    two.add_argument("--untrained", action="store_true", help="a stock model's readout, made by e2ip fit")
    three = commands.add_parser("committee", help="score a committee of stock models")
    three.add_argument("folders", type=Path, nargs="+")
    for command in (one, two, three):
        command.add_argument("--out", type=Path, required=True)
    four = commands.add_parser("table", help="print alternatives of several models")
    four.add_argument("results", type=Path, nargs="+")
    for command in (two, four):
        command.add_argument(
            "--forms", nargs="+", metavar="FORM", default=list(ALTERNATIVES), help="of the alternatives"
        )
    options = parser.parse_args()
    if options.command == "atoms":
        atoms(options.host, options.model, dict(item.split("=", 1) for item in options.set), options.out)
        return
    if options.command == "table":
        table(options.results, options.forms)
        return
    if options.command == "judge":
        result = judge(options.folder, options.untrained, options.forms)
    else:
        result = committee(options.folders)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
