"""One fast path for the SPD map and the Student-t likelihood together.

`nll_terms` and `distribution` compute what composing `e2ip_plugins.maths.spd` and `e2ip_plugins.maths.student` would,
from the coefficients of the trunk. The environment variable ``E2IP_KERNEL`` (``auto``, ``eager`` or ``triton``; see
`e2ip_plugins.maths.kernels.paths`) or the argument ``path`` says how.
"""

from e2ip_plugins.maths.kernels.api import distribution, nll_terms

__all__ = ["distribution", "nll_terms"]
