"""What is true of the uncertainty of combined forces: errors against `combined_force`'s bound and independent errors.

    python benchmarks/derived.py [--write] NAME=PREDICTIONS.xyz ...

Predictions are those of a model with a readout for frames with reference forces, as `e2ip compare` reads them. Bonds
are pairs within 1.15 times the sum of covalent radii; groups are an atom and the hydrogens bonded to it. Printed are
root mean squares of error over predicted standard deviation: 1 is right, below 1 too cautious. ``--write`` puts them
into docs/results/derived.json.
"""

import argparse
import json
from pathlib import Path

import ase.io
import numpy as np
import torch
from ase.calculators.singlepoint import SinglePointCalculator
from ase.neighborlist import natural_cutoffs, neighbor_list

from e2ip_plugins.md import combined_force
from e2ip_plugins.predictions.prediction_files import read_predictions

OUT = Path(__file__).resolve().parent.parent / "docs" / "results" / "derived.json"


def combinations(atoms):
    """Kind and weights of every combination of forces of a frame."""
    first, second, vectors = neighbor_list("ijD", atoms, natural_cutoffs(atoms, mult=1.15))
    count = len(atoms)

    def weights(entries):
        w = np.zeros((count, 3))
        for atom, vector in entries:
            w[atom] = vector
        return w

    x = np.array([1.0, 0.0, 0.0])
    for i, j, d in zip(first, second, vectors, strict=True):
        if i < j:
            u = d / np.linalg.norm(d)
            yield "along a bond", weights([(i, u / 2), (j, -u / 2)])
            yield "mean of two bonded atoms", weights([(i, x / 2), (j, x / 2)])
    for heavy in np.flatnonzero(atoms.numbers != 1):
        group = [heavy, *(j for i, j in zip(first, second, strict=True) if i == heavy and atoms.numbers[j] == 1)]
        if len(group) > 1:
            yield "mean of an atom and its hydrogens", weights([(k, x / len(group)) for k in group])
    yield "mean of all atoms", np.tile(x / count, (count, 1))
    for k in range(count):
        yield "one atom", weights([(k, x)])


def judge(path: Path) -> dict[str, dict[str, float]]:
    """Root mean square of error over standard deviation, and of the error in eV/Å, by kind."""
    predictions, frames = read_predictions(path), ase.io.read(path, ":")
    parameters = {name: torch.as_tensor(values) for name, values in predictions.parameters.items()}
    covariances = predictions.family.derive(parameters)["forces_cov"].numpy()
    errors = predictions.forces - predictions.reference_forces
    found: dict[str, list] = {}
    start = 0
    for frame in frames:
        atoms = slice(start, start + len(frame))
        start += len(frame)
        frame.arrays["forces_cov"] = covariances[atoms]
        frame.calc = SinglePointCalculator(frame, forces=errors[atoms])
        for kind, weights in combinations(frame):
            found.setdefault(kind, []).append(combined_force(frame, weights))
    result = {}
    for kind, several in found.items():
        error, bound, independent = np.array(several).T
        rms = {"independent": error / independent, "bound": error / bound, "error": error}
        result[kind] = {name: float(np.sqrt(np.mean(np.square(values)))) for name, values in rms.items()}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="NAME=PREDICTIONS.xyz")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    results = {name: judge(Path(path)) for name, path in (text.split("=", 1) for text in options.files)}
    print("| | | error, eV/Å | to independent | to the bound |")
    print("|---" * 5 + "|")
    for name, kinds in results.items():
        for kind, values in kinds.items():
            print(f"| {name} | {kind} | {values['error']:.3f} | {values['independent']:.2f} | {values['bound']:.2f} |")
    if options.write:
        OUT.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
