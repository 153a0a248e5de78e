"""Whether the user has turned the plugin off for MACE. Imported at interpreter start: standard library only."""

import os


def disabled() -> bool:
    """Return whether ``E2IP_DISABLE=1`` is set."""
    return os.environ.get("E2IP_DISABLE", "") not in ("", "0")
