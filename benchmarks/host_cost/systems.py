"""What the models are run on: a molecule of 21 atoms and boxes of water."""

import os
from pathlib import Path

import ase.io
import numpy as np
from ase import Atoms

#: Every model knows these, so that one model serves all systems.
SPECIES = ("H", "C", "O")
MOLECULE_ATOMS = 21
ASPIRIN = Path("rmd17") / "aspirin_split01_test.extxyz"
WATER_DENSITY = 0.997  # g/cm³
_MOLECULES_PER_A3 = WATER_DENSITY / 18.015 * 0.602214


def make_system(atoms: int) -> tuple[str, Atoms]:
    """Name and frame with about so many atoms: 21 is the molecule, anything else a periodic box of water."""
    if atoms != MOLECULE_ATOMS:
        frame = water_box(max(1, round(atoms / 3)))
        return f"water, {len(frame)} atoms", frame
    source = Path(os.environ["E2IP_DATA"]) / ASPIRIN if "E2IP_DATA" in os.environ else None
    if source is not None and source.exists():
        return "aspirin (rMD17)", ase.io.read(source, index=0)
    frame = water_box(7)
    # Not what a droplet looks like, but as many neighbours: 21 atoms, all within the cutoff of each other.
    return "7 water molecules", Atoms(frame.symbols, frame.positions)


def water_box(molecules: int, seed: int = 0) -> Atoms:
    """Rigid molecules in random orientation on a jittered simple cubic lattice, periodic, at 0.997 g/cm³."""
    rng = np.random.default_rng(seed)
    length = (molecules / _MOLECULES_PER_A3) ** (1.0 / 3.0)
    sites_per_edge = int(np.ceil(molecules ** (1.0 / 3.0) - 1e-9))
    spacing = length / sites_per_edge
    sites = np.stack(np.meshgrid(*[np.arange(sites_per_edge)] * 3, indexing="ij"), -1).reshape(-1, 3)
    oxygens = rng.permutation(sites)[:molecules] * spacing + rng.uniform(-0.1, 0.1, (molecules, 3)) * spacing
    half_angle = np.radians(104.52 / 2)
    arms = 0.9572 * np.array(
        [[np.sin(half_angle), np.cos(half_angle), 0], [-np.sin(half_angle), np.cos(half_angle), 0]]
    )
    # The orthogonal factor of a Gaussian matrix is uniform over O(3), and this molecule is its own mirror image.
    rotations = np.linalg.qr(rng.normal(size=(molecules, 3, 3)))[0]
    hydrogens = oxygens[:, None] + arms @ rotations
    positions = np.concatenate([oxygens[:, None], hydrogens], axis=1).reshape(-1, 3)
    return Atoms("OHH" * molecules, positions, cell=[length] * 3, pbc=True)


def with_labels(frame: Atoms, seed: int) -> Atoms:
    """The frame, shaken a little, with random reference energy and forces: the cost does not depend on them."""
    rng = np.random.default_rng(seed)
    labelled = frame.copy()
    labelled.positions += rng.normal(scale=0.02, size=frame.positions.shape)
    labelled.info["REF_energy"] = float(rng.normal())
    labelled.arrays["REF_forces"] = rng.normal(scale=0.5, size=frame.positions.shape)
    return labelled
