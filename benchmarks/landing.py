"""Draw the picture of the landing page: atoms coloured by leverage, and a run that its monitor stops.

    python benchmarks/landing.py runs/tutorials/periodic/slab-predicted.extxyz

The predictions are those of the tutorial on a periodic solid; the run is one of results/monitor.json.
"""

import argparse
import json
from pathlib import Path

import ase.io
import numpy as np
from ase.data import covalent_radii
from common import FIGURES, RESULTS
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Circle

#: Ramp, level of the quantile and window that are shown.
RUN, LEVEL, WINDOW = "ramp_10", "0.98", "21"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("predictions", type=Path, help="frames of e2ip evaluate; the last one is drawn")
    parser.add_argument("--figure", type=Path, default=FIGURES / "landing.png")
    options = parser.parse_args()
    atoms = ase.io.read(options.predictions)
    leverage = atoms.arrays["e2ip_leverage"]
    figure = Figure(figsize=(9.0, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.0, 1.35))
    atoms.rotate(-90, "x", rotate_cell=True)
    atoms.rotate(20, "y")
    atoms.rotate(12, "x")
    order = np.argsort(atoms.positions[:, 2])
    circles = [Circle(atoms.positions[i, :2], 0.9 * covalent_radii[atoms.numbers[i]]) for i in order]
    balls = PatchCollection(circles, cmap="YlOrRd", edgecolor="black", linewidth=0.6)
    balls.set_array(leverage[order])
    balls.set_clim(0.0, leverage.max())
    left.add_collection(balls)
    left.autoscale_view()
    left.set_aspect("equal")
    left.axis("off")
    left.set_title("A surface, to a model of the bulk", fontsize=11, fontweight="bold")
    figure.colorbar(balls, ax=left, label="leverage (1: like the training set)", shrink=0.75)

    run = json.loads((RESULTS / "monitor.json").read_text(encoding="utf-8"))[RUN]["epistemic std"]
    rule = run["levels"][LEVEL]
    steps, stop = np.array(run["steps"]), rule["stop"][WINDOW]
    temperature = 300 + 1200 * steps / steps[-1]
    at_stop = 300 + 1200 * stop / steps[-1]
    right.semilogy(temperature, run["error"], color="#d55e00", lw=0.9, label="true error, largest of an atom")
    right.semilogy(temperature, run["value"], color="#0072b2", lw=0.9, label="predicted deviation, largest of an atom")
    right.axhline(rule["threshold"], color="#0072b2", lw=0.8, ls=":")
    right.axvline(at_stop, color="black", lw=1.4)
    right.axvspan(at_stop, temperature[-1], color="black", alpha=0.07)
    right.text(at_stop + 15, 9.0, "the monitor stops here", fontsize=9)
    right.set(xlabel="temperature of the run (K)", ylabel="force (eV/Å)", xlim=(300, 1500), ylim=(0.02, 20.0))
    right.set_title("A molecule, heated until nothing is known", fontsize=11, fontweight="bold")
    right.legend(fontsize=8.5, loc="lower right", frameon=False)
    figure.savefig(options.figure, dpi=130)


if __name__ == "__main__":
    main()
