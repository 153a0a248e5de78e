"""What docs/howto/energies.md derives in a line each: barrier, adsorption energy, equation of state, convex hull."""

import numpy as np
import pytest
from ase import Atoms
from ase.eos import EquationOfState
from ase.phasediagram import PhaseDiagram

from e2ip_plugins.energies import difference, members


def frame(energy, vector, name="", symbols="Cu", volume=None):
    atoms = Atoms(symbols, cell=None if volume is None else np.eye(3) * volume ** (1 / 3), pbc=volume is not None)
    atoms.info.update(energy=energy, energy_error_vector=np.asarray(vector, float), uq_model="readout-0", name=name)
    return atoms


def test_barrier_along_a_band():
    images = [frame(e, [0.1, 0.02 * i]) for i, e in enumerate([0.0, 0.4, 0.9, 0.5, -0.1])]
    top = int(np.argmax([atoms.info["energy"] for atoms in images]))
    assert difference(images, f"{top} - 0") == pytest.approx((0.9, 0.04))


def test_adsorption_energy():
    frames = [
        frame(-13.0, [0.3, 0.2, 0.1], "slab+CO", "Cu4CO"),
        frame(-4.0, [0.3, 0.0, 0.0], "slab", "Cu4"),
        frame(-8.0, [0.0, 0.2, 0.0], "CO", "CO"),
    ]
    assert difference(frames, "slab+CO - slab - CO") == pytest.approx((-1.0, 0.1))


def test_equation_of_state_of_every_member():
    volumes = np.linspace(9.0, 11.0, 7)
    # 0.5 B (V - V0)²/V0 with B = 0.8 eV/Å³; the error is a change of B.
    frames = [frame(0.04 * (v - 10.0) ** 2, [0.004 * (v - 10.0) ** 2], volume=v) for v in volumes]
    moduli = [EquationOfState(volumes, energies, "sj").fit()[2] for energies in members(frames, 200).T]
    assert np.mean(moduli) == pytest.approx(0.8, rel=0.02)
    assert np.std(moduli, ddof=1) == pytest.approx(0.08, rel=0.15)


def test_share_of_members_in_which_a_compound_is_on_the_hull():
    frames = [
        frame(0.0, [0.0, 0.0], symbols="Cu"),
        frame(0.0, [0.0, 0.0], symbols="Au"),
        frame(-0.02, [0.02, 0.0], symbols="CuAu"),
    ]
    formulas = [atoms.get_chemical_formula() for atoms in frames]
    stable = []
    for energies in members(frames, 400).T:
        diagram = PhaseDiagram(list(zip(formulas, energies, strict=True)), verbose=False)
        stable.append(bool(diagram.hull[2]))
    # 1 - Φ(-1): the compound is a standard deviation below the line.
    assert np.mean(stable) == pytest.approx(0.84, abs=0.05)
