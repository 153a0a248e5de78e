"""How honest error bars of stresses are, on strained copper with ASE's EMT potential as the reference.

    python benchmarks/stress.py runs/tutorials/energies/model/copper.model     # writes benchmarks/results/stress.json
    python benchmarks/stress.py --table

The model is that of docs/tutorials/energies.md, a MACE model that is trained with stresses, mostly of strained cells at
300 K. Sets: cells as in its training, hotter, and strained further. z is an error over its predicted deviation: of the
six components, and of the pressure, whose deviation follows from `stress_cov`.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from ase import Atoms
from ase.build import bulk
from ase.calculators.calculator import Calculator
from ase.calculators.emt import EMT
from common import RESULTS, load, markdown, parser_of, save
from crystals import dynamics

OUT = RESULTS / "stress.json"
#: Scale of the strain and temperature in K of every set, which is named by the standard deviation of the diagonal.
SETS = {"2.8 %, 300 K": (0.02, 300.0), "2.8 %, 900 K": (0.02, 900.0), "7.1 %, 300 K": (0.05, 300.0)}
CELLS, FRAMES_OF_CELL = 30, 2


def frames(strain: float, temperature: float) -> Iterator[Atoms]:
    """Yield frames of cells that are strained at random, in shape and in volume.

    Components of the strain have deviations of √2 ``strain`` on the diagonal and of ``strain``/√2 beside it.
    """
    rng = np.random.default_rng(11)
    for _ in range(CELLS):
        atoms = bulk("Cu", "fcc", a=3.61, cubic=True) * (2, 2, 1)
        drawn = rng.normal(scale=strain, size=(3, 3)) + rng.normal(scale=strain) * np.eye(3)
        atoms.set_cell(atoms.cell @ (np.eye(3) + (drawn + drawn.T) / 2), scale_atoms=True)
        yield from dynamics(atoms, temperature, FRAMES_OF_CELL, rng)


def stress_of(atoms: Atoms, calculator: Calculator) -> np.ndarray:
    """Return the stress (6,) in eV/Å³."""
    atoms = atoms.copy()
    atoms.calc = calculator
    return atoms.get_stress()


def scores(calculator: Calculator, strain: float, temperature: float) -> dict[str, float]:
    """Return the RMS error in eV/Å³, RMS of z and coverage of components, and RMS and mean of z of the pressure."""
    errors, deviations, of_pressure = [], [], []
    for atoms in frames(strain, temperature):
        error = stress_of(atoms, EMT()) - stress_of(atoms, calculator)
        covariance = np.asarray(calculator.results["stress_cov"])
        errors.append(error)
        deviations.append(calculator.results["stress_uncertainty"])
        of_pressure.append(error[:3].sum() / np.sqrt(covariance[:3, :3].sum()))
    z = np.array(errors) / np.array(deviations)
    return {
        "frames": len(errors),
        "error_rms": float(np.sqrt(np.square(errors).mean())),
        "z_rms": float(np.sqrt(np.square(z).mean())),
        "coverage95": float((np.abs(z) < 1.96).mean()),
        "z_rms_pressure": float(np.sqrt(np.square(of_pressure).mean())),
        "z_mean_pressure": float(np.mean(of_pressure)),
    }


def main() -> None:
    parser = parser_of(__doc__ or "", "stress", "out", "table")
    parser.add_argument("model", type=Path, nargs="?", help="MACE model with error bars of stresses")
    options = parser.parse_args()
    if not options.table:
        if options.model is None:
            sys.exit("give a model, or --table")
        from mace.calculators import MACECalculator

        calculator = MACECalculator(str(options.model), default_dtype="float64")
        save(options.out, {name: scores(calculator, *settings) for name, settings in SETS.items()})
    shown = ("z_rms", "coverage95", "z_rms_pressure", "z_mean_pressure")
    rows = [
        [name, f"{row['error_rms']:.4f}", *(f"{row[key]:.2f}" for key in shown)]
        for name, row in load(options.out).items()
    ]
    heads = ["strain, temperature", "RMS error in eV/Å³", "rms of z", "coverage@95"]
    print(markdown([*heads, "rms of z, pressure", "mean of z, pressure"], rows))


if __name__ == "__main__":
    main()
