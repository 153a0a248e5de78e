"""Does biased dynamics conserve its energy as well as the run without the bias?

    python benchmarks/bias.py MODEL START.extxyz [--strengths 0.1] [--width W] [--seeds 4] [--steps 10000]

NVE of the last frame of START with a MACE model that has a readout, from velocities at 300 K, without a bias and with
`BiasedCalculator` of each strength (eV); the width is 2.5 times the first frame's uncertainty unless given. Of the
total energy per atom: the drift, which is the slope of a straight line in meV/ps, and the root mean square distance
from its mean, drift and scatter together. Raw results go to docs/results/bias_*.json after every run; runs that are
there with the same settings are not repeated.
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
    parser.add_argument("--strengths", default="0.1", help="in eV, separated by commas")
    parser.add_argument("--width", type=float, help="in eV/Å")
    parser.add_argument("--temperature", type=float, default=300.0, help="of the velocities, in K")
    parser.add_argument("--timestep", type=float, default=0.25, help="in fs")
    parser.add_argument("--steps", type=int, default=10000)
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
    strengths = [0.0, *map(float, options.strengths.split(","))]
    settings = {name: getattr(options, name) for name in ("width", "temperature", "timestep", "steps", "dtype")}
    out = RESULTS / f"bias_{options.timestep:g}fs_{options.steps}.json"
    found = earlier(out, settings)
    for strength in strengths:
        calculator = BiasedCalculator(inner, strength=strength, width=options.width) if strength else inner
        for seed in track(range(options.seeds), f"A = {strength} eV"):
            if any((r["strength"], r["seed"]) == (strength, seed) for r in found):
                continue
            values, bias = energies(start, calculator, seed, options)
            deviation = 1000.0 * float(np.std(values))
            result = {"drift": drift(values, options), "bias": bias, "deviation": deviation}
            found.append({"strength": strength, "seed": seed} | result)
            out.write_text(json.dumps({"settings": settings, "runs": found}, indent=1) + "\n", encoding="utf-8")
    table([r for r in found if r["seed"] < options.seeds], strengths)


def earlier(out: Path, settings: dict) -> list[dict]:
    """Runs that are there; those of other settings, of another model (and so another width) for one, are replaced."""
    there = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    return there["runs"] if there.get("settings") == settings else []


def table(found: list[dict], strengths: list[float]) -> None:
    """The unbiased runs first, to which the others' distances are compared."""
    columns = ("A, eV", "runs", "mean bias, eV", "drift, meV/atom/ps", "rms drift", "distance, meV/atom", "to unbiased")
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    plain = rms([r["deviation"] for r in found if r["strength"] == 0.0])
    for strength in strengths:
        runs = [r for r in found if r["strength"] == strength]
        drifts = np.array([r["drift"] for r in runs])
        error = drifts.std(ddof=1) / np.sqrt(len(drifts)) if len(drifts) > 1 else np.nan
        bias, distance = np.mean([r["bias"] for r in runs]), rms([r["deviation"] for r in runs])
        row = (f"{strength:g}", str(len(runs)), f"{bias:.3f}", f"{drifts.mean():.4f} ± {error:.4f}")
        print("| " + " | ".join((*row, f"{rms(drifts):.4f}", f"{distance:.3f}", f"{distance / plain:.2f}")) + " |")


def rms(values) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


if __name__ == "__main__":
    main()
