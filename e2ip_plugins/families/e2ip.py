"""``e2ip``: the Normal-Inverse-Wishart distribution whose Σ0 turns with the structure (the paper).

Σ0 is the exponential of a symmetric matrix whose 0e and 2e parts are the coefficients s and t (paper, Eq. 10).
"""

import math
from typing import Any, Mapping, Optional, Tuple

from torch import Tensor

from e2ip_plugins.families.interface import TENSOR_DAMPER
from e2ip_plugins.families.niw import NIW
from e2ip_plugins.maths.kernels import distribution, nll_terms
from e2ip_plugins.maths.spd import damp


class E2IP(NIW):
    """See the module and `NIW`. Coefficients are s, ν̂, κ̂ and t."""

    name = "e2ip"

    num_scalars = 3
    num_tensors = 1

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self.tensor_damper: Tuple[float, float] = TENSOR_DAMPER

    def start(self, sigma: float) -> Tuple[float, ...]:
        """See `NIW`."""
        return (2.0 * math.sqrt(3.0) * math.log(sigma), 0.0, 0.0)

    def distribution(
        self, coefficients: Tensor, force_unit: Tensor, flattening: Optional[Tensor] = None
    ) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """See `NIW`."""
        return distribution(
            coefficients, force_unit, self.coupled, self.scalar_damper, self.tensor_damper, flattening=flattening
        )

    def nll_terms(self, coefficients: Tensor, residual: Tensor, force_unit: Tensor) -> Tuple[Tensor, Tensor]:
        """See `NIW`."""
        return nll_terms(coefficients, residual, force_unit, self.coupled, self.scalar_damper, self.tensor_damper)

    def log_sigma2(self, coefficients: Tensor) -> Tensor:
        """See `NIW`; log det Σ0 = √3 s."""
        return damp(coefficients[:, 0], self.scalar_damper[0], self.scalar_damper[1]) / math.sqrt(3.0)
