"""Frames of a run as files keep them: energy, forces and every uncertainty, named as in MACE and NequIP.

ASE's own writers know the stock properties alone, and its `SinglePointCalculator` refuses all others.
"""

import numpy as np
from ase import Atoms

from e2ip_plugins.errors import InputError
from e2ip_plugins.md.mixtures import results_of
from e2ip_plugins.predictions.columns import ASE_RESULTS, predicted, without_labels


def with_results(atoms: Atoms, keep_labels: bool = False) -> Atoms:
    """Return a copy of a frame that ``ase.io.write(…, format="extxyz")`` writes with all uncertainties.

    Energy, forces and, of a structure that is periodic in all directions, a stress that has been calculated are those
    of a `SinglePointCalculator`. Uncertainties are
    arrays (3×3 as nine row-major columns) with the names of NequIP's files and, apart from the prefix, of MACE's.
    ``uq_family`` and ``uq_calibration`` are info. ``e2ip compare`` reads such files if they have reference forces.
    With a `BiasedCalculator`, energy and forces are those without the bias, to which the uncertainties belong;
    ``energy_bias`` is info.

    Parameters
    ----------
    atoms : ase.Atoms
        Frame with a calculator, which is evaluated unless it has been.
    keep_labels : bool
        Whether labels of the frame belong to this geometry. In a run they belong to the structure that it started
        from, and are left out: every info and array whose name ends with energy, forces, stress, virials, dipole or
        charges, weights of MACE (``config_weight``), and results of an earlier evaluation. All others stay.

    Raises
    ------
    InputError
        The frame has no calculator, or a mixture of several with uncertainties.
    """
    if atoms.calc is None:
        raise InputError("the frame has no calculator, whose results could be kept")
    atoms.get_forces(apply_constraint=False)
    results = results_of(atoms).copy()
    results.update({name: results.get(f"{name}_unbiased", results.get(name)) for name in ASE_RESULTS})
    frame = predicted(atoms if keep_labels else without_labels(atoms), results)
    frame.info.pop("energy_bias", None)
    if "energy_bias" in results:
        frame.info["energy_bias"] = results["energy_bias"]
    return frame


def non_finite(atoms: Atoms, name: str, values: np.ndarray, infinite: bool = False) -> str:
    """Return a sentence on the atoms of which a value is not a finite number; an empty string if there are none.

    Parameters
    ----------
    atoms : ase.Atoms
    name : str
        Name of the values.
    values : (N, …)
    infinite : bool
        Whether infinity is a value, as it is of a leverage.
    """
    usable = ~np.isnan(values) if infinite else np.isfinite(values)
    if usable.all():
        return ""
    bad = np.flatnonzero(~usable.reshape(len(atoms), -1).all(-1))
    return f"{name} of {len(bad)} atoms are not finite, first of atom {bad[0]} ({atoms.symbols[bad[0]]})"


def evaluate_first(atoms: Atoms, where: str = "the structure") -> None:
    """Evaluate the structure that a run begins with, whose results the first step of the run uses again.

    Raises
    ------
    InputError
        The calculator fails, mostly at an element that the model does not know, or gives forces that are not finite,
        as of two atoms at one place.
    """
    try:
        forces = atoms.get_forces(apply_constraint=False)
    except InputError as error:
        # The calculator does not know the file.
        raise InputError(str(error).replace("the structure: ", f"{where}: ", 1)) from error
    # These are raised by the calculators of MACE and NequIP for an unknown element.
    except (KeyError, ValueError) as error:
        elements = ", ".join(sorted(set(atoms.get_chemical_symbols())))
        reason = str(error).strip("'\"").partition("\n")[0][:200]
        problem = f"the model cannot evaluate it ({type(error).__name__}: {reason})"
        raise InputError(f"{where}: {problem}: does it know {elements}?") from error
    problem = non_finite(atoms, "the predicted forces", forces)
    if problem:
        raise InputError(f"{where}: {problem}: do two atoms lie on each other?")
