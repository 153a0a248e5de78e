"""Whether anything at hand tells the atoms at surfaces whose error bars are too narrow.

    python benchmarks/surfaces.py FOLDER … --out results.json

FOLDER has what ``leverage.py atoms`` writes of a model that was trained on a bulk crystal: train, valid, test, surface
and other sets. Atoms whose error is large for its predicted deviation might be told by their number of neighbours,
weighted by the model's envelope, inside or outside the range of the training atoms, or by the leverage of either half
of their features. The features of MACE are those of its two layers; NequIP has those of the last layer.
"""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from common import markdown, parser_of
from leverage import load_atoms, refitted, scored
from scipy.stats import spearmanr

#: Added to the diagonal of the features' covariance, over its mean.
RIDGE = 1e-4


def neighbours(data: SimpleNamespace) -> np.ndarray:
    """Return the sum of envelopes (N,) over every atom's neighbours."""
    return np.bincount(data.pairs[0], data.envelope, len(data.species))


def mahalanobis(train: SimpleNamespace, data: SimpleNamespace, columns: slice) -> np.ndarray:
    """Return squared distances (N,) of some columns of the features from those of all training atoms."""
    chosen = train.features[:, columns]
    covariance = np.cov(chosen.T)
    covariance += RIDGE * np.trace(covariance) / len(covariance) * np.eye(len(covariance))
    offset = data.features[:, columns] - chosen.mean(0)
    return np.einsum("ni,ij,nj->n", offset, np.linalg.inv(covariance), offset)


def root_mean_square(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values)))) if len(values) else float("nan")


def judge(folder: Path) -> dict[str, dict[str, float]]:
    """Return the figures of every test set of one model."""
    data = {path.stem: load_atoms(folder, path.stem) for path in sorted(folder.glob("*.npz"))}
    laws, _ = refitted("as shipped, here", data)
    train = data["train"]
    known, half = neighbours(train), train.features.shape[1] // 2
    results = {}
    for name in data.keys() - {"train", "valid", "nonsense"}:
        atoms = data[name]
        chosen = scored(atoms)
        deviation = np.sqrt(3.0) * laws[name].total_std()[chosen]
        ratio = np.linalg.norm(atoms.residual[chosen], axis=1) / deviation
        count = neighbours(atoms)[chosen]
        inside = (count >= known.min()) & (count <= known.max())
        told_by = {
            "leverage": atoms.fitted_leverage[chosen],
            "neighbours": np.abs(count - known.mean()),
            "first half": mahalanobis(train, atoms, slice(0, half))[chosen],
            "second half": mahalanobis(train, atoms, slice(half, None))[chosen],
        }
        results[name] = {
            "atoms_outside": int((~inside).sum()),
            "ratio_inside": root_mean_square(ratio[inside]),
            "ratio_outside": root_mean_square(ratio[~inside]),
        } | {f"spearman_{key}": float(spearmanr(value, ratio)[0]) for key, value in told_by.items()}
    return results


def table(results: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return a Markdown table of the surfaces of all models."""
    columns = ["error / deviation, inside", "outside (atoms)"]
    columns += [f"Spearman of {name}" for name in ("leverage", "neighbours", "first half", "second half")]
    rows = []
    for model, sets in results.items():
        values = list(sets["surface"].values())
        outside = f"{values[2]:.2f} ({values[0]:.0f})"
        rows.append([model, f"{values[1]:.2f}", outside, *(f"{value:.2f}" for value in values[3:])])
    return markdown(["model", *columns], rows)


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    options = parse()
    results = {}
    for folder in options.folders:
        run = folder.parent.name if folder.name == "atoms" else folder.name
        sets = judge(folder)
        results[run] = {
            name: {key: float(f"{value:.4g}") for key, value in sets[name].items()} for name in sorted(sets)
        }
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
