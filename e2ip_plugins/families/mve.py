"""``mve``: mean-variance estimation, a Gaussian with a variance for every Cartesian component.

The variances come from invariant features and belong to the axes of a fixed frame: they do not rotate with a molecule.
This is the method as it is commonly used; ``mve-spd`` respects the symmetry.
"""

import math
from typing import Tuple

import torch
from torch import Tensor

from e2ip_plugins.families.gaussian import Gaussian
from e2ip_plugins.families.interface import INITIAL_SIGMA


class MVE(Gaussian):
    """See the module and `Gaussian`. Coefficients are the logarithms of the variances along x, y and z."""

    name = "mve"
    equivariant = False

    num_scalars = 3
    num_tensors = 0
    initial_scalars = (2.0 * math.log(INITIAL_SIGMA),) * 3

    def parts(self, coefficients: Tensor) -> Tuple[Tensor, Tensor]:
        """See `Gaussian`; the rest are deviations from the mean (N, 3)."""
        mean = coefficients.sum(-1, keepdim=True) / 3.0
        return math.sqrt(3.0) * mean.squeeze(-1), coefficients - mean

    def assemble(self, isotropic: Tensor, rest: Tensor) -> Tensor:
        """See `Gaussian`."""
        return torch.cat([rest + (isotropic / math.sqrt(3.0)).unsqueeze(-1), torch.zeros_like(rest)], dim=1)
