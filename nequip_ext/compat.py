"""The NequIP versions this adapter works with."""

import importlib.metadata
from typing import Optional

from e2ip_plugins.errors import InputError

#: Versions that the contract test (tests/nequip_ext/test_contract.py) passed on.
SUPPORTED_NEQUIP = ("0.19.1",)


def _installed() -> Optional[str]:
    try:
        return importlib.metadata.version("nequip")
    except importlib.metadata.PackageNotFoundError:
        return None


def nequip_is_supported() -> bool:
    """Whether the installed NequIP is one of `SUPPORTED_NEQUIP`; False without NequIP."""
    return _installed() in SUPPORTED_NEQUIP


def check_nequip() -> None:
    """Raise `InputError` unless the installed NequIP is supported."""
    if not nequip_is_supported():
        raise InputError(
            f"nequip_ext supports NequIP {', '.join(SUPPORTED_NEQUIP)}, but {_installed() or 'none'} is installed; "
            f"install a supported version (pip install nequip=={SUPPORTED_NEQUIP[-1]}). "
            "NequIP without e2ip is not affected."
        )
