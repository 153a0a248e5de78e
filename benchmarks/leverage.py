"""What the leverage of a trained model is worth, and its alternatives; long, as the form is written here once more.

    python benchmarks/leverage.py atoms --host mace --model my.model --set train=train.xyz --set valid=… --out FOLDER
    python benchmarks/leverage.py judge FOLDER --out results.json
    python benchmarks/leverage.py table results.json … --forms "regions by the power 2" …

`atoms` runs in the environment of MACE or NequIP and writes every atom's features, neighbours, error and distribution
(as trained, and as the model has been fitted) to FOLDER/<set>.npz. `judge` scores the model's own leverage beside
the distribution as trained and beside alternatives, all fitted on the validation set; out of distribution nothing is
fitted. `table` prints alternatives of several models: a file has the result of `judge`, or several by name.
"""

import argparse
import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import scipy.sparse
import torch
from ase.calculators.calculator import Calculator
from ase.io import iread
from common import load, markdown, parser_of
from scipy.cluster.vq import kmeans2
from scipy.optimize import minimize
from scipy.stats import norm
from scipy.stats import t as student_t

from e2ip_plugins import families
from e2ip_plugins.families.laws import Elliptical
from e2ip_plugins.families.laws import law_of as family_law
from e2ip_plugins.leverage.form import FORM, LeverageForm, Support, inflate
from e2ip_plugins.readout.readout import Readout
from e2ip_plugins.scores.metrics import auroc, score_atoms, summarise

NIW = families.get("e2ip")
SHOWN = ("nll", "calibration_error", "coverage95", "spearman_epistemic")
FIGURES = ("force_mae", "force_rmse", "nll", "calibration_error", "coverage95", "spearman_epistemic", "energy_score")

#: Number of the package's form, in results; a change of the form raises it (docs/leverage.md says what was changed).
FORM_NUMBER = 7


@dataclass(frozen=True)
class Form:
    """A form of the leverage: the package's constants, and what is none of them.

    Attributes
    ----------
    constants : LeverageForm
    one_region : bool
    squared : bool
        Whether ψ(t) = t: the squared Mahalanobis distance itself.
    rounds : int
        How often leverages are averaged over neighbours.
    most : float
        Bound of the optimism, a logarithm of variances.
    """

    constants: LeverageForm = FORM
    one_region: bool = False
    squared: bool = False
    rounds: int = 1
    most: float = 1.0


def changed(**constants: float) -> Form:
    """Return the package's form with other constants."""
    return Form(FORM._replace(**constants))


#: Alternatives change one thing at a time. docs/leverage.md has further ones, which commit 210d723 computes.
ALTERNATIVES = {
    "as shipped, here": Form(),
    **{f"ridge {ridge}": changed(ridge=float(ridge)) for ridge in ("1e-3", "1e-4")},
    "one region": Form(one_region=True),
    "regions share nothing": changed(shared=0.0),
    "regions share 0.3": changed(shared=0.3),
    "a region for every 4 atoms per feature": changed(atoms_per_feature=4),
    **{f"regions by the power {power}": changed(region_power=power) for power in (2, 3, 6)},
    "own leverage alone": Form(rounds=0),
    "3 rounds": Form(rounds=3),
    **{f"tau {tau}": changed(soft=tau) for tau in (1, 3, 12)},
    "psi(t) = t": Form(FORM._replace(prior_growth=0.5, prior_width=0.6), squared=True),
    "relative 0": changed(near_weight=0.0, far_weight=0.0),
    "relative 1/2": changed(near_weight=0.5, far_weight=0.5),
    "relative 1/2, far 1": changed(near_weight=0.5, far_weight=1.0),
    "relative 1": changed(near_weight=1.0, far_weight=1.0),
    **{f"slope 0.1 from {trusted} on": changed(trusted=trusted) for trusted in (9, 10)},
    **{f"slope {slope} far out": changed(far_slope=slope) for slope in (0.15, 0.2, 0.05, 1)},
    **{f"prior {median}": changed(prior_growth=median) for median in (1, 5)},
    "prior 2.5, narrow": changed(prior_width=0.3),
    **{f"prior 2.5, {width} wide": changed(prior_width=width) for width in (0.8, 1.5)},
    "prior 3, 0.8 wide": changed(prior_growth=3.0, prior_width=0.8),
    "no optimism": changed(once_more=0.0),
    **{f"optimism {optimism}": changed(once_more=optimism) for optimism in (1, 2)},
    "optimism up to 0.7": Form(most=0.7),
    "optimism without end": Form(most=1e6),
    "optimism from 4 on": changed(strange=4.0),
}


def open_model(host: str, path: str) -> tuple[Calculator, Readout]:
    """Return the calculator of a model and its readout."""
    if host == "mace":
        from mace.calculators import MACECalculator

        calculator = MACECalculator(model_paths=path, device="cpu")
        return calculator, calculator.models[0].e2ip_readout
    from nequip_ext import E2IPCalculator
    from nequip_ext.model.readout import find_readout

    calculator = E2IPCalculator.from_saved_model(path, device="cpu")
    return calculator, find_readout(calculator.model)


def recorded(readout: Readout, run: Callable[[], Any]) -> dict[str, np.ndarray]:
    """Return what a readout takes and gives in ``run()``, as trained and (``fitted_…``) as fitted."""
    record: dict[str, Any] = {}

    def of_leverage(module, inputs, support) -> None:
        record.update(features=inputs[0], neighbours=inputs[3])

    def of_readout(module, inputs, outputs) -> None:
        record.update({key.name: outputs[key.name] for key in NIW.parameter_keys}, leverage=outputs["e2ip_leverage"])

    handles = [readout.leverage.register_forward_hook(of_leverage), readout.register_forward_hook(of_readout)]
    try:
        run()
        fitted = {f"fitted_{name}": value for name, value in record.items() if name not in ("features", "neighbours")}
        before = readout.leverage.fitted.clone()
        readout.leverage.reset()
        run()
        readout.leverage.fitted.copy_(before)
    finally:
        for handle in handles:
            handle.remove()
    neighbours = record.pop("neighbours")
    tensors = {**record, **fitted, "envelope": neighbours.envelope}
    arrays = {name: value.detach().numpy().astype(np.float64) for name, value in tensors.items()}
    return arrays | {"pairs": np.stack([neighbours.receiver.numpy(), neighbours.sender.numpy()])}


def write_atoms(host: str, model: str, sets: dict[str, str], out: Path) -> None:
    """Write every atom of several files, frame by frame."""
    torch.set_num_threads(1)
    calculator, readout = open_model(host, model)
    out.mkdir(parents=True, exist_ok=True)
    for name, path in sets.items():
        rows: dict[str, list] = {}
        first = 0
        for index, frame in enumerate(iread(path, index=":")):
            atoms = recorded(readout, functools.partial(calculator.calculate, frame))
            reference = frame.arrays.get("REF_forces", np.full((len(frame), 3), np.nan))
            atoms |= {"residual": reference - calculator.results["forces"], "species": frame.numbers}
            atoms |= {"frame": np.full(len(frame), index), "pairs": atoms["pairs"] + first}
            for key, value in atoms.items():
                rows.setdefault(key, []).append(value)
            first += len(frame)
        table = {key: np.concatenate(value, axis=1 if key == "pairs" else 0) for key, value in rows.items()}
        np.savez(out / f"{name}.npz", **table)
        print(f"{out / name}.npz: force MAE {1000 * np.abs(table['residual']).mean():.1f} meV/Å", flush=True)


def load_atoms(folder: Path, name: str) -> SimpleNamespace | None:
    path = folder / f"{name}.npz"
    return SimpleNamespace(**np.load(path)) if path.exists() else None


def law_of(data: SimpleNamespace, prefix: str = "") -> Elliptical:
    return family_law(NIW, {key.name: getattr(data, prefix + key.name) for key in NIW.parameter_keys})


def means(data: SimpleNamespace, values: np.ndarray) -> np.ndarray:
    """Return the mean over the atoms of every frame."""
    return np.bincount(data.frame, values) / np.bincount(data.frame)


def max_over_frames(data: SimpleNamespace, values: np.ndarray) -> np.ndarray:
    """Return the largest value of every frame."""
    most = np.full(data.frame.max() + 1, -np.inf)
    np.maximum.at(most, data.frame, values)
    return most


def figures(data: SimpleNamespace, law: Elliptical) -> dict[str, float]:
    scores = summarise(score_atoms(data.residual, law))
    return {name: scores[name] for name in FIGURES}


def shrunk(covariance: np.ndarray, towards: np.ndarray, count: int) -> np.ndarray:
    """Return a covariance of so many atoms, mixed with another the more, the fewer they are for its features."""
    weight = len(covariance) / (len(covariance) + count)
    return (1 - weight) * covariance + weight * towards


class Alternative:
    """Leverage in some form, in NumPy, written apart from the package's; what grows with it is the package's."""

    def __init__(self, train: SimpleNamespace, form: Form) -> None:
        self.form, self.gap = form, 0.0
        kinds = np.unique(train.species)
        x = {kind: train.features[train.species == kind] for kind in kinds}
        covariances = {kind: np.cov(x[kind].T, bias=True) for kind in kinds}
        pooled = sum(len(x[kind]) * covariances[kind] for kind in kinds) / len(train.species)
        self.regions = {kind: list(self._regions(x[kind], covariances[kind], pooled)) for kind in kinds}
        self.norm = dict.fromkeys(kinds, 1.0)
        leverage, _ = self.leverage(train)
        self.norm = {kind: leverage[train.species == kind].mean() for kind in kinds}
        log_variance = self._log_variance(train)
        self.typical = {kind: log_variance[train.species == kind].mean() for kind in kinds}

    def _regions(self, x, covariance, pooled) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield centre (D,) and whitening (D, D) of every region of a kind with the features ``x``."""
        form, constants, (count, size) = self.form, self.form.constants, x.shape
        covariance = shrunk(covariance, pooled, count)
        axes = np.linalg.eigh(covariance)[1]
        number = int(np.clip(count // (constants.atoms_per_feature * size), 1, constants.max_regions_of_kind))
        number = 1 if form.one_region else number
        parts = [x]
        if number > 1:
            projected = (x - x.mean(0)) @ axes[:, -16:]
            starts = projected[np.argsort(projected[:, -1])[(np.arange(number) * 2 + 1) * count // (2 * number)]]
            _, label = kmeans2(projected, starts, iter=30, minit="matrix")
            parts = [x[label == i] for i in range(number) if (label == i).sum() > 1]
        within = sum(len(part) * np.cov(part.T, bias=True) for part in parts) / count
        for part in parts:
            matrix = covariance
            if number > 1:
                local = shrunk(np.cov(part.T, bias=True), within, len(part))
                matrix = (1 - constants.shared) * local + constants.shared * covariance
            values = np.einsum("ik,ij,jk->k", axes, matrix, axes, optimize=True)
            yield part.mean(0), axes / np.sqrt(values.clip(0) + constants.ridge * values.mean())

    def _psi(self, t: np.ndarray) -> np.ndarray:
        tau = self.form.constants.soft
        return t if self.form.squared else 2 * tau * (np.sqrt(1 + t / tau) - 1)

    def leverage(self, data: SimpleNamespace) -> tuple[np.ndarray, np.ndarray]:
        """Return h and its mean over neighbours (N,)."""
        h = np.full(len(data.species), FORM.far)
        for kind, regions in self.regions.items():
            atoms = data.species == kind
            x = data.features[atoms]
            d = np.array([self._psi(np.square((x - centre) @ whitening)).sum(1) for centre, whitening in regions])
            h[atoms] = np.average(d, axis=0, weights=d ** -float(self.form.constants.region_power)) / self.norm[kind]
        pairs = scipy.sparse.csr_matrix((data.envelope, tuple(data.pairs)), shape=(len(h), len(h)))
        total, mean = 1 + np.asarray(pairs.sum(1)).ravel(), h
        for _ in range(self.form.rounds):
            mean = (mean + pairs @ mean) / total
        return h, mean

    @staticmethod
    def _log_variance(data: SimpleNamespace) -> np.ndarray:
        return data.e2ip_log_sigma0[:, :3].mean(1) + np.log1p(1 / data.e2ip_kappa)

    def factor(self, data: SimpleNamespace, growth: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the logarithm of the factor on the covariance and the epistemic share (N,)."""
        form, log_variance = self.form, self._log_variance(data)
        typical = np.array([self.typical.get(kind, np.nan) for kind in data.species])
        surplus = form.most * np.tanh(form.constants.once_more * self.gap / form.most)
        h, mean = data.leverages
        support = Support(*map(torch.as_tensor, (h, h + mean, [growth], [surplus], typical, [0.0], True)))
        log_factor, excess = inflate(support, torch.as_tensor(log_variance), form.constants)
        return (log_factor + excess.log1p()).numpy(), (excess / (1 + excess)).numpy()

    def fit(self, valid: SimpleNamespace, train: SimpleNamespace) -> np.ndarray:
        """Return ln a and ln scale; set the gap of the optimism."""
        self.gap, constants = 0.0, self._fit(valid)
        if self.form.constants.once_more:
            every = max(1, (train.frame.max() + 1) // (4 * len(np.unique(valid.frame))))
            wanted = [self._scale(data, constants, step) for data, step in ((valid, 1), (train, every))]
            (on_valid, error), (on_train, other) = wanted
            self.gap = max(0.0, on_valid - on_train) / (1 + (error**2 + other**2) / FORM.prior_optimism**2)
            constants = self._fit(valid)
        return constants

    def _scale(self, data: SimpleNamespace, constants: np.ndarray, every: int) -> tuple[float, float]:
        """Return the logarithm of the factor that variances want, with its standard error over frames."""
        chosen, law = data.frame % every == 0, self.law(data, constants)
        law = Elliptical(law.log_scale[chosen], law.axes[chosen], law.dof[chosen])
        residual, frame = data.residual[chosen], np.unique(data.frame[chosen], return_inverse=True)[1]

        def nll(log_factor: float) -> np.ndarray:
            return law.negative_log_likelihood(residual * np.exp(-0.5 * log_factor)) + 1.5 * log_factor

        best = minimize(lambda x: nll(x[0]).mean(), np.zeros(1), method="BFGS").x[0]
        below, at, above = (nll(best + step) for step in (-0.01, 0.0, 0.01))
        scores = np.bincount(frame, (above - below) / 0.02)
        error = np.sqrt(np.cov(scores) * len(scores)) / ((below - 2 * at + above).sum() / 0.01**2)
        return best, error * student_t.ppf(norm.cdf(1.0), len(scores) - 1)

    def _fit(self, valid: SimpleNamespace) -> np.ndarray:
        """Return constants of the largest posterior density; atoms count like as many as configurations.

        Configurations of different size are as many as would say as much if they were equally large (Kish).
        """
        median, width = self.form.constants.prior_growth, self.form.constants.prior_width
        sizes, trained = np.bincount(valid.frame), law_of(valid)

        def objective(constants: np.ndarray) -> float:
            factor = self.factor(valid, np.exp(constants[0]))[0] + constants[1]
            residual = valid.residual * np.exp(-0.5 * factor)[:, None]
            nll = trained.negative_log_likelihood(residual) + 1.5 * factor
            return (
                sizes.sum() / np.square(sizes).sum() * nll.sum() + 0.5 * ((constants[0] - np.log(median)) / width) ** 2
            )

        starts = [np.array([np.log(start), 0.0]) for start in (median, 0.1 * median)]
        return min((minimize(objective, start, method="BFGS") for start in starts), key=lambda f: f.fun).x

    def law(self, data: SimpleNamespace, constants: np.ndarray) -> Elliptical:
        """Return the law of the model with this leverage."""
        trained, (factor, share) = law_of(data), self.factor(data, np.exp(constants[0]))
        return Elliptical(trained.log_scale + (factor + constants[1])[:, None], trained.axes, trained.dof, share)


def judge(folder: Path, untrained: bool, forms=tuple(ALTERNATIVES)) -> dict:
    """Return scores of a model's leverage and, for a trained readout, of the alternatives, by variant and set."""
    data = {name: load_atoms(folder, name) for name in ("train", "valid", "test", "ood", "nonsense")}
    tests = {name: data[name] for name in ("test", "ood") if data[name] is not None}
    result = {"form": FORM_NUMBER, "leverage": {name: figures(d, law_of(d, "fitted_")) for name, d in tests.items()}}
    for name, d in tests.items():
        result["leverage"][name]["mean_leverage"] = float(d.fitted_leverage.mean())
    if data["nonsense"] is not None:
        result["nonsense"] = nonsense(data["train"], data["nonsense"])
    if "ood" in tests:
        cold, hot = tests["test"], tests["ood"]
        columns = {"with leverage": "fitted_"} | ({} if untrained else {"as trained": ""})
        result["frame_auroc"] = {
            "mean leverage": auroc(means(hot, hot.fitted_leverage), means(cold, cold.fitted_leverage))
        }
        for label, prefix in columns.items():
            largest = [max_over_frames(d, law_of(d, prefix).epistemic_std()) for d in (hot, cold)]
            result["frame_auroc"][f"largest epistemic std {label}"] = auroc(*largest)
    if untrained:
        return result
    result |= {"as trained": {name: figures(d, law_of(d)) for name, d in tests.items()}, "alternatives": {}}
    for title in forms:
        alternative = Alternative(data["train"], ALTERNATIVES[title])
        for d in (data["train"], data["valid"], *tests.values()):
            d.leverages = alternative.leverage(d)
        constants = alternative.fit(data["valid"], data["train"])
        scores = {name: figures(d, alternative.law(d, constants)) for name, d in tests.items()}
        fitted = {"growth": float(np.exp(constants[0])), "optimism": float(alternative.gap)}
        result["alternatives"][title] = fitted | scores
    return result


def nonsense(train: SimpleNamespace, data: SimpleNamespace) -> list[dict[str, float]]:
    """Return, for every configuration, its atom of least leverage and of least epistemic standard deviation, and the
    share of training atoms, of any species, that have less."""
    columns = {
        "leverage": [d.fitted_leverage for d in (train, data)],
        "epistemic_std": [law_of(d, "fitted_").epistemic_std() for d in (train, data)],
    }
    rows = []
    for frame in range(data.frame.max() + 1):
        row = {}
        for name, (of_training, values) in columns.items():
            least = values[data.frame == frame].min()
            row |= {name: float(least), f"training_below_{name}": float((of_training < least).mean())}
        rows.append(row)
    return rows


def table(paths: list[Path], forms: list[str]) -> str:
    """Return a Markdown table of results of `judge`, by model."""
    columns = [f"{name}, {where}" for where in ("in", "out") for name in ("NLL", "CE", "coverage@95", "Spearman")]
    rows = []
    for path in paths:
        content = load(path)
        for model, result in {path.stem: content}.items() if "leverage" in content else content.items():
            for form in forms:
                scores = result["alternatives"].get(form) or result[form]
                cells = [f"{scores[s][f]:.3f}" if s in scores else "" for s in ("test", "ood") for f in SHOWN]
                rows.append([model, form, *cells])
    return markdown(["model", "form", *columns], rows)


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("atoms", help="write the atoms of one model")
    one.add_argument("--host", choices=("mace", "nequip"), required=True)
    one.add_argument("--model", required=True)
    one.add_argument("--set", action="append", required=True, metavar="NAME=FILE", help="train, valid, test, ood, …")
    two = commands.add_parser("judge", help="score leverage and alternatives")
    two.add_argument("folder", type=Path)
    two.add_argument("--untrained", action="store_true", help="a stock model's readout, made by e2ip fit")
    three = commands.add_parser("table", help="print alternatives of several models")
    three.add_argument("results", type=Path, nargs="+")
    for command in (one, two):
        command.add_argument("--out", type=Path, required=True)
    for command in (two, three):
        command.add_argument("--forms", nargs="+", metavar="FORM", default=list(ALTERNATIVES))
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.command == "atoms":
        write_atoms(options.host, options.model, dict(item.split("=", 1) for item in options.set), options.out)
    elif options.command == "table":
        print(table(options.results, options.forms))
    else:
        result = judge(options.folder, options.untrained, options.forms)
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
