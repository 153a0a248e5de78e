"""Structures of many elements from the builders of ASE and pymatgen, decorated, strained and rattled at random.

`foundation.py structures` calls this module. It makes the same structures every time.
"""

from collections.abc import Callable
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np
from ase import Atoms
from ase.build import bulk, surface
from ase.data import atomic_numbers, covalent_radii
from ase.io import write

METALS = ("Li", "Na", "K", "Mg", "Ca", "Sr", "Ba", "Al", "Ti", "V", "Mn", "Fe", "Ni", "Cu", "Zn", "Ag", "Sn")
NONMETALS = ("C", "N", "O", "F", "Si", "P", "S", "Cl")
#: Elements of which the training set has a few frames, and elements of which it has none.
RARE, ABSENT = ("Zr", "Br"), ("Pd", "Se")
#: Pairs of elements that no training frame has.
HELD_PAIRS = tuple(
    frozenset(pair.split("-"))
    for pair in ("Mg-S", "Cu-O", "Ti-N", "Ni-Al", "Li-F", "Ca-Cl", "Fe-Si", "Zn-P", "Ag-Sn", "Na-Mn", "Ba-V", "K-C")
)
#: The material of the user who has no training set: oxides and sulfides of copper, magnesium and titanium.
USER_ELEMENTS = ("Cu", "Mg", "Ti"), ("O", "S")
MOST_ATOMS, LEAST_DISTANCE = 16, 0.65

#: Number of structures of every set.
COUNTS = {
    "train": 4000,
    "valid": 120,
    "seen": 120,
    "compositions": 150,
    "pairs": 150,
    "rare": 120,
    "absent": 80,
    "hot": 150,
    "surfaces": 150,
    "user": 160,
}


class Prototype(NamedTuple):
    """A crystal structure whose sites are of the kinds X (metals) and Y (nonmetals).

    Attributes
    ----------
    build : callable
        Returns the cell with Mg on the sites of metals and O on those of nonmetals.
    alloy : bool
        True if every site may have any element.
    """

    build: Callable[[], Atoms]
    alloy: bool = False


def spacegroup(symbol: str, lattice: tuple, species: str, *positions: tuple[float, float, float]) -> Prototype:
    """Return a prototype that pymatgen builds from its space group, as primitive cell.

    ``lattice`` is a crystal system, as pymatgen's `Lattice` calls it, and its lengths in Å.
    """

    @cache
    def build() -> Atoms:
        from pymatgen.core import Lattice, Structure
        from pymatgen.io.ase import AseAtomsAdaptor

        cell = getattr(Lattice, lattice[0])(*lattice[1:])
        structure = Structure.from_spacegroup(symbol, cell, species.split(), positions)
        return AseAtomsAdaptor.get_atoms(structure.get_primitive_structure())

    return Prototype(build)


def ase_crystal(name: str, structure: str, **options: object) -> Prototype:
    """Return a prototype that ASE builds; elements have no order on one with a single kind of sites."""
    return Prototype(lambda: bulk(name, structure, **options), alloy=name == "Mg")


PROTOTYPES = {
    "fcc": ase_crystal("Mg", "fcc", a=4.5, cubic=True),
    "bcc": ase_crystal("Mg", "bcc", a=3.6, cubic=True),
    "hcp": ase_crystal("Mg", "hcp", a=3.2, c=5.2),
    "diamond": ase_crystal("Mg", "diamond", a=6.0),
    "simple-cubic": ase_crystal("Mg", "sc", a=3.0),
    "rocksalt": ase_crystal("MgO", "rocksalt", a=4.2),
    "rocksalt-cubic": ase_crystal("MgO", "rocksalt", a=4.2, cubic=True),
    "cesiumchloride": ase_crystal("MgO", "cesiumchloride", a=3.0),
    "zincblende": ase_crystal("MgO", "zincblende", a=4.6),
    "wurtzite": ase_crystal("MgO", "wurtzite", a=3.2, c=5.2),
    "fluorite": ase_crystal("MgO2", "fluorite", a=5.0),
    "antifluorite": ase_crystal("OMg2", "fluorite", a=5.0),
    "perovskite": spacegroup("Pm-3m", ("cubic", 3.9), "Mg Mg O", (0, 0, 0), (0.5, 0.5, 0.5), (0.5, 0.5, 0)),
    "antiperovskite": spacegroup("Pm-3m", ("cubic", 3.9), "O O Mg", (0, 0, 0), (0.5, 0.5, 0.5), (0.5, 0.5, 0)),
    "rutile": spacegroup("P4_2/mnm", ("tetragonal", 4.6, 2.96), "Mg O", (0, 0, 0), (0.305, 0.305, 0)),
    "anatase": spacegroup("I4_1/amd", ("tetragonal", 3.78, 9.51), "Mg O", (0, 0, 0), (0, 0, 0.2066)),
    "corundum": spacegroup("R-3c", ("hexagonal", 4.76, 12.99), "Mg O", (0, 0, 0.352), (0.306, 0, 0.25)),
    "spinel": spacegroup("Fd-3m", ("cubic", 8.1), "Mg Mg O", (0, 0, 0), (0.625, 0.625, 0.625), (0.385, 0.385, 0.385)),
    "cadmium-iodide": spacegroup("P-3m1", ("hexagonal", 3.6, 5.6), "Mg O", (0, 0, 0), (1 / 3, 2 / 3, 0.25)),
    "nickel-arsenide": spacegroup("P6_3/mmc", ("hexagonal", 3.6, 5.0), "Mg O", (0, 0, 0), (1 / 3, 2 / 3, 0.25)),
}


def shortest(atoms: Atoms, distances: np.ndarray) -> float:
    """Return the smallest distance over the sum of covalent radii; ``distances`` are to the nearest images."""
    radii = covalent_radii[atoms.numbers]
    ratios = distances / (radii[:, None] + radii)
    np.fill_diagonal(ratios, np.inf)
    # An atom and its own image, too: in a cell of one atom there is no other pair.
    images = np.linalg.norm(atoms.cell.array, axis=1).min() / (2 * radii.max())
    return float(min(ratios.min(), images))


def decorated(prototype: Prototype, system: tuple[str, ...], rng: np.random.Generator) -> Atoms:
    """Return the prototype, repeated at random, with elements of a chemical system on its sites."""
    cell = prototype.build()
    shapes = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (2, 2, 2), (1, 1, 2), (1, 1, 3)]
    shapes = [shape for shape in shapes if 2 <= len(cell) * np.prod(shape) <= MOST_ATOMS]
    shapes = shapes or [(1, 1, 1)]
    atoms = cell.repeat(shapes[rng.integers(len(shapes))])
    metals = [name for name in system if name not in (*NONMETALS, "Br", "Se")] or list(system)
    nonmetals = [name for name in system if name not in metals] or list(system)
    for kind, elements in (("Mg", metals), ("O", nonmetals)):
        places = [atom.index for atom in atoms if atom.symbol == kind]
        choice = list(system) if prototype.alloy or rng.random() < 0.1 else elements
        drawn = rng.choice(choice, size=len(places))
        for place, element in zip(places, drawn, strict=True):
            atoms[place].symbol = str(element)
    return atoms


def slab(crystal: Atoms, rng: np.random.Generator) -> Atoms:
    """Return a slab of a crystal with 6 to 8 Å of vacuum."""
    indices = [(1, 0, 0), (1, 1, 0), (1, 1, 1), (0, 0, 1)][rng.integers(4)]
    atoms = surface(crystal, indices, int(rng.integers(2, 4)), vacuum=rng.uniform(3.0, 4.0), periodic=True)
    atoms.pbc = True
    return atoms


def disturbed(crystal: Atoms, rng: np.random.Generator, rattle: tuple[float, float], spread: float = 0.06) -> Atoms:
    """Return the crystal scaled to covalent radii, strained and rattled; ``rattle`` bounds the displacements in Å."""
    atoms = crystal.copy()
    ratio = shortest(atoms, atoms.get_all_distances(mic=True))
    # 1.08 brings most binary crystals near the volume where their stress vanishes.
    atoms.set_cell(atoms.cell * (rng.normal(1.08, spread) / ratio), scale_atoms=True)
    strain = np.eye(3) + rng.normal(0.0, 0.02, (3, 3))
    atoms.set_cell(atoms.cell @ (strain + strain.T) / 2, scale_atoms=True)
    atoms.positions += rng.normal(0.0, rng.uniform(*rattle), (len(atoms), 3))
    return atoms


def structure(name: str, system: tuple[str, ...], rng: np.random.Generator) -> Atoms:
    """Return a random structure of a chemical system for one of the sets; all its elements occur."""
    rattle = (0.3, 0.5) if name == "hot" else (0.02, 0.15)
    while True:
        kind = list(PROTOTYPES)[rng.integers(len(PROTOTYPES))]
        atoms = decorated(PROTOTYPES[kind], system, rng)
        if set(atoms.symbols) != set(system):
            continue
        if name == "surfaces":
            atoms = slab(atoms, rng)
            if len(atoms) > MOST_ATOMS or len(atoms) < 2:
                continue
            ratio = shortest(atoms, atoms.get_all_distances(mic=True))
            atoms.positions += rng.normal(0.0, rng.uniform(*rattle), (len(atoms), 3))
            atoms.set_cell(atoms.cell * (1.08 / ratio), scale_atoms=True)
        else:
            atoms = disturbed(atoms, rng, rattle)
        if shortest(atoms, atoms.get_all_distances(mic=True)) > LEAST_DISTANCE:
            atoms.info.update(set=name, prototype=kind, system="-".join(sorted(system)))
            return atoms


def pairs_of(system: tuple[str, ...]) -> set[frozenset[str]]:
    """Return the pairs of different elements of a chemical system."""
    return {frozenset(pair) for pair in combinations(system, 2)}


def draw_system(rng: np.random.Generator) -> tuple[str, ...]:
    """Return one to four of the elements that the training set has many frames of."""
    metals = rng.choice(METALS, size=rng.choice((1, 2, 3), p=(0.5, 0.35, 0.15)), replace=False)
    nonmetals = rng.choice(NONMETALS, size=rng.choice((0, 1, 2), p=(0.25, 0.55, 0.2)), replace=False)
    return tuple(sorted({*map(str, metals), *map(str, nonmetals)}))


def systems(rng: np.random.Generator) -> dict[str, list[tuple[str, ...]]]:
    """Return the chemical systems of every set: 450 known ones, and 90 that no training frame has."""
    known: list[tuple[str, ...]] = [(name,) for name in (*METALS, *NONMETALS)]
    fresh: list[tuple[str, ...]] = []
    paired: list[tuple[str, ...]] = []
    while len(known) < 450 or len(fresh) < 90 or len(paired) < 90:
        system = draw_system(rng)
        if system in known or system in fresh or system in paired:
            continue
        if pairs_of(system) & set(HELD_PAIRS):
            paired.append(system)
        elif len(known) < 450:
            known.append(system)
        elif len(system) > 1:
            fresh.append(system)
    seen_pairs = set().union(*map(pairs_of, known))
    fresh = [system for system in fresh if pairs_of(system) <= seen_pairs]
    return {"known": known, "compositions": fresh, "pairs": paired}


def with_element(elements: tuple[str, ...], known: list[tuple[str, ...]], rng: np.random.Generator) -> tuple[str, ...]:
    """Return a known system of at most three elements, with one of ``elements`` in addition."""
    short = [system for system in known if len(system) <= 3]
    return (*short[rng.integers(len(short))], str(rng.choice(elements)))


def user_system(rng: np.random.Generator) -> tuple[str, ...]:
    """Return one or two metals and one nonmetal of the user's material."""
    metals, nonmetals = USER_ELEMENTS
    count = int(rng.integers(1, 3))
    return (*map(str, rng.choice(metals, size=count, replace=False)), str(rng.choice(nonmetals)))


def structures(scale: float = 1.0) -> dict[str, list[Atoms]]:
    """Return the structures of every set, ``scale`` times as many as `COUNTS`."""
    rng = np.random.default_rng(60)
    pools = systems(rng)
    sets: dict[str, list[Atoms]] = {}
    for name, count in COUNTS.items():
        frames = []
        for number in range(max(4, round(scale * count))):
            if name == "train" and number < 2 * len(RARE) * 2:
                system = with_element(RARE[number % 2 : number % 2 + 1], pools["known"], rng)
            elif name in ("rare", "absent"):
                system = with_element(RARE if name == "rare" else ABSENT, pools["known"], rng)
            elif name == "user":
                system = user_system(rng)
            else:
                pool = pools.get(name, pools["known"])
                system = pool[rng.integers(len(pool))]
            frames.append(structure(name, system, rng))
        sets[name] = frames
    return sets


def write_all(folder: Path, scale: float) -> None:
    """Write the structures of every set into a folder, without labels."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, frames in structures(scale).items():
        write(folder / f"{name}.extxyz", frames)
        print(f"{name}: {len(frames)}", flush=True)


def all_elements() -> list[int]:
    """Return the atomic numbers that the model knows, absent elements among them."""
    return sorted(atomic_numbers[name] for name in (*METALS, *NONMETALS, *RARE, *ABSENT))
