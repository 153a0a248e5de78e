"""How honest error bars of energies and of their differences are, beside other ways to them on the same features.

    python benchmarks/energies.py judge FOLDER … --out runs/energies.json
    python benchmarks/energies.py committee RUNS/demo_mace_e2ip_s1 … --out runs/energies.json
    python benchmarks/energies.py table

FOLDER has the atoms of one trained model, as `leverage.py atoms` writes them, and the name of its run of `e2ip bench`.
Every way has one constant (two where two are added), which is fitted to the energies of the validation set: for
Gaussian errors that of largest likelihood. `committee` adds the stock models of the same set beside such a run: their
mean is what is predicted, so that the errors are its own.

The ways: a standard deviation that is the same for every atom and adds up like √N; the last-layer posterior of Bigi et
al. (2024) on the same features (LLPR), of all atoms of a frame together and of each species apart; a shallow ensemble
(Kellner and Ceriotti 2024) of last layers on these features; amplitudes of independent atoms; the error vector, and
both it and LLPR; and other constants of the error vector.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from common import RESULTS, load, parser_of, save
from energies_tables import beside, by_set, pooled, table
from leverage import load_atoms, refitted, supports
from scipy.optimize import minimize
from scipy.stats import spearmanr

from e2ip_plugins.bench import catalogue
from e2ip_plugins.bench.commands import prediction
from e2ip_plugins.bench.plan import Run
from e2ip_plugins.leverage.energies import FLOOR, POWER, WIDTH
from e2ip_plugins.leverage.form import FORM
from e2ip_plugins.predictions.prediction_files import read_predictions
from e2ip_plugins.scores.energies import central_level, crps, negative_log_likelihood
from e2ip_plugins.scores.metrics import CALIBRATION_LEVELS

#: Regularisation of LLPR's covariance, in units of its mean eigenvalue.
RIDGE = 1e-6
#: Members of the shallow ensemble, steps of its training and their rate in units of its first weights.
MEMBERS, STEPS, RATE = 16, 2000, 0.01
#: Prior of the ratio of two constants: about equal shares, by factors of this many e-folds.
SHARES = 1.5
#: Pairs of a set.
MAX_PAIRS = 4000
#: Bootstrap resamples of frames for intervals that hold 95 %.
RESAMPLES = 300


class Atoms(NamedTuple):
    """Atoms of a set: species, features raw and whitened (N, D), σ, d/2 and frames (N,); errors (F,) in eV."""

    kind: np.ndarray
    features: np.ndarray
    white: np.ndarray
    std: np.ndarray
    half_distance: np.ndarray
    frame: np.ndarray
    error: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        return np.bincount(self.frame)

    def sums(self, rows: np.ndarray, kinds: int = 1) -> np.ndarray:
        """Return sums over the atoms of every frame, of each kind apart: (F, kinds * columns)."""
        sums = np.zeros((len(self.error) * kinds, rows.shape[1]))
        np.add.at(sums, self.frame * kinds + (self.kind if kinds > 1 else 0), rows)
        return sums.reshape(len(self.error), -1)


#: Vectors (F, M) of every set by name. Their norms, times a constant that is fitted, are standard deviations.
Vectors = dict[str, np.ndarray]
Way = Callable[[dict[str, Atoms]], list[Vectors]]


def read(folder: Path) -> dict[str, Atoms]:
    """Return the atoms of every set by its name, with σ and d/2 as `FORM` has them."""
    names = [path.stem for path in sorted(folder.glob("*.npz")) if path.stem not in ("nonsense", "rotated")]
    data: dict[str, SimpleNamespace] = {name: load_atoms(folder, name) for name in names}
    laws, _ = refitted("as shipped, here", data)
    kinds, of_sets = supports("as shipped, here", data)
    sets = {}
    for name, d in data.items():
        white, h = FORM.soft**0.5 * of_sets[name].whitened.numpy(), 0.5 * of_sets[name].distance.numpy()
        sets[name] = Atoms(kinds[name], d.features, white, laws[name].total_std(), h, d.frame, d.energy_error)
    return sets


def constant(sets: dict[str, Atoms]) -> list[Vectors]:
    """Return √N of every frame."""
    return [{name: np.sqrt(d.sizes)[:, None] for name, d in sets.items()}]


def llpr(sets: dict[str, Atoms], by_species: bool = False) -> list[Vectors]:
    """Return Λ^(-1/2) Vᵀ f with f the sum of a frame's features, and V Λ Vᵀ that of (f/N)(f/N)ᵀ over training frames.

    With ``by_species`` f is the sums of whitened features by species.
    """
    kinds = 1 + max(int(d.kind.max()) for d in sets.values())

    def summed(d: Atoms) -> np.ndarray:
        return d.sums(d.white, kinds) if by_species else d.sums(d.features)

    train = summed(sets["train"]) / sets["train"].sizes[:, None]
    covariance = train.T @ train
    values, axes = np.linalg.eigh(covariance + RIDGE * np.trace(covariance) / len(covariance) * np.eye(len(covariance)))
    return [{name: summed(d) @ (axes / np.sqrt(values)) for name, d in sets.items()}]


def shallow(sets: dict[str, Atoms]) -> list[Vectors]:
    """Return deviations of the members of an ensemble from their mean, the model's own energy, which stays as it is.

    A member is a vector of weights on the sum of a frame's features. They are trained from random ones by the
    likelihood of the energies of training frames, until that of the validation set is highest.
    """
    sums = {name: torch.from_numpy(d.sums(d.features)) for name, d in sets.items()}
    size = sums["train"].square().mean().sqrt()
    sums = {name: rows / size for name, rows in sums.items()}
    finite = {name: np.isfinite(sets[name].error) for name in ("train", "valid")}
    squares = {name: torch.from_numpy(sets[name].error[kept] ** 2) for name, kept in finite.items()}
    scale = float(squares["valid"].mean().sqrt())

    drawn = torch.randn(
        sums["train"].shape[1], MEMBERS, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    weights = (drawn * scale / len(drawn) ** 0.5).requires_grad_()

    def deviations() -> torch.Tensor:
        return (weights - weights.mean(1, keepdim=True)) / (MEMBERS - 1) ** 0.5

    def loss(name: str) -> torch.Tensor:
        variance = (sums[name][finite[name]] @ deviations()).square().sum(1)
        return (squares[name] / variance + variance.log()).mean()

    optimizer, least, best = torch.optim.Adam([weights], lr=RATE * scale), np.inf, deviations().detach()
    for _ in range(STEPS):
        with torch.no_grad():
            now = float(loss("valid"))
        if now < least:
            least, best = now, deviations().detach().clone()
        optimizer.zero_grad()
        loss("train").backward()
        optimizer.step()
    return [{name: (rows @ best).numpy() for name, rows in sums.items()}]


def amplitudes(sets: dict[str, Atoms], power: float, floor: float) -> dict[str, np.ndarray]:
    """Return σ (d/2)^power of every atom, plus ``floor`` times the geometric mean of σ over validation atoms."""
    level = floor * np.exp(np.log(sets["valid"].std).mean())
    return {name: d.std * d.half_distance**power + level for name, d in sets.items()}


def independent(sets: dict[str, Atoms], power: float = POWER) -> list[Vectors]:
    """Return vectors in which every atom has a direction of its own: only their norms mean something."""
    of_atoms = amplitudes(sets, power, 0.0)
    return [{name: np.sqrt(d.sums(of_atoms[name][:, None] ** 2)) for name, d in sets.items()}]


def vector(
    sets: dict[str, Atoms],
    power: float = POWER,
    floor: float = FLOOR,
    width: float = WIDTH,
    waves: int = 32,
    coherent: float = 0.0,
    shared: bool = False,
    shifted: bool = False,
) -> list[Vectors]:
    """Return error vectors; a share ``coherent`` of each atom's variance is common to all of its species.

    With ``shared`` all species share one block, ``shifted`` with phases of their own.
    """
    kinds = 1 + max(int(d.kind.max()) for d in sets.values())
    shifts = np.random.default_rng(0).uniform(0.0, 2.0 * np.pi * shifted, (kinds, waves))
    features = sets["train"].white.shape[1]
    drawn = torch.randn(features, waves, generator=torch.Generator().manual_seed(0), dtype=torch.float64).numpy()
    drawn /= width * np.sqrt(features)
    of_atoms, vectors = amplitudes(sets, power, floor), {}
    for name, d in sets.items():
        phases = d.white @ drawn + shifts[d.kind]
        phi = np.concatenate([np.cos(phases), np.sin(phases)], axis=1) * np.sqrt((1.0 - coherent) / waves)
        phi = np.concatenate([phi, np.full((len(phi), 1), np.sqrt(coherent))], axis=1)
        vectors[name] = d.sums(of_atoms[name][:, None] * phi, 1 if shared else kinds)
    return [vectors]


WAYS: dict[str, Way] = {
    "error vector, as shipped": vector,
    "constant": constant,
    "LLPR": llpr,
    "LLPR, by species": lambda sets: llpr(sets, by_species=True),
    f"shallow ensemble of {MEMBERS}, scaled": shallow,
    "independent atoms": independent,
    "independent atoms, power 0": lambda sets: independent(sets, 0.0),
    **{f"power {power:g}": lambda sets, power=power: vector(sets, power=power) for power in (0.0, 0.15, 0.35, 0.5)},
    **{f"floor {floor:g}": lambda sets, floor=floor: vector(sets, floor=floor) for floor in (0.0, 0.3, 1.0)},
    **{f"width {width:g}": lambda sets, width=width: vector(sets, width=width) for width in (0.25, 0.5, 1.0)},
    **{f"{waves} waves": lambda sets, waves=waves: vector(sets, waves=waves) for waves in (8, 16, 128)},
    **{f"coherent {share:g}": lambda sets, share=share: vector(sets, coherent=share) for share in (0.05, 0.2)},
    "species share a block": lambda sets: vector(sets, shared=True),
    "species share a block, shifted": lambda sets: vector(sets, shared=True, shifted=True),
    "error vector and LLPR": lambda sets: vector(sets) + llpr(sets),
    "error vector and LLPR, by species": lambda sets: vector(sets) + llpr(sets, by_species=True),
}


def fit(vectors: list[Vectors], error: np.ndarray) -> np.ndarray:
    """Return the squares of the constants, from the validation set."""
    finite = np.isfinite(error)
    squares = np.stack([np.square(part["valid"]).sum(1) for part in vectors], axis=1)[finite]
    error = error[finite]
    start = np.log(np.square(error).mean() / squares.shape[1] / squares.mean(0))
    if squares.shape[1] == 1:
        return np.array([(error**2 / squares[:, 0]).mean()])

    def objective(logarithms: np.ndarray) -> float:
        variance = squares @ np.exp(logarithms)
        shares = logarithms - start - (logarithms - start).mean()
        return float(0.5 * (error**2 / variance + np.log(variance)).sum() + 0.5 * np.square(shares / SHARES).sum())

    return np.exp(minimize(objective, start, method="Nelder-Mead").x)


def pairs_of(d: Atoms) -> tuple[np.ndarray, np.ndarray]:
    """Return pairs of frames of the same composition, at most `MAX_PAIRS` of them."""
    composition = d.sums(np.eye(1 + d.kind.max())[d.kind])
    first, second = np.triu_indices(len(composition), 1)
    same = (composition[first] == composition[second]).all(1) & np.isfinite(d.error[first] + d.error[second])
    first, second = first[same], second[same]
    if len(first) > MAX_PAIRS:
        chosen = np.random.default_rng(0).choice(len(first), MAX_PAIRS, replace=False)
        first, second = first[chosen], second[chosen]
    return first, second


def scores(error: np.ndarray, std: np.ndarray, frames: np.ndarray) -> dict[str, Any]:
    """Return the scores of errors (n,), and bootstrap intervals of CE and coverage.

    ``frames`` (n, 1) or (n, 2) are those that each error depends on, which the bootstrap draws.
    """
    level = central_level(error, std)
    number = int(frames.max()) + 1
    draws = np.random.default_rng(0).multinomial(number, np.full(number, 1.0 / number), RESAMPLES)
    weights = draws[:, frames].prod(2).astype(float)
    weights = weights[weights.sum(1) > 0]
    levels = np.append(CALIBRATION_LEVELS, 0.95)
    below = weights @ (level[:, None] <= levels) / weights.sum(1, keepdims=True)
    of_resamples = {
        "calibration_error": np.abs(below[:, :-1] - levels[:-1]).mean(1),
        "coverage95": below[:, -1],
    }
    intervals = {f"{name}_interval": np.quantile(x, [0.025, 0.975]).tolist() for name, x in of_resamples.items()}
    rank = spearmanr(np.abs(error), std).statistic if np.ptp(std) > 1e-9 * std.max() else 0.0
    return {
        "nll": float(negative_log_likelihood(error, std).mean()),
        "crps": float(crps(error, std).mean()),
        "calibration_error": float(np.mean([abs((level <= q).mean() - q) for q in CALIBRATION_LEVELS])),
        "coverage95": float((level <= 0.95).mean()),
        "spearman": float(rank),
        "rms": float(np.sqrt(np.square(error).mean())),
        "number": len(error),
        **intervals,
    }


def rows_of(sets: dict[str, Atoms], vectors: list[Vectors], squares: np.ndarray, differences: bool) -> dict[str, Any]:
    """Return the scores of one way by set, with the roots of its constants."""
    rows: dict[str, Any] = {"constants": np.sqrt(squares).tolist()}
    for name, d in sets.items():
        if name in ("train", "valid"):
            continue
        parts = [part[name] for part in vectors]
        finite = np.flatnonzero(np.isfinite(d.error))
        std = np.sqrt(sum(square * np.square(part).sum(1) for square, part in zip(squares, parts, strict=True)))
        rows[name] = {"energies": scores(d.error[finite], std[finite], finite[:, None])}
        first, second = pairs_of(d)
        if len(first) and differences:
            apart = [np.square(part[first] - part[second]).sum(1) for part in parts]
            std = np.sqrt(sum(square * part for square, part in zip(squares, apart, strict=True)))
            kept = std > 1e-6 * std.max()
            of_pairs = np.stack([first, second], axis=1)[kept]
            rows[name]["differences"] = scores((d.error[first] - d.error[second])[kept], std[kept], of_pairs)
    return rows


def judge(folder: Path) -> dict[str, Any]:
    """Return scores of all ways, by set: of energies, and of their differences where the way has vectors."""
    sets, result = read(folder), {}
    for title, way in WAYS.items():
        vectors = way(sets)
        has_vectors = way not in (constant, independent) and "independent" not in title
        result[title] = rows_of(sets, vectors, fit(vectors, sets["valid"].error), has_vectors)
    return result


def committee(run: Path) -> dict[str, Any]:
    """Return scores of the stock models beside a run of e²IP, as they disagree and scaled."""
    dataset, host, _, _ = run.name.rsplit("_", 3)
    described = catalogue.dataset(dataset)
    members = [
        (path, Run(dataset, host, "stock", int(path.name.rsplit("_s", 1)[1])))
        for path in sorted(run.parent.glob(f"{dataset}_{host}_stock_s*"))
        if (path / "finished").exists()
    ]
    sets, vectors = {}, {}
    for label in described.labels:
        if label in ("rotated", "further"):
            continue
        frames = [read_predictions(path / prediction(stock, described, label)) for path, stock in members]
        energies = np.stack([frame.energy for frame in frames])
        vectors[label] = (energies - energies.mean(0)).T / np.sqrt(len(frames) - 1)
        first, none = frames[0], np.zeros((len(frames[0].species), 0))
        kinds = np.unique(first.species, return_inverse=True)[1]
        error = first.reference_energy - energies.mean(0)
        frame_of_atom = np.repeat(np.arange(len(first.sizes)), first.sizes)
        sets[label] = Atoms(kinds, none, none, none, none, frame_of_atom, error)
    scaled = fit([vectors], sets["valid"].error)
    title = f"committee of {len(members)}"
    return {
        title: rows_of(sets, [vectors], np.ones(1), differences=True),
        f"{title}, scaled": rows_of(sets, [vectors], scaled, differences=True),
    }


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__ or "")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("judge", help="score the ways of finished models")
    one.add_argument("folders", type=Path, nargs="+", help="folders of atoms; their names are those of the models")
    two = commands.add_parser("committee", help="add the stock models of the same sets")
    two.add_argument("folders", type=Path, nargs="+", help="folders of runs of e²IP in the folder of e2ip bench")
    three = commands.add_parser("table", help="print the tables")
    for command in (one, two, three):
        command.add_argument("--out", type=Path, default=RESULTS / "energies.json")
    return parser.parse_args()


def main() -> None:
    options = parse()
    content = load(options.out) if options.out.exists() else {}
    if options.command != "table":
        score = {"judge": judge, "committee": committee}[options.command]
        for folder in options.folders:
            save(options.out, {folder.name: {**content.get(folder.name, {}), **score(folder)}})
            print(f"{folder.name}: done", flush=True)
        return
    for kind in ("energies", "differences"):
        print(f"{kind.capitalize()}, means over models and sets\n\n{table(content, kind)}\n")
    for method in ("committee", "shallow ensemble", "species share a block"):
        for kind in ("energies", "differences"):
            print(f"{kind.capitalize()}, models with rows of: {method}\n\n{beside(content, kind, method)}\n")
    print(f"All frames of a group together\n\n{pooled(content)}\n")
    print(by_set(content))


if __name__ == "__main__":
    main()
