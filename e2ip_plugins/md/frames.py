"""Frames of a run as files keep them: energy, forces and every uncertainty, named as in both hosts.

ASE's own writers know the stock properties alone, and its `SinglePointCalculator` refuses all others.
"""

import numpy as np
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator

from e2ip_plugins.errors import InputError
from e2ip_plugins.keys import CALIBRATION_KEY, FAMILY_KEY, LEVERAGE, UNFITTED
from e2ip_plugins.tools.columns import uncertainties, without_labels

__all__ = ["with_results", "without_labels"]


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
