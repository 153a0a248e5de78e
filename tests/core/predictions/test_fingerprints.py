"""Fingerprints tell frames apart, and survive a passage through a file."""

import ase
import numpy as np
import pytest

from e2ip_plugins.predictions.fingerprints import fingerprint


def test_fingerprints_tell_frames_apart():
    atoms = ase.Atoms("OH2", np.random.default_rng(0).normal(size=(3, 3)), cell=[4, 5, 6])
    mark = fingerprint(atoms)
    assert len(mark) == 12 and fingerprint(atoms.copy()) == mark
    moved, species, periodic, larger = (atoms.copy() for _ in range(4))
    moved.positions[1, 2] += 1e-3
    species.symbols[0] = "S"
    periodic.pbc = True
    assert len({mark, *map(fingerprint, (moved, species, periodic))}) == 4
    # A cell that is not periodic means nothing, nor does the sign of a zero.
    larger.cell = [7, 7, 7]
    assert fingerprint(larger) == mark
    assert len({fingerprint(ase.Atoms("H", [[zero, 1.0, 0.0]])) for zero in (0.0, -0.0, 1e-9)}) == 1


def test_fingerprints_know_charge_and_spin():
    """One geometry may have several states; a state that equals the default may be left out."""
    usual = ({}, {"charge": 0}, {"total_charge": np.int64(0)}, {"total_spin": 1.0})
    others = ({"charge": 1}, {"charge": -1}, {"charge": 1.0, "multiplicity": 2}, {"spin": "high"})
    same, different = (
        [fingerprint(ase.Atoms("H3", np.eye(3), info=info)) for info in infos] for infos in (usual, others)
    )
    assert len(set(same)) == 1 and len({same[0], *different}) == 5
    assert fingerprint(ase.Atoms("H3", np.eye(3), info={"charge": 1.0})) == different[0]


@pytest.mark.parametrize(("digits", "share"), [(8, 0.01), (6, 0.2)])
def test_fingerprints_survive_a_file(digits, share):
    """Of every coordinate rounded by itself, one of 192 atoms is nearly always where rounding decides."""
    rng, changed = np.random.default_rng(0), 0
    for _ in range(400):
        atoms = ase.Atoms("O64H128", rng.uniform(0.0, 12.0, (192, 3)), cell=np.eye(3) * 12.0, pbc=True)
        read = atoms.copy()
        read.positions = atoms.positions.round(digits)
        changed += fingerprint(read) != fingerprint(atoms)
    assert changed / 400 <= share
