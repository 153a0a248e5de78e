"""Frames from which nothing can be learned, and references that are not finite."""

import numpy as np
import pytest
from ase import Atoms

from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.data_sets import check_frame, masked_forces
from e2ip_plugins.predictions.labelled import Label, LabelledFrame

POSITIONS = np.array([[0.0, 0.0, 0.0], [0.0, 0.0, 0.96]])
NAN = np.full((2, 3), np.nan)
ENERGY, BROKEN_STRESS = Label(np.array(-1.0)), Label(np.full((3, 3), np.nan), weight=0.0)


@pytest.mark.parametrize(
    ("positions", "periodic", "labels", "known", "message"),
    [
        (POSITIONS, False, {"energy": ENERGY}, ["H", "O"], None),
        (NAN, False, {}, None, "the position of atom 0 is not finite"),
        (0.0 * POSITIONS, False, {}, None, "atoms 0 and 1 are at the same place"),
        (POSITIONS, True, {}, None, "is periodic in 3 directions, and its cell is not"),
        (POSITIONS, False, {"energy": ENERGY, "stress": BROKEN_STRESS}, None, "the reference stress is not finite"),
        (POSITIONS, False, {}, ["H"], "has O, which the model does not know"),
    ],
)
def test_frames(positions, periodic, labels, known, message):
    frame = LabelledFrame(Atoms("OH", positions, pbc=periodic), "frame 3", **labels)
    arguments = (frame, ("energy", "stress"), known)
    if message is None:
        check_frame(*arguments)
        return
    with pytest.raises(InputError, match=f"^frame 3: {message}"):
        check_frame(*arguments)


def test_masked_forces():
    assert masked_forces(0, 9, "of the training set") == ""
    assert masked_forces(2, 9, "of the training set").startswith("2 of 9 atoms of the training set have NaN or")
