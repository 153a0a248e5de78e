"""Structures of the stand-in foundation model: what the sets may hold, and that they are the same every time."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import foundation_structures as made


@pytest.fixture(scope="module")
def pools():
    return made.systems(np.random.default_rng(60))


def test_held_out_systems_are_apart_from_those_of_the_training(pools):
    known_pairs = set().union(*map(made.pairs_of, pools["known"]))
    assert not known_pairs & set(made.HELD_PAIRS)
    assert all(made.pairs_of(system) <= known_pairs for system in pools["compositions"])
    assert all(made.pairs_of(system) & set(made.HELD_PAIRS) for system in pools["pairs"])
    assert not set(pools["known"]) & {*pools["compositions"], *pools["pairs"]}


def test_rare_and_absent_elements_are_in_no_known_system(pools):
    elements = set().union(*pools["known"])
    assert elements == {*made.METALS, *made.NONMETALS}
    assert not elements & {*made.RARE, *made.ABSENT}
    assert len(made.all_elements()) == len(elements) + len(made.RARE) + len(made.ABSENT)


def test_structures_have_the_wanted_elements_and_no_atoms_on_top_of_each_other(monkeypatch):
    # Those of ASE alone: pymatgen belongs to another environment.
    of_ase = {name: made.PROTOTYPES[name] for name in ("fcc", "rocksalt", "wurtzite", "fluorite")}
    monkeypatch.setattr(made, "PROTOTYPES", of_ase)
    for name in ("train", "hot", "surfaces"):
        first, again = (made.structure(name, ("Mg", "O"), np.random.default_rng(1)) for _ in range(2))
        assert first == again and set(first.symbols) == {"Mg", "O"} and first.pbc.all()
        assert 2 <= len(first) <= made.MOST_ATOMS
        assert made.shortest(first, first.get_all_distances(mic=True)) > made.LEAST_DISTANCE
