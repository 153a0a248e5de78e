"""Does biased dynamics conserve its energy as well as the run without the bias?

    python benchmarks/bias.py MODEL START.extxyz [--strengths 0.3,1] [--width W] [--seeds 4] [--steps 4000]

NVE of the last frame of START with a MACE model that has a readout, from velocities at 300 K, without a bias and with
`BiasedCalculator` of each strength (eV); the width is 2.5 times the first frame's uncertainty unless given. Of the
total energy per atom: the drift, which is the slope of a straight line in meV/ps, and the root mean square distance
from its mean, drift and scatter together. Raw results go to docs/results/bias_*.json.
"""

import argparse
import json
from pathlib import Path

import ase.io
import numpy as np
from ase import units
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution, Stationary, ZeroRotation
from ase.md.verlet import VelocityVerlet
from mace.calculators import MACECalculator
from rich.progress import track

from e2ip_plugins.md import BiasedCalculator

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"


def energies(start, calculator, seed: int, options: argparse.Namespace) -> tuple[np.ndarray, float]:
    """Total energies (T,) in eV/atom of every tenth step, and the mean bias in eV over the run."""
    atoms = start.copy()
    rng = np.random.default_rng(seed)
    MaxwellBoltzmannDistribution(atoms, temperature_K=options.temperature, rng=rng)
    Stationary(atoms)
    ZeroRotation(atoms)
    atoms.calc = calculator
    dynamics, found, bias = VelocityVerlet(atoms, options.timestep * units.fs), [], []

    def note():
        found.append(atoms.get_total_energy() / len(atoms))
        bias.append(calculator.results.get("energy_bias", 0.0))

    dynamics.attach(note, interval=10)
    dynamics.run(options.steps)
    return np.array(found), float(np.mean(bias))


def drift(values: np.ndarray, options: argparse.Namespace) -> float:
    """In meV/ps per atom."""
    time = np.arange(len(values)) * 10 * options.timestep / 1000.0
    return float(np.polyfit(time, 1000.0 * values, 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("start", type=Path)
    parser.add_argument("--strengths", default="0.3,1", help="in eV, separated by commas")
    parser.add_argument("--width", type=float, help="in eV/Å")
    parser.add_argument("--temperature", type=float, default=300.0, help="of the velocities, in K")
    parser.add_argument("--timestep", type=float, default=0.5, help="in fs")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--dtype", default="float64")
    options = parser.parse_args()
    start = ase.io.read(options.start, -1)
    inner = MACECalculator(str(options.model), device="cpu", default_dtype=options.dtype)
    if options.width is None:
        start.calc = inner
        start.get_forces()
        options.width = 2.5 * float(np.sqrt(np.mean(np.square(inner.results["forces_epistemic_std"]))))
        start.calc = None
        print(f"width {options.width:.3f} eV/Å")
    cases: dict[float, object] = {0.0: inner}
    for strength in map(float, options.strengths.split(",")):
        cases[strength] = BiasedCalculator(inner, strength=strength, width=options.width)
    found = []
    for strength, calculator in cases.items():
        for seed in track(range(options.seeds), f"A = {strength} eV"):
            values, bias = energies(start, calculator, seed, options)
            deviation = 1000.0 * float(np.std(values))
            found.append({"strength": strength, "seed": seed, "drift": drift(values, options), "bias": bias})
            found[-1]["deviation"] = deviation
    print(
        "| A, eV | mean bias, eV | drift of every seed, meV/atom/ps | distance from the mean, meV/atom | to unbiased |"
    )
    print("|---" * 5 + "|")
    plain = np.sqrt(np.mean([r["deviation"] ** 2 for r in found if r["strength"] == 0.0]))
    for strength in cases:
        runs = [r for r in found if r["strength"] == strength]
        drifts = ", ".join(f"{r['drift']:.3f}" for r in runs)
        deviation = np.sqrt(np.mean([r["deviation"] ** 2 for r in runs]))
        bias = np.mean([r["bias"] for r in runs])
        print(f"| {strength} | {bias:.3f} | {drifts} | {deviation:.3f} | {deviation / plain:.2f} |")
    settings = {k: v for k, v in vars(options).items() if k not in ("model", "start")}
    out = RESULTS / f"bias_{options.timestep:g}fs_{options.steps}.json"
    out.write_text(json.dumps({"settings": settings, "runs": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
