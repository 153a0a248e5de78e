"""Names that references have in users' files: the usual ones, and others that are recognised where there is but one."""

import re
from typing import Iterable, List

from e2ip_plugins.keys import REFERENCE_PREFIX

#: Names that users of MACE and NequIP give to references, by kind. The first one that a frame has is taken; if it has
#: none of them, another name with `REFERENCE_PREFIX`, such as NequIP's ``original_dataset_forces``.
USUAL_NAMES = {
    "forces": ("REF_forces", "forces", "force", "dft_forces", "DFT_forces", "ref_forces"),
    "energy": ("REF_energy", "energy", "dft_energy", "DFT_energy", "ref_energy"),
    "stress": ("REF_stress", "stress", "dft_stress", "DFT_stress", "ref_stress"),
}

#: Names of forces that end in the method, such as ``forces_pbe``. Tools that write predictions put the model before.
_METHOD_LAST = re.compile(r"forces?_(\w+)", re.IGNORECASE)


def prefixed(columns: Iterable[str], kind: str) -> List[str]:
    """Return the names such as ``dft_forces`` among columns; ``kind`` is ``forces`` or ``energy``."""
    return [name for name in columns if REFERENCE_PREFIX.match(name) and name.endswith(f"_{kind}")]


def method_last(columns: Iterable[str]) -> List[str]:
    """Return the names such as ``forces_pbe`` among columns, without those of this package's outputs.

    >>> method_last(["forces", "forces_pbe", "forces_cov"])
    ['forces_pbe']
    """
    # It imports all families, and this module is imported while MACE is.
    from e2ip_plugins.predictions.columns import our_names

    names = [name for name in columns if _METHOD_LAST.fullmatch(name)]
    ours = our_names() if names else []
    return [name for name in names if name not in ours]


def energy_beside(forces: str) -> str:
    """Return the name of the energy that goes with reference forces.

    >>> energy_beside("dft_forces"), energy_beside("forces_pbe")
    ('dft_energy', 'energy_pbe')
    """
    method = _METHOD_LAST.fullmatch(forces)
    return f"energy_{method[1]}" if method else f"{forces.removesuffix('forces')}energy"
