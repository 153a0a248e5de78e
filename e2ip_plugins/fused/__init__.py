"""One fast path for the SPD map and the Normal-Inverse-Wishart loss together.

`nll_terms` and `distribution` compute what composing `e2ip_plugins.spd` and `e2ip_plugins.niw` would, from the
raw outputs of the head. The environment variable ``E2IP_KERNEL`` (``auto``, ``eager``, ``compiled`` or
``triton``; see `e2ip_plugins.fused.paths`) or the argument ``path`` says how.
"""

from e2ip_plugins.fused.api import distribution, nll_terms

__all__ = ["distribution", "nll_terms"]
