"""Make frames of metals with ASE's EMT potential: train, valid, test at 200 K, half of them strained, and ood.

    python benchmarks/crystals.py copper --out FOLDER

They show how the uncertainties of very regular surroundings grow when nothing is regular any more. A few minutes, and
the same frames every time. The data sets copper, aluminium and copper-gold of `e2ip bench` call this script.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np
from ase import Atoms, units
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.io import write
from ase.md.langevin import Langevin


class Crystal(NamedTuple):
    """32 atoms on a face-centred cubic lattice.

    Attributes
    ----------
    species : tuple of str
        The second, if any, on the corners of the cubes.
    constant : float
        Lattice constant in Å.
    hot : tuple of float
        Temperatures out of distribution, in K; there the lattice is longer by 1 and by 2 %.
    """

    species: tuple[str, ...]
    constant: float
    hot: tuple[float, float]

    def make(self) -> Atoms:
        atoms = bulk(self.species[0], "fcc", a=self.constant, cubic=True) * (2, 2, 2)
        atoms.symbols[::4] = self.species[-1]
        return atoms


CRYSTALS = {
    "copper": Crystal(("Cu",), 3.61, (1000.0, 1300.0)),
    "aluminium": Crystal(("Al",), 4.05, (700.0, 950.0)),
    "copper-gold": Crystal(("Cu", "Au"), 3.75, (900.0, 1300.0)),
}

COLD, STEP, BETWEEN = 200.0, 2.0 * units.fs, 40
#: Standard deviation of the strain's components, and how many frames one strain has.
STRAIN, FRAMES_PER_STRAIN = 0.02, 10


def dynamics(atoms: Atoms, temperature: float, count: int, rng: np.random.Generator) -> list[Atoms]:
    """Frames of a trajectory with a thermostat, 0.6 ps after its start, every 80 fs."""
    atoms.calc = EMT()
    atoms.set_momenta(rng.normal(size=(len(atoms), 3)) * np.sqrt(units.kB * temperature * atoms.get_masses())[:, None])
    run = Langevin(atoms, STEP, temperature_K=temperature, friction=0.02 / units.fs, fixcm=False, rng=rng)
    run.run(300)
    frames = []
    for _ in range(count):
        run.run(BETWEEN)
        frame = Atoms(atoms.symbols, atoms.positions, cell=atoms.cell, pbc=True)
        frame.info["REF_energy"] = float(atoms.get_potential_energy())
        frame.arrays["REF_forces"] = atoms.get_forces()
        frames.append(frame)
    return frames


def cold(crystal: Crystal, count: int, rng: np.random.Generator) -> list[Atoms]:
    """Frames at `COLD`, half of them in the unstrained cell."""
    frames = dynamics(crystal.make(), COLD, count // 2, rng)
    while len(frames) < count:
        atoms, strain = crystal.make(), rng.normal(scale=STRAIN, size=(3, 3))
        atoms.set_cell(atoms.cell @ (np.eye(3) + (strain + strain.T) / 2), scale_atoms=True)
        frames += dynamics(atoms, COLD, FRAMES_PER_STRAIN, rng)
    return frames[:count]


def hot(crystal: Crystal, count: int, rng: np.random.Generator) -> list[Atoms]:
    """Frames out of distribution, half of them at either temperature."""
    frames = []
    for temperature, length in zip(crystal.hot, (1.01, 1.02), strict=True):
        atoms = crystal.make()
        atoms.set_cell(length * atoms.cell, scale_atoms=True)
        frames += dynamics(atoms, temperature, count // 2, rng)
    return frames


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=CRYSTALS)
    parser.add_argument("--out", type=Path, required=True, help="folder of the files")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    parts = (("train", cold, 200), ("valid", cold, 40), ("test", cold, 100), ("ood", hot, 100))
    for seed, (part, make, count) in enumerate(parts):
        frames = make(CRYSTALS[options.name], count, np.random.default_rng(seed))
        write(options.out / f"{part}.extxyz", frames, format="extxyz")


if __name__ == "__main__":
    main()
