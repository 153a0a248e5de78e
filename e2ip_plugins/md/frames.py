"""Frames of a run as files keep them: energy, forces and every uncertainty, named as in both hosts.

ASE's own writers know the stock properties alone, and its `SinglePointCalculator` refuses all others.
"""

import re
from typing import Dict

import numpy as np
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator

from e2ip_plugins import families
from e2ip_plugins.errors import InputError
from e2ip_plugins.keys import CALIBRATION_KEY, FAMILY_KEY, FORCE_VIEWS, LEVERAGE, UNFITTED, OutputKey

#: Arrays and info that belong to one geometry: what a labelled frame brings along, and other programs' predictions.
_LABEL = re.compile(r"(^|_)(energy|energies|forces?|stress|stresses|virials?|dipole|charges)$", re.IGNORECASE)

#: Written by ASE itself.
_STRUCTURE = ("numbers", "positions", "momenta", "masses", "tags", "initial_magmoms", "initial_charges")


def with_results(atoms: Atoms) -> Atoms:
    """A copy of a frame that ``ase.io.write(…, format="extxyz")`` writes with all uncertainties its calculator has.

    Energy, forces and stress are those of a `SinglePointCalculator`; uncertainties are arrays (3×3 as nine row-major
    columns), as NequIP's and, apart from the prefix, MACE's tools write them, ``uq_family`` and ``uq_calibration``
    are info. ``e2ip compare`` reads such files where there are reference forces. Of a `BiasedCalculator` energy and
    forces are those without the bias, which the uncertainties are of; ``energy_bias`` is info.

    Parameters
    ----------
    atoms : ase.Atoms
        With a calculator; evaluated unless that has been done.

    Raises
    ------
    InputError
        Without calculator.
    """
    if atoms.calc is None:
        raise InputError("the frame has no calculator, whose results could be kept")
    atoms.get_forces(apply_constraint=False)
    results = atoms.calc.results
    frame = atoms.copy()
    # Of an earlier geometry, or another model.
    for name in (*uncertainties(), "energy", "forces", "stress"):
        frame.arrays.pop(name, None)
        frame.info.pop(name, None)
    stock = {name: results.get(f"{name}_unbiased", results.get(name)) for name in ("energy", "forces", "stress")}
    frame.calc = SinglePointCalculator(frame, **{name: value for name, value in stock.items() if value is not None})
    for key in uncertainties().values():
        values = np.asarray(results.get(key.name, ()))
        if values.shape != (len(atoms), *key.shape) or (key == LEVERAGE and (values == UNFITTED).all()):
            continue
        frame.arrays[key.name] = values.reshape(len(atoms), -1) if key.shape else values.copy()
    for name in (FAMILY_KEY, CALIBRATION_KEY, "energy_bias"):
        frame.info.pop(name, None)
        if name in results:
            frame.info[name] = results[name]
    return frame


def without_labels(atoms: Atoms) -> Atoms:
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
    """Every per-atom uncertainty that a calculator may have among its results, by name."""
    keys = (*FORCE_VIEWS, *(key for family in families.table().values() for key in family.output_keys()), LEVERAGE)
    return {key.name: key for key in keys}
