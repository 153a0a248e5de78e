"""Double precision, as in the tests of the readout."""

import pytest
import torch


@pytest.fixture(autouse=True)
def double_precision(_default_dtype):
    torch.set_default_dtype(torch.float64)
