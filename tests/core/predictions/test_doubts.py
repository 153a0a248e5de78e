"""Doubts about the data sets of a training: which are raised, and which are not."""

import numpy as np
from ase import Atoms

from e2ip_plugins.predictions.doubts import doubts
from e2ip_plugins.predictions.labelled import Label, LabelledFrame


def configuration(seed, species=(8, 1, 1), cell=0.0, state=None, forces=None, weight=1.0):
    positions = np.random.default_rng(seed).normal(size=(len(species), 3))
    atoms = Atoms(species, positions, cell=cell * np.eye(3), pbc=cell > 0.0)
    label = None if forces is None else Label(forces, weight=weight)
    return LabelledFrame(atoms, "", label, state=state, weight=weight)


TRAINING = [configuration(seed) for seed in range(4)]


def test_frames_of_both_sets():
    (text,) = doubts(TRAINING, [configuration(1), configuration(5), configuration(3)])
    assert text.startswith("2 of 3 validation frames are training frames")
    assert not doubts(TRAINING, [configuration(1, cell=5.0)]), "another cell, another frame"
    assert not doubts(TRAINING, [configuration(1, state="-1")]), "another charge, another frame"
    alone = configuration(0, (1,))
    assert not doubts([*TRAINING, alone], [alone, configuration(7)]), "isolated atoms are all alike"


def test_species_that_the_training_set_lacks():
    assert not doubts(TRAINING, [configuration(4), configuration(5), configuration(6, (8, 9, 1))])
    (text,) = doubts(TRAINING, [configuration(4, (9, 1)), configuration(5, (6, 8, 1))])
    assert "every validation frame has species that the training set lacks" in text


def test_forces_in_other_units():
    forces = np.ones((3, 3))
    forces[0, 0] = np.nan
    (text,) = doubts([configuration(seed, forces=27.0 * forces) for seed in range(4)], [configuration(4)])
    assert "root mean square of 27 per component" in text and "kcal/mol/Å?" in text
    assert not doubts([configuration(seed, forces=3.0 * forces) for seed in range(4)], [configuration(4)])


def test_frames_of_weight_zero():
    """They count nowhere: not as shared, not as frames of which all have other species, not in the size of forces."""
    copies = [configuration(seed, weight=0.0) for seed in (1, 2)]
    assert not doubts(TRAINING, [*copies, configuration(5)])
    assert not doubts([*TRAINING, configuration(5, weight=0.0)], [configuration(5)])
    (text,) = doubts(TRAINING, [configuration(4, (9, 1)), configuration(6, weight=0.0)])
    assert "every validation frame has species that the training set lacks" in text
    large = configuration(7, forces=np.full((3, 3), 100.0), weight=0.0)
    assert not doubts([configuration(0, forces=np.ones((3, 3))), large], [configuration(4)])
