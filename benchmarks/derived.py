"""What is true of the uncertainty of combined forces: errors against `combined_force`'s bound and independent errors.

    python benchmarks/derived.py NAME=PREDICTIONS.xyz ...       # writes benchmarks/results/derived.json
    python benchmarks/derived.py                                # the table of the results

Predictions are those of a model with a readout for frames with reference forces, as `e2ip compare` reads them. Bonds
are pairs within 1.15 times the sum of covalent radii; groups are an atom and the hydrogens bonded to it. Printed are
root mean squares of error over predicted standard deviation: 1 is right, below 1 too cautious.
"""

from collections.abc import Iterator
from pathlib import Path

import ase.io
import numpy as np
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.neighborlist import natural_cutoffs, neighbor_list
from common import RESULTS, load, markdown, parser_of, save

from e2ip_plugins.md import combined_force
from e2ip_plugins.predictions.prediction_files import read_predictions

OUT = RESULTS / "derived.json"


def combinations(atoms: Atoms) -> Iterator[tuple[str, np.ndarray]]:
    """Yield kind and weights (N, 3) of every combination of forces of a frame."""
    first, second, vectors = neighbor_list("ijD", atoms, natural_cutoffs(atoms, mult=1.15))
    x = np.array([1.0, 0.0, 0.0])

    def weights(entries: dict[int, np.ndarray]) -> np.ndarray:
        result = np.zeros((len(atoms), 3))
        result[list(entries)] = list(entries.values())
        return result

    for i, j, d in zip(first, second, vectors, strict=True):
        if i < j:
            u = d / np.linalg.norm(d)
            yield "along a bond", weights({i: u / 2, j: -u / 2})
            yield "mean of two bonded atoms", weights({i: x / 2, j: x / 2})
    for heavy in np.flatnonzero(atoms.numbers != 1):
        group = [heavy, *(j for j in second[first == heavy] if atoms.numbers[j] == 1)]
        if len(group) > 1:
            yield "mean of an atom and its hydrogens", weights(dict.fromkeys(group, x / len(group)))
    yield "mean of all atoms", weights(dict.fromkeys(range(len(atoms)), x / len(atoms)))
    for k in range(len(atoms)):
        yield "one atom", weights({k: x})


def judge(path: Path) -> dict[str, dict[str, float]]:
    """Return root mean squares of error over standard deviation, and of the error in eV/Å, by kind."""
    predictions = read_predictions(path)
    parameters = {name: torch.as_tensor(values) for name, values in predictions.parameters.items()}
    covariances = predictions.family.derive(parameters)["forces_cov"].numpy()
    errors = predictions.forces - predictions.reference_forces
    by_kind: dict[str, list] = {}
    start = 0
    for frame in ase.io.iread(path, ":"):
        atoms = slice(start, start := start + len(frame))
        frame.arrays["forces_cov"] = covariances[atoms]
        frame.calc = SinglePointCalculator(frame, forces=errors[atoms])
        for kind, weights in combinations(frame):
            error, bound, independent = combined_force(frame, weights)
            by_kind.setdefault(kind, []).append((error, error / independent, error / bound))
    names = ("error", "independent", "bound")
    means = {kind: np.sqrt(np.mean(np.square(rows), axis=0)).tolist() for kind, rows in by_kind.items()}
    return {kind: dict(zip(names, mean, strict=True)) for kind, mean in means.items()}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("files", nargs="*", metavar="NAME=PREDICTIONS.xyz")
    options = parser.parse_args()
    if options.files:
        save(OUT, {name: judge(Path(path)) for name, path in (text.split("=", 1) for text in options.files)})
    rows = [
        [name, kind, f"{v['error']:.3f}", f"{v['independent']:.2f}", f"{v['bound']:.2f}"]
        for name, kinds in load(OUT).items()
        for kind, v in kinds.items()
    ]
    print(markdown(["model", "combination", "error, eV/Å", "to independent", "to the bound"], rows))


if __name__ == "__main__":
    main()
