"""How many validation configurations does a factor on the covariance need?

    python benchmarks/validation_frames.py OUT/runs/aspirin_mace_e2ip_s1 OUT/runs/azobenzene_mace_e2ip_s1 …

For runs of `e2ip bench rmd17`, which have predictions for 500 configurations that no model knows (`further`). As many
as shall be tried are drawn from these, again and again; the factor is fitted to them, by likelihood as the fit of the
leverage does and by calibration error as `e2ip calibrate` does before it shrinks it, and judged on the test frames.
Raw results go to benchmarks/results/validation_frames.json.
"""

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.progress import track

from e2ip_plugins.predictions.prediction_files import read_predictions
from e2ip_plugins.scores.metrics import CALIBRATION_LEVELS
from e2ip_plugins.scores.sample import Sample

RESULTS = Path(__file__).resolve().parent / "results" / "validation_frames.json"

#: Logarithms of the factors that are tried.
GRID = np.linspace(-0.8, 0.8, 161)


class Table(NamedTuple):
    """What every factor makes of every configuration.

    Attributes
    ----------
    nll : (G, K)
        Sum over atoms.
    inside : (G, K, L)
        Atoms in the region of each level.
    atoms : (K,)
    """

    nll: np.ndarray
    inside: np.ndarray
    atoms: np.ndarray

    @classmethod
    def of(cls, path: Path) -> "Table":
        sample = Sample.of(read_predictions(path))
        index, count = sample.numbered()
        rows = []
        for log_factor in GRID:
            ones = np.ones(len(sample.error))
            law = sample.widened(np.exp(log_factor) * ones, 0.0 * ones).law()
            pit = law.pit(sample.error)
            inside = np.stack([np.bincount(index, pit <= level, count) for level in CALIBRATION_LEVELS], axis=1)
            rows.append((np.bincount(index, law.negative_log_likelihood(sample.error), count), inside))
        nll, inside = (np.stack(part) for part in zip(*rows, strict=True))
        return cls(nll, inside, np.bincount(index, minlength=count))

    def errors(self, rows: np.ndarray) -> np.ndarray:
        """Calibration error of some configurations with every factor (G,)."""
        observed = self.inside[:, rows].sum(1) / self.atoms[rows].sum()
        return np.abs(observed - CALIBRATION_LEVELS).mean(1)

    def best(self, rows: np.ndarray) -> dict[str, int]:
        """The factor that some configurations want, by likelihood and by calibration error."""
        return {"nll": int(self.nll[:, rows].sum(1).argmin()), "ce": int(self.errors(rows).argmin())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--sizes", default="10,20,50,100,200,400", help="configurations, separated by commas")
    parser.add_argument("--draws", type=int, default=200)
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]
    rng = np.random.default_rng(0)
    found = {}
    for run in track(options.runs, "runs"):
        further, test = Table.of(run / "further.xyz"), Table.of(run / "test.xyz")
        on_test = test.errors(np.arange(len(test.atoms)))
        found[run.name] = {"raw": float(on_test[len(GRID) // 2]), "least": float(on_test.min()), "sizes": {}}
        for size in sizes:
            drawn = [further.best(rng.choice(len(further.atoms), size, replace=False)) for _ in range(options.draws)]
            found[run.name]["sizes"][size] = {
                by: {
                    "ce": float(on_test[at].mean()),
                    "at most 0.01": float((on_test[at] <= 0.01).mean()),
                    "std of log factor": float(GRID[at].std()),
                }
                for by, at in ((by, np.array([one[by] for one in drawn])) for by in ("nll", "ce"))
            }
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print("frames  CE, by NLL  <= 0.01   CE, by CE  <= 0.01  std of log factor, by NLL")
    for size in sizes:
        rows = [one["sizes"][size] for one in found.values()]
        nll, ce = ({name: np.mean([row[by][name] for row in rows]) for name in rows[0][by]} for by in ("nll", "ce"))
        print(
            f"{size:6}  {nll['ce']:10.4f}  {nll['at most 0.01']:7.2f}  {ce['ce']:10.4f}  {ce['at most 0.01']:7.2f}  "
            f"{nll['std of log factor']:.3f}"
        )
    for name, one in found.items():
        print(f"{name}: raw {one['raw']:.4f}, the best factor of the test frames themselves {one['least']:.4f}")


if __name__ == "__main__":
    main()
