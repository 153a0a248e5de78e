"""Frames of the metals."""

import sys
from pathlib import Path

import numpy as np
import pytest
from ase.calculators.emt import EMT

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import crystals


@pytest.mark.parametrize(("name", "count"), [("copper", {"Cu": 32}), ("copper-gold", {"Au": 8, "Cu": 24})])
def test_what_the_crystals_are_made_of(name, count):
    atoms = crystals.CRYSTALS[name].make()
    assert {str(s): int(n) for s, n in zip(*np.unique(atoms.symbols, return_counts=True), strict=True)} == count


def test_frames_carry_their_potential_and_are_the_same_every_time():
    both = [crystals.dynamics(crystals.CRYSTALS["copper"].make(), 200.0, 2, np.random.default_rng(3)) for _ in range(2)]
    assert np.array_equal(both[0][1].positions, both[1][1].positions)
    assert np.abs(both[0][0].positions - both[0][1].positions).max() > 0.01
    frame = both[0][0].copy()
    frame.calc = EMT()
    assert np.allclose(frame.get_forces(), both[0][0].arrays["REF_forces"], atol=1e-12)
    assert frame.get_potential_energy() == pytest.approx(both[0][0].info["REF_energy"], abs=1e-10)
