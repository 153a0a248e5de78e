"""Frames from which nothing can be learned, and references that are not finite."""

import numpy as np
import pytest

from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.data_sets import check_frame, masked_forces

NUMBERS, POSITIONS = np.array([8, 1]), np.array([[0.0, 0.0, 0.0], [0.0, 0.0, 0.96]])
NAN = np.full((2, 3), np.nan)


@pytest.mark.parametrize(
    ("positions", "cell", "labels", "known", "message"),
    [
        (POSITIONS, None, {"energy": -1.0}, ["H", "O"], None),
        (NAN, None, {}, None, "the position of atom 0 is not finite"),
        (0.0 * POSITIONS, None, {}, None, "atoms 0 and 1 are at the same place"),
        (POSITIONS, np.zeros((3, 3)), {}, None, "is periodic in 3 directions, and its cell is not"),
        (POSITIONS, None, {"energy": -1.0, "stress": NAN}, None, "the reference stress is not finite"),
        (POSITIONS, None, {}, ["H"], "has O, which the model does not know"),
    ],
)
def test_frames(positions, cell, labels, known, message):
    periodic = None if cell is None else np.ones(3, dtype=bool)
    arguments = (NUMBERS, positions, cell, periodic, labels, "frame 3", known)
    if message is None:
        check_frame(*arguments)
        return
    with pytest.raises(InputError, match=f"^frame 3: {message}"):
        check_frame(*arguments)


def test_masked_forces():
    assert masked_forces(0, 9, "of the training set") == ""
    assert masked_forces(2, 9, "of the training set").startswith("2 of 9 atoms of the training set have NaN or")
