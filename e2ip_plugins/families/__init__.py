"""Predictive families: one file each, found by being in this folder.

A module here that defines ``FAMILY``, a class as in `e2ip_plugins.families.interface`, is a family; nothing else has to
know it. Users choose it by its ``name``, files tell it by its ``uq_family``.
"""

import functools
import importlib
import pkgutil
from typing import Dict, Iterable, Optional, Type

from e2ip_plugins.errors import InputError
from e2ip_plugins.families.interface import Family

#: What ``E2IPModel`` and its companions take unless told otherwise.
DEFAULT = "e2ip"

#: Modules of this folder that every family shares.
_SHARED = ("interface", "laws", "niw", "gaussian", "ensemble")


@functools.cache
def table() -> Dict[str, Type[Family]]:
    """Every family by name, in the order of their files; the one place where they are listed."""
    modules = [m.name for m in pkgutil.iter_modules(__path__) if m.name not in _SHARED]
    # By name, so that a packaged model carries the family that it has and no other.
    families = [importlib.import_module(f"{__name__}.{module}").FAMILY for module in modules]
    return {family.name: family for family in families}


def get(name: str) -> Type[Family]:
    """Family by name; unknown names raise `InputError`.

    >>> get("e2ip").uq_family
    'niw'
    """
    if name not in table():
        raise InputError(f"unknown readout '{name}'; choose from: {', '.join(table())}")
    return table()[name]


def of_file(uq_family: str, where: str) -> Type[Family]:
    """Family by the name that files carry; unknown names raise `InputError`, ``where`` names the file."""
    for family in table().values():
        if family.uq_family == uq_family:
            return family
    known = ", ".join(dict.fromkeys(family.uq_family for family in table().values()))
    raise InputError(f"{where}: uq_family '{uq_family}' is not known to this version of e2ip-plugins; known: {known}")


def of_outputs(names: Iterable[str]) -> Optional[Type[Family]]:
    """Family whose parameters are all among the ``names`` of outputs or columns, the one with most of them; or None."""
    there = set(names)
    found = [f for f in table().values() if all(key.name in there for key in f.parameter_keys)]
    return max(found, key=lambda family: len(family.parameter_keys), default=None)
