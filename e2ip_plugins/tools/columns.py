"""What frames in files carry beside their structure: labels, and predictions with their uncertainties."""

import re
from typing import Any, Dict

from e2ip_plugins import families
from e2ip_plugins.keys import CALIBRATION_KEY, FAMILY_KEY, FORCE_VIEWS, LEVERAGE, OutputKey

#: Arrays and info that belong to one geometry: what a labelled frame brings along, and other programs' predictions.
_LABEL = re.compile(r"(^|_)(energy|energies|forces?|stress|stresses|virials?|dipole|charges)$", re.IGNORECASE)

#: Written by ASE itself.
_STRUCTURE = ("numbers", "positions", "momenta", "masses", "tags", "initial_magmoms", "initial_charges")


def without_labels(atoms: Any) -> Any:
    """A copy without calculator and without what belongs to another geometry: reference energies, forces and so on.

    The first frame of a run often comes from a labelled file, and ASE carries its labels along. In a file of collected
    frames they would be wrong, and be trained on.
    """
    frame = atoms.copy()
    ours = (*uncertainties(), FAMILY_KEY, CALIBRATION_KEY)
    for kept in (frame.arrays, frame.info):
        # Hosts put prefixes before the names.
        for name in [n for n in kept if n not in _STRUCTURE and (_LABEL.search(str(n)) or str(n).endswith(ours))]:
            del kept[name]
    return frame


def uncertainties() -> Dict[str, OutputKey]:
    """Every per-atom output that a calculator may have, by name."""
    keys = (*FORCE_VIEWS, *(key for family in families.table().values() for key in family.output_keys()), LEVERAGE)
    return {key.name: key for key in keys}
