"""How 2e features turn."""

import pytest
import torch

from e2ip_plugins.maths import spd


@pytest.fixture(scope="session")
def wigner2():
    """Function that gives the representation (5, 5) of an orthogonal matrix on 2e, from the pinned basis itself."""
    zero, eye = torch.zeros(5, dtype=torch.float64), torch.eye(5, dtype=torch.float64)
    basis = spd.sym6_to_matrix(spd.tangent_to_sym6(zero, eye))
    return lambda rotation: torch.einsum("aij,ik,bkl,jl->ab", basis, rotation, basis, rotation)
