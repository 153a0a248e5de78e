"""Frames of a run as files keep them: energy, forces and every uncertainty, named as in both hosts.

ASE's own writers know the stock properties alone, and its `SinglePointCalculator` refuses all others.
"""

import numpy as np
from ase import Atoms

from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.columns import ASE_RESULTS, predicted, without_labels


def with_results(atoms: Atoms, keep_labels: bool = False) -> Atoms:
    """A copy of a frame that ``ase.io.write(…, format="extxyz")`` writes with all uncertainties its calculator has.

    Energy, forces and, of a periodic structure, stress are those of a `SinglePointCalculator`; uncertainties are
    arrays (3×3 as nine row-major columns), as NequIP's and, apart from the prefix, MACE's tools write them,
    ``uq_family`` and ``uq_calibration`` are info. ``e2ip compare`` reads such files where there are reference forces.
    Of a `BiasedCalculator` energy and forces are those without the bias, which the uncertainties are of;
    ``energy_bias`` is info.

    Parameters
    ----------
    atoms : ase.Atoms
        With a calculator; evaluated unless that has been done.
    keep_labels : bool
        Whether reference energies and forces that the frame brings along are those of this geometry. In a run they
        belong to the one that it started from, and are left out.

    Raises
    ------
    InputError
        Without calculator.
    """
    if atoms.calc is None:
        raise InputError("the frame has no calculator, whose results could be kept")
    atoms.get_forces(apply_constraint=False)
    results = atoms.calc.results
    unbiased = {name: results.get(f"{name}_unbiased", results.get(name)) for name in ASE_RESULTS}
    frame = predicted(atoms if keep_labels else without_labels(atoms), {**results, **unbiased})
    frame.info.pop("energy_bias", None)
    if "energy_bias" in results:
        frame.info["energy_bias"] = results["energy_bias"]
    return frame


def evaluate_first(atoms: Atoms, where: str = "the structure") -> None:
    """Have the calculator evaluate a structure; `InputError` where it cannot, mostly for an element it does not know.

    And for forces that are no numbers, as of two atoms at one place.

    A run begins with it: its first step shares the results.
    """
    try:
        forces = atoms.get_forces(apply_constraint=False)
    except InputError as error:
        # The calculator does not know where it comes from.
        raise InputError(str(error).replace("the structure: ", f"{where}: ", 1)) from error
    # What the hosts' calculators raise for such an element.
    except (KeyError, ValueError) as error:
        elements = ", ".join(sorted(set(atoms.get_chemical_symbols())))
        reason = str(error).strip("'\"").partition("\n")[0][:200]
        raise InputError(
            f"{where}: the model cannot evaluate it ({type(error).__name__}: {reason}): does it know {elements}?"
        ) from error
    bad = np.flatnonzero(~np.isfinite(forces).all(-1))
    if len(bad):
        raise InputError(
            f"{where}: the predicted forces of {len(bad)} atoms are not finite, first of atom {bad[0]}: do two atoms "
            "lie on each other?"
        )
