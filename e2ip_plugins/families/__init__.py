"""Predictive families: one file each, listed in `FAMILIES`.

Users choose a family by its ``name``, files name it by its ``uq_family``. The docstring of
`e2ip_plugins.families.interface` says how to add one. The other files are `interface`; the bases `niw`,
`gaussian` and `ensemble`; `laws`, the distributions that scores are computed from; `condition_trace`, a diagnostic of
`e2ip_ablation`.
"""

from typing import Dict, Iterable, Optional, Tuple, Type

from e2ip_plugins.errors import InputError
from e2ip_plugins.families.e2ip import E2IP
from e2ip_plugins.families.e2ip_ablation import E2IPAblation
from e2ip_plugins.families.e2ip_cholesky import E2IPCholesky
from e2ip_plugins.families.eip import EIP
from e2ip_plugins.families.interface import Family
from e2ip_plugins.families.mve import MVE
from e2ip_plugins.families.mve_spd import MVESPD
from e2ip_plugins.families.shallow import Shallow

#: Family of ``E2IPModel`` and its companions by default.
DEFAULT = "e2ip"

#: Every family, in the order in which messages and tables list them.
FAMILIES: Tuple[Type[Family], ...] = (E2IP, E2IPAblation, E2IPCholesky, EIP, MVE, MVESPD, Shallow)


def table() -> Dict[str, Type[Family]]:
    """Return every family by name."""
    return {family.name: family for family in FAMILIES}


def get(name: str) -> Type[Family]:
    """Return a family by name; unknown names raise `InputError`.

    >>> get("e2ip").uq_family
    'niw'
    """
    if name not in table():
        raise InputError(f"unknown readout '{name}'; choose from: {', '.join(table())}")
    return table()[name]


def of_file(uq_family: str, where: str) -> Type[Family]:
    """Return a family by the name that files carry; unknown names raise `InputError`, ``where`` names the file."""
    by_name = {family.uq_family: family for family in reversed(FAMILIES)}
    if uq_family not in by_name:
        known = ", ".join(dict.fromkeys(family.uq_family for family in FAMILIES))
        raise InputError(
            f"{where}: uq_family '{uq_family}' is not known to this version of e2ip-plugins; known: {known}"
        )
    return by_name[uq_family]


def of_outputs(names: Iterable[str]) -> Optional[Type[Family]]:
    """Return the family whose parameters are all among the ``names`` of outputs or columns, or None.

    Of several families it is the one with most parameters.
    """
    outputs = set(names)
    candidates = [family for family in FAMILIES if outputs.issuperset(key.name for key in family.parameter_keys)]
    return max(candidates, key=lambda family: len(family.parameter_keys), default=None)
