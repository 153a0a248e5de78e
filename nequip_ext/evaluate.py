"""``uq_family``, the name of the predictive family, in the xyz files that NequIP's own callbacks write."""

import functools
from typing import Any, List, Optional, Union

import ase
from nequip.train.callbacks import write_xyz

from e2ip_plugins import families
from e2ip_plugins.keys import FAMILY_KEY


def name_family_in_files() -> None:
    """Let NequIP's xyz writers name the family in every frame whose columns hold its parameters.

    Their columns are tensors, so the name has to be added to what they make of an output: `to_ase` of their module is
    wrapped, once.
    """
    if not hasattr(write_xyz.to_ase, "names_family"):
        write_xyz.to_ase = _naming_family(write_xyz.to_ase)


def _naming_family(to_ase: Any) -> Any:
    @functools.wraps(to_ase)
    def wrapped(
        *args: Any, extra_fields: Optional[List[str]] = None, **kwargs: Any
    ) -> Union[ase.Atoms, List[ase.Atoms]]:
        made = to_ase(*args, extra_fields=extra_fields, **kwargs)
        family = families.of_outputs(extra_fields or [])
        if family is not None:
            for frame in made if isinstance(made, list) else [made]:
                frame.info[FAMILY_KEY] = family.uq_family
        return made

    wrapped.names_family = True  # type: ignore[attr-defined]
    return wrapped
