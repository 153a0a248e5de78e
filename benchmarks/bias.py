"""Does biased dynamics conserve its energy as well as the run without the bias?

    python benchmarks/bias.py MODEL START.extxyz [--strength 0.1] [--timestep 0.25] [--seeds 4] [--steps 10000]
    python benchmarks/bias.py --table

NVE of the last frame of START with a MACE model that has a readout, from velocities at 300 K, without a bias and with
`BiasedCalculator` of a strength in eV, in float64; the width is 2.5 times the first frame's uncertainty. Of the total
energy per atom: the drift, which is the slope of a straight line in meV/ps, and the root mean square distance from its
mean, drift and scatter together.
"""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ase.io
import numpy as np
from ase import Atoms, units
from ase.calculators.calculator import Calculator
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution, Stationary, ZeroRotation
from ase.md.verlet import VelocityVerlet
from common import RESULTS, load, markdown, parser_of, save
from rich.progress import track

from e2ip_plugins.md import BiasedCalculator

OUT = RESULTS / "bias.json"
#: Kelvin of the velocities; steps between two energies; width in uncertainties of the first frame.
TEMPERATURE, INTERVAL, WIDTH = 300.0, 10, 2.5
COLUMNS = ("time step, fs", "A, eV", "runs", "mean bias, eV", "drift, meV/atom/ps", "root mean square")
COLUMNS += ("distance of the energy from its mean, meV/atom", "to unbiased")


def conserved(start: Atoms, calculator: Calculator, seed: int, options: Namespace) -> dict[str, float]:
    """Return drift (meV/ps) and deviation (meV) of the total energy per atom in a run, and its mean bias (eV)."""
    atoms = start.copy()
    MaxwellBoltzmannDistribution(atoms, temperature_K=TEMPERATURE, rng=np.random.default_rng(seed))
    Stationary(atoms)
    ZeroRotation(atoms)
    atoms.calc = calculator
    dynamics, energies, bias = VelocityVerlet(atoms, options.timestep * units.fs), [], []

    def note() -> None:
        energies.append(1000.0 * atoms.get_total_energy() / len(atoms))
        bias.append(calculator.results.get("energy_bias", 0.0))

    dynamics.attach(note, interval=INTERVAL)
    dynamics.run(options.steps)
    picoseconds = np.arange(len(energies)) * INTERVAL * options.timestep / 1000.0
    drift = float(np.polyfit(picoseconds, energies, 1)[0])
    return {"drift": drift, "bias": float(np.mean(bias)), "deviation": float(np.std(energies))}


def measure(options: Namespace) -> dict[str, Any]:
    """Return drift, bias and deviation of all runs."""
    from mace.calculators import MACECalculator

    start = ase.io.read(options.start, -1)
    inner = MACECalculator(str(options.model), device="cpu", default_dtype="float64")
    inner.calculate(start)
    width = WIDTH * rms(inner.results["forces_epistemic_std"])
    print(f"width {width:.3f} eV/Å")
    calculators = {0.0: inner, options.strength: BiasedCalculator(inner, strength=options.strength, width=width)}
    runs = [
        {"strength": strength, "seed": seed, **conserved(start, calculator, seed, options)}
        for strength, calculator in calculators.items()
        for seed in track(range(options.seeds), f"A = {strength} eV")
    ]
    return {"timestep": options.timestep, "width": width, "runs": runs}


def rms(values: Sequence[float]) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def table(results: dict[str, dict]) -> str:
    """Return a Markdown table; distances are compared with those of the unbiased runs of the same time step."""
    rows = []
    for entry in results.values():
        unbiased = rms([r["deviation"] for r in entry["runs"] if r["strength"] == 0.0])
        for strength in dict.fromkeys(r["strength"] for r in entry["runs"]):
            runs = [r for r in entry["runs"] if r["strength"] == strength]
            drifts, distance = [r["drift"] for r in runs], rms([r["deviation"] for r in runs])
            error = np.std(drifts, ddof=1) / len(drifts) ** 0.5 if len(drifts) > 1 else np.nan
            row = [f"{entry['timestep']:g}", f"{strength:g}", len(runs), f"{np.mean([r['bias'] for r in runs]):.3f}"]
            row += [f"{np.mean(drifts):.4f} ± {error:.4f}", f"{rms(drifts):.4f}"]
            rows.append([*row, f"{distance:.3f}", f"{distance / unbiased:.2f}"])
    return markdown(COLUMNS, rows)


def main() -> None:
    parser = parser_of(__doc__, "bias", "table")
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("start", type=Path, nargs="?")
    parser.add_argument("--strength", type=float, default=0.1, help="in eV")
    parser.add_argument("--timestep", type=float, default=0.25, help="in fs")
    parser.add_argument("--steps", type=int, default=10000)
    parser.add_argument("--seeds", type=int, default=4)
    options = parser.parse_args()
    if not options.table:
        if options.start is None:
            parser.error("give a model and a file with the first frame, or --table")
        save(OUT, {f"{options.timestep:g} fs, {options.steps} steps": measure(options)})
    print(table(load(OUT)))


if __name__ == "__main__":
    main()
