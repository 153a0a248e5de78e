"""``mve-spd``: a Gaussian with the equivariant covariance of ``e2ip``, without its evidence.

Comparing ``e2ip`` with it shows what a Student-t and the leverage are worth; comparing it with ``mve`` shows what
equivariance is worth.
"""

import math
from typing import Tuple

from torch import Tensor

from e2ip_plugins.families.gaussian import Gaussian
from e2ip_plugins.families.interface import INITIAL_SIGMA, beta_option
from e2ip_plugins.maths.spd import tangent_to_sym6


class MVESPD(Gaussian):
    """See the module and `Gaussian`. Coefficients are s and t of the logarithm (paper, Eq. 10)."""

    name = "mve-spd"
    options = (beta_option(0.5),)

    num_scalars = 1
    num_tensors = 1
    initial_scalars = (2.0 * math.sqrt(3.0) * math.log(INITIAL_SIGMA),)

    def parts(self, coefficients: Tensor) -> Tuple[Tensor, Tensor]:
        """See `Gaussian`."""
        return coefficients[:, 0], coefficients[:, 1:]

    def assemble(self, isotropic: Tensor, rest: Tensor) -> Tensor:
        """See `Gaussian`."""
        return tangent_to_sym6(isotropic, rest)
