"""MACE adapter of e²IP. Imported at interpreter start by the import hook: standard library only.

``mace_ext.uncertainty_gradient`` is imported when first used.
"""

import os

__all__ = ["uncertainty_gradient"]


def disabled() -> bool:
    """Return whether the user has turned the import hook off by ``E2IP_DISABLE=1``."""
    return os.environ.get("E2IP_DISABLE", "") not in ("", "0")


def __getattr__(name: str):
    if name != "uncertainty_gradient":
        raise AttributeError(f"module 'mace_ext' has no attribute '{name}'")
    from mace_ext.inference.gradient import uncertainty_gradient

    return uncertainty_gradient
