"""What the kernels treat as constants."""

import math
from typing import NamedTuple, Optional

from e2ip_plugins.maths.student import MIN_KAPPA, MIN_NU


class Constants(NamedTuple):
    """Knee τ and ceiling c of both dampers; above ``pull_ceiling`` σ_ref no σ weakens the pull on a force."""

    scalar_knee: float
    scalar_ceiling: float
    tensor_knee: float
    tensor_ceiling: float
    pull_ceiling: Optional[float] = None


ROOT3 = math.sqrt(3.0)
LOG_2PI = math.log(2.0 * math.pi)

__all__ = ["LOG_2PI", "MIN_KAPPA", "MIN_NU", "ROOT3", "Constants"]
