"""Metals by ASE's EMT potential: frames at 200 K, half of them strained, to train on; 700 to 1300 K are out of it.

Made, not published: how the uncertainties of very regular surroundings grow when nothing is regular any more. All of
it in some minutes and the same every time.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from ase import Atoms, units
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.io import write
from ase.md.langevin import Langevin

from e2ip_plugins.files import replacing


class Crystal(NamedTuple):
    """32 atoms on a face-centred cubic lattice.

    Attributes
    ----------
    species : tuple of str
        The second, if any, on the corners of the cubes.
    constant : float
        Of the lattice, in Å.
    hot : tuple of float
        Temperatures out of distribution, in K; the lattice is longer by 1 and by 2 % there.
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
    """Half of them in the unstrained cell."""
    frames = dynamics(crystal.make(), COLD, count // 2, rng)
    while len(frames) < count:
        atoms, strain = crystal.make(), rng.normal(scale=STRAIN, size=(3, 3))
        atoms.set_cell(atoms.cell @ (np.eye(3) + (strain + strain.T) / 2), scale_atoms=True)
        frames += dynamics(atoms, COLD, FRAMES_PER_STRAIN, rng)
    return frames[:count]


def hot(crystal: Crystal, count: int, rng: np.random.Generator) -> list[Atoms]:
    """Half of them at either temperature."""
    frames = []
    for temperature, length in zip(crystal.hot, (1.01, 1.02), strict=True):
        atoms = crystal.make()
        atoms.set_cell(length * atoms.cell, scale_atoms=True)
        frames += dynamics(atoms, temperature, count // 2, rng)
    return frames


def files(name: str, folder: Path) -> dict[str, Path]:
    """Paths of train, valid, test and ood; made on first use."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for seed, (part, make, count) in enumerate(
        (("train", cold, 200), ("valid", cold, 40), ("test", cold, 100), ("ood", hot, 100))
    ):
        paths[part] = folder / f"{name}_{part}.extxyz"
        if not paths[part].exists():
            frames = make(CRYSTALS[name], count, np.random.default_rng(seed))
            with replacing(paths[part]) as unfinished:
                write(unfinished, frames, format="extxyz")
    return paths
