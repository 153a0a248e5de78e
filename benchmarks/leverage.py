"""What the leverage is worth, and what its constants would be worth otherwise, from one trained model.

    python benchmarks/leverage.py atoms --host mace --model my.model --set train=train.xyz --set valid=… --out FOLDER
    python benchmarks/leverage.py judge FOLDER --out results.json
    python benchmarks/leverage.py table results.json … --forms "regions by the power 2" …
    python benchmarks/leverage.py figure FOLDER … --out figure.png
    python benchmarks/leverage.py errors FOLDER …

`atoms` runs in the environment of MACE or NequIP and writes every atom's features, neighbours, error and distribution
(as trained, and as the model has been fitted) to FOLDER/<set>.npz. `judge` scores the model's own leverage beside
the distribution as trained and beside alternatives, all fitted on the validation set; out of distribution nothing is
fitted. `table` prints alternatives of several models, and means over them: a file has the result of `judge`, or several
by name. `figure` draws predicted over observed errors against the leverage, of the form as it is. `errors` prints how
errors go with the distance d and the size of the training forces.
"""

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from ase.calculators.calculator import Calculator
from ase.io import iread
from common import markdown, parser_of
from leverage_judged import by_model, summary, table

from e2ip_plugins import families
from e2ip_plugins.families.laws import Elliptical, law_of
from e2ip_plugins.fitting.constants import Samples
from e2ip_plugins.fitting.moments import Moments
from e2ip_plugins.fitting.sample import training_subset
from e2ip_plugins.leverage.form import FORM, Support, inflate, log_around
from e2ip_plugins.leverage.module import Leverage, Neighbours
from e2ip_plugins.readout.readout import Readout
from e2ip_plugins.readout.vanishing import vanishing
from e2ip_plugins.scores.metrics import auroc, score_atoms, summarise

NIW = families.get("e2ip")
FIGURES = ("force_mae", "force_rmse", "nll", "calibration_error", "coverage95", "spearman_epistemic", "energy_score")
FIGURES += ("z_rms_minor", "z_rms_middle", "z_rms_major")

#: Number of the package's form, in results; a change of the form raises it.
FORM_NUMBER = 11
#: Bins of the leverage in the figure, and the atoms that one must have.
BINS, LEAST_ATOMS = np.geomspace(0.25, 512.0, 23), 50
#: An alternative that is no constant of the form: h̄ is h.
WITHOUT_NEIGHBOURS = "own leverage alone"
#: m and σ of the variance around an atom.
AROUND = ((1, 0.5), (2, 0.1), (2, 0.5), (4, 0.01), (4, 0.05), (4, 0.5), (6, 0.01))
#: Alternatives change one thing at a time. results/leverage.json has further ones, which commit 210d723 computes.
ALTERNATIVES: dict[str, dict[str, Any]] = {
    "as shipped, here": {},
    **{f"ridge {ridge}": {"ridge": float(ridge)} for ridge in ("1e-3", "1e-4")},
    "one region": {"max_regions_of_kind": 1},
    "regions share nothing": {"shared": 0.0},
    "regions share 0.3": {"shared": 0.3},
    "a region for every 4 atoms per feature": {"atoms_per_feature": 4},
    **{f"regions by the power {power}": {"region_power": power} for power in (2, 3, 6)},
    WITHOUT_NEIGHBOURS: {},
    **{f"tau {tau}": {"soft": float(tau)} for tau in (1, 3, 12)},
    "psi(t) = t": {"soft": 1e5, "prior_growth": 0.5},
    **{f"relative {weight}": {"near_weight": float(weight)} for weight in (0, 0.2, 0.6, 1)},
    "around: own alone": {"around_share": 0.0},
    **{f"around {m}, {share}": {"around_power": m, "around_share": share} for m, share in AROUND},
    **{f"remote from {remote}": {"remote": float(remote)} for remote in (3, 4, 7, 10)},
    **{f"linear from {linear}": {"linear": float(linear)} for linear in (20, 30, 50, 80)},
    **{f"anisotropy {limit}": {"anisotropy": limit} for limit in (0.3, 0.5, 1.2, 1e3)},
    **{f"evidence {limit}": {"evidence": limit} for limit in (0.5, 1, 4, 1e6)},
    **{f"prior {median}": {"prior_growth": float(median)} for median in (1, 5)},
    "prior 2.5, narrow": {"prior_width": 0.3},
    **{f"prior 2.5, {width} wide": {"prior_width": width} for width in (0.8, 1.5)},
    "prior 3, 0.8 wide": {"prior_growth": 3.0, "prior_width": 0.8},
    "no relative error": {"relative_most": 0.0},
    **{f"relative error {share}": {"relative_error": share} for share in (0.03, 0.08)},
    "no optimism": {"surplus_slope": 0.0},
    **{f"optimism {factor}": {"surplus_slope": float(factor)} for factor in (1, 2)},
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
            forces = calculator.results["forces"]
            atoms |= {"residual": reference - forces, "forces": forces, "species": frame.numbers}
            atoms |= {"frame": np.full(len(frame), index), "pairs": atoms["pairs"] + first}
            energy = frame.info.get("REF_energy", np.nan) - calculator.results["energy"]
            atoms |= {"energy_error": np.array([energy])}
            for key, value in atoms.items():
                rows.setdefault(key, []).append(value)
            first += len(frame)
        table = {key: np.concatenate(value, axis=1 if key == "pairs" else 0) for key, value in rows.items()}
        np.savez(out / f"{name}.npz", **table)
        print(f"{out / name}.npz: force MAE {1000 * np.abs(table['residual']).mean():.1f} meV/Å", flush=True)


def load_atoms(folder: Path, name: str) -> SimpleNamespace:
    return SimpleNamespace(**np.load(folder / f"{name}.npz"))


def scored(data: SimpleNamespace) -> np.ndarray:
    """Return the atoms (N,) that say something about errors: their force does not vanish by symmetry."""
    return np.isfinite(data.residual).all(-1) & ~vanishing(data.forces, data.residual).numpy()


def trained_law(data: SimpleNamespace, prefix: str = "") -> Elliptical:
    return law_of(NIW, {key.name: getattr(data, prefix + key.name) for key in NIW.parameter_keys})


def log_variance(data: SimpleNamespace) -> torch.Tensor:
    """Return ln v (N,)."""
    return NIW.log_variance({key.name: torch.from_numpy(getattr(data, key.name)) for key in NIW.parameter_keys})


def means(data: SimpleNamespace, values: np.ndarray) -> np.ndarray:
    """Return the mean over the atoms of every frame."""
    return np.bincount(data.frame, values) / np.bincount(data.frame)


def max_over_frames(data: SimpleNamespace, values: np.ndarray) -> np.ndarray:
    """Return the largest value of every frame."""
    most = np.full(data.frame.max() + 1, -np.inf)
    np.maximum.at(most, data.frame, values)
    return most


def figures(data: SimpleNamespace, law: Elliptical) -> dict[str, float]:
    chosen = scored(data)
    law = Elliptical(law.log_scale[chosen], law.axes[chosen], law.dof[chosen], law.epistemic_share[chosen])
    scores = summarise(score_atoms(data.residual[chosen], law))
    return {name: scores[name] for name in FIGURES}


def supports(title: str, data: dict[str, SimpleNamespace]) -> tuple[dict[str, np.ndarray], dict[str, Support]]:
    """Return kinds (N,) and support of the atoms of all sets, with one of `ALTERNATIVES` in place of the form."""
    form = FORM._replace(**ALTERNATIVES[title])
    species = np.unique(np.concatenate([d.species for d in data.values()]))
    kinds = {name: np.searchsorted(species, d.species) for name, d in data.items()}
    train = data["train"]
    features = {kind: train.features[kinds["train"] == kind] for kind in np.unique(kinds["train"]).tolist()}
    leverage = Leverage(train.features.shape[1], len(species)).double()
    Moments(features, form).store(leverage, features)
    log_own = log_variance(train)
    leverage.log_variance.fill_(log_own.mean())
    for kind in features:
        leverage.log_variance[kind] = log_own[kinds["train"] == kind].mean()
    of_sets = {}
    for name, d in data.items():
        pairs = Neighbours(torch.ones(len(d.envelope)), *map(torch.from_numpy, (d.envelope, d.pairs[1], d.pairs[0])))
        neighbours = None if title == WITHOUT_NEIGHBOURS else pairs
        of_sets[name] = leverage(torch.from_numpy(d.features), torch.from_numpy(kinds[name]), None, neighbours, form)
    return kinds, of_sets


def refitted(title: str, data: dict[str, SimpleNamespace]) -> tuple[dict[str, Elliptical], dict[str, float]]:
    """Return the laws of all sets, and the fitted constants, with one of `ALTERNATIVES` in place of the form."""
    form, names = FORM._replace(**ALTERNATIVES[title]), [key.name for key in NIW.parameter_keys]
    kinds, of_sets = supports(title, data)
    train, tables = data["train"], {}
    for name, d in data.items():
        support = of_sets[name]
        columns = {"distance": support.distance.numpy(), "typical": support.log_typical.numpy()}
        columns["around"] = log_around(support, log_variance(d), form).numpy()
        tables[name] = {"residual": d.residual, "forces": d.forces, "frames": d.frame, "kinds": kinds[name], **columns}

    def samples(name: str, atoms: np.ndarray | slice = slice(None)) -> Samples:
        parameters = {key: getattr(data[name], key)[atoms] for key in names}
        return Samples(NIW, parameters, {key: column[atoms] for key, column in tables[name].items()}, form)

    subset = np.isin(train.frame, training_subset(train.frame.max() + 1, data["valid"].frame.max() + 1))
    constants = samples("valid", scored(data["valid"])).fit(samples("train", subset & scored(train)))
    growth, surplus = torch.tensor([[constants.growth], [constants.surplus]], dtype=torch.float64)
    laws = {}
    for name in data:
        atoms = samples(name)
        support = atoms.support._replace(growth=growth, surplus=surplus)
        log_factor, excess = inflate(support, atoms.log_own, atoms.log_u, form)
        log_scale = atoms.law.log_scale + (log_factor + excess.log1p() + constants.log_scale).numpy()[:, None]
        laws[name] = Elliptical(log_scale, atoms.law.axes, atoms.law.dof, (excess / (1 + excess)).numpy())
    return laws, {"growth": constants.growth, "optimism": constants.optimism}


def judge(folder: Path, untrained: bool, forms=tuple(ALTERNATIVES)) -> dict:
    """Return scores of a model's leverage and, for a trained readout, of the alternatives, by variant and set."""
    data = {path.stem: load_atoms(folder, path.stem) for path in sorted(folder.glob("*.npz"))}
    tests = {name: d for name, d in data.items() if name not in ("train", "valid", "nonsense")}
    result = {
        "form": FORM_NUMBER,
        "leverage": {name: figures(d, trained_law(d, "fitted_")) for name, d in tests.items()},
    }
    for name, d in tests.items():
        result["leverage"][name]["mean_leverage"] = float(d.fitted_leverage.mean())
    if "nonsense" in data:
        result["nonsense"] = nonsense(data["train"], data["nonsense"])
    if "ood" in tests:
        cold, hot = tests["test"], tests["ood"]
        columns = {"with leverage": "fitted_"} | ({} if untrained else {"as trained": ""})
        result["frame_auroc"] = {
            "mean leverage": auroc(means(hot, hot.fitted_leverage), means(cold, cold.fitted_leverage))
        }
        for label, prefix in columns.items():
            largest = [max_over_frames(d, trained_law(d, prefix).epistemic_std()) for d in (hot, cold)]
            result["frame_auroc"][f"largest epistemic std {label}"] = auroc(*largest)
    if untrained:
        return result
    result |= {"as trained": {name: figures(d, trained_law(d)) for name, d in tests.items()}, "alternatives": {}}
    studied = {"train": data["train"], "valid": data["valid"], **tests}
    for title in forms:
        laws, constants = refitted(title, studied)
        result["alternatives"][title] = constants | {name: figures(d, laws[name]) for name, d in tests.items()}
    return result


def nonsense(train: SimpleNamespace, data: SimpleNamespace) -> list[dict[str, float]]:
    """Return, for every configuration, its atom of least leverage and of least epistemic standard deviation, and the
    share of training atoms, of any species, that have less."""
    columns = {
        "leverage": [d.fitted_leverage for d in (train, data)],
        "epistemic_std": [trained_law(d, "fitted_").epistemic_std() for d in (train, data)],
    }
    rows = []
    for frame in range(data.frame.max() + 1):
        row = {}
        for name, (of_training, values) in columns.items():
            least = values[data.frame == frame].min()
            row |= {name: float(least), f"training_below_{name}": float((of_training < least).mean())}
        rows.append(row)
    return rows


def ratios(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return leverages, and root mean squares of predicted errors over those of errors, of all test atoms in bins."""
    data = {
        path.stem: load_atoms(folder, path.stem) for path in sorted(folder.glob("*.npz")) if path.stem != "nonsense"
    }
    laws, _ = refitted("as shipped, here", data)
    tests = [name for name in data if name not in ("train", "valid")]
    chosen = {name: scored(data[name]) for name in tests}
    leverage = np.concatenate([data[name].fitted_leverage[chosen[name]] for name in tests])
    predicted = np.concatenate([laws[name].total_std()[chosen[name]] for name in tests])
    error = np.concatenate([data[name].residual[chosen[name]] for name in tests])
    bins = np.digitize(leverage, BINS)
    counts = [(bins == i).sum() for i in range(1, len(BINS))]
    kept = [i + 1 for i, count in enumerate(counts) if count >= LEAST_ATOMS]
    middle = [np.exp(np.log(leverage[bins == i]).mean()) for i in kept]
    ratio = [np.sqrt(np.square(predicted[bins == i]).mean() / np.square(error[bins == i]).mean()) for i in kept]
    return np.array(middle), np.array(ratio)


def errors(folder: Path) -> list[list[str]]:
    """Return rows of a table: for every set, root mean squares of errors over d times that of the training forces.

    Both by species; geometric means of d in bins of it.
    """
    data = {path.stem: load_atoms(folder, path.stem) for path in sorted(folder.glob("*.npz"))}
    kinds, of_sets = supports("as shipped, here", data)
    train, rows = data["train"], []
    square = np.bincount(kinds["train"], np.square(train.forces + train.residual).mean(1)) / np.bincount(kinds["train"])
    for name in [name for name in data if name not in ("train", "valid", "nonsense")]:
        chosen = scored(data[name])
        distance = of_sets[name].distance.numpy()[chosen]
        relative = np.square(data[name].residual[chosen]).mean(1) / square[kinds[name][chosen]]
        bins = np.digitize(distance, BINS)
        for i in [i for i in range(1, len(BINS)) if (bins == i).sum() >= LEAST_ATOMS]:
            middle = np.exp(np.log(distance[bins == i]).mean())
            error = np.sqrt(relative[bins == i].mean()) / middle
            rows.append([folder.parent.name, name, f"{middle:.1f}", f"{error:.4f}"])
    return rows


def figure(folders: list[Path], out: Path) -> None:
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for folder in folders:
        run = folder.parent.name if folder.name == "atoms" else folder.name
        ax.plot(*ratios(folder), marker="o", markersize=3, linewidth=1, label=run.replace("_e2ip", ""))
    ax.axhline(1.0, color="black", linewidth=0.8)
    ax.set(xscale="log", yscale="log", xlabel="leverage", ylabel="predicted / observed error")
    ax.set_yticks(ticks := [0.5, 0.7, 1.0, 1.5, 2.0, 3.0], [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    fig.legend(fontsize=6, loc="outside right upper")
    fig.savefig(out, dpi=200)


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
    four = commands.add_parser("figure", help="draw predicted over observed errors against the leverage")
    four.add_argument("folders", type=Path, nargs="+")
    five = commands.add_parser("errors", help="print errors beside distances and the size of the training forces")
    five.add_argument("folders", type=Path, nargs="+")
    for command in (one, two, four):
        command.add_argument("--out", type=Path, required=True)
    for command in (two, three):
        command.add_argument("--forms", nargs="+", metavar="FORM", default=list(ALTERNATIVES))
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.command == "atoms":
        write_atoms(options.host, options.model, dict(item.split("=", 1) for item in options.set), options.out)
    elif options.command == "table":
        results = by_model(options.results)
        print(table(results, options.forms), "", summary(results, options.forms), sep="\n")
    elif options.command == "figure":
        figure(options.folders, options.out)
    elif options.command == "errors":
        heads = ["model", "set", "d", "error / (d · training forces)"]
        print(markdown(heads, [row for folder in options.folders for row in errors(folder)]))
    else:
        result = judge(options.folder, options.untrained, options.forms)
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
