"""Frames that several tests of the fit have."""

import pytest
from readout_alone import make_frames


@pytest.fixture(scope="module")
def training():
    return make_frames(60)
