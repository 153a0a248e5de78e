"""Write predictions into frames, under the names of MACE's and NequIP's results, and keep or remove their labels."""

import re
from typing import Any, Dict, List, Mapping

import numpy as np
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io.extxyz import per_atom_properties

from e2ip_plugins import families, keys
from e2ip_plugins.keys import OutputKey
from e2ip_plugins.predictions.fingerprints import are_predictions, force_sizes

#: Results that ASE's writers and calculators know.
ASE_RESULTS = ("energy", "forces", "stress")

#: Names of arrays and info that belong to one geometry: labels, and predictions of other programs.
_LABEL = re.compile(r"(^|_)(energy|energies|forces?|stress|stresses|virials?|dipole|charges)$", re.IGNORECASE)

#: Arrays that ASE itself writes.
_STRUCTURE = ("numbers", "positions", "momenta", "masses", "tags", "initial_magmoms", "initial_charges")


def uncertainties() -> Dict[str, OutputKey]:
    """Return every per-atom output of every family, by name."""
    outputs = (
        *keys.FORCE_VIEWS,
        *(key for family in families.table().values() for key in family.output_keys()),
        keys.LEVERAGE,
    )
    return {key.name: key for key in outputs}


def our_names() -> List[str]:
    """Return the names of everything that this package adds to results: of atoms, of frames, and `FRAME_KEYS`."""
    return [*uncertainties(), *(key.name for key in keys.FRAME_OUTPUTS), *keys.FRAME_KEYS]


def predicted(atoms: Atoms, results: Mapping[str, Any]) -> Atoms:
    """Return a copy of a frame with a model's results, and without those of an earlier evaluation.

    Energy, forces and, of a periodic structure, stress become results of a `SinglePointCalculator`. See
    `put_uncertainties` for the others.

    Parameters
    ----------
    atoms : ase.Atoms
        Its calculator is ignored.
    results
        In the shapes of ``calc.results``.
    """
    frame = atoms.copy()
    put_uncertainties(frame, results, uncertainties())
    standard = {name: results[name] for name in ASE_RESULTS if results.get(name) is not None}
    if not frame.pbc.all():
        # MACE and NequIP give the stress of whatever box they put a molecule into.
        standard.pop("stress", None)
    frame.calc = SinglePointCalculator(frame, **standard)
    return frame


def put_uncertainties(frame: Atoms, results: Mapping[str, Any], known: Mapping[str, OutputKey]) -> None:
    """Replace an earlier evaluation's results in a frame's arrays and info by a model's uncertainties.

    Per-atom outputs become arrays (a 3×3 matrix nine row-major columns), `FRAME_OUTPUTS` and `FRAME_KEYS` become info.
    Values that do not have the shape of ``calc.results``, and a leverage that was not fitted, are left out.

    Parameters
    ----------
    frame : ase.Atoms
        Changed in place.
    results
        In the shapes of ``calc.results``.
    known
        `uncertainties`.
    """
    for name in (*known, *ASE_RESULTS):
        frame.arrays.pop(name, None)
        frame.info.pop(name, None)
    for key in known.values():
        values = np.asarray(results.get(key.name, ()))
        if values.shape != (len(frame), *key.shape) or (key == keys.LEVERAGE and (values == keys.UNFITTED).all()):
            continue
        frame.arrays[key.name] = values.reshape(len(frame), -1) if key.shape else values.copy()
    for name in (*(key.name for key in keys.FRAME_OUTPUTS), *keys.FRAME_KEYS):
        frame.info.pop(name, None)
        if name in results:
            frame.info[name] = results[name]
    if "forces" in results:
        frame.info[keys.PREDICTED_KEY] = force_sizes(np.asarray(results["forces"]))


def keep_references(atoms: Atoms) -> None:
    """Rename a frame's labels in place, to make room for predictions: ``forces`` becomes ``REF_forces``, and so on.

    ASE's reader makes a calculator of labels that have the names of its own results. Beside a reference with another
    prefix (``dft_forces``) the new name is ``input_forces``, because a file may have one reference only. What the
    calculator holds of an earlier evaluation's predictions (`are_predictions`) `predicted` replaces.
    """
    labels = {} if atoms.calc is None else atoms.calc.results
    if "forces" in labels and are_predictions(atoms.info, labels["forces"]):
        labels = {}
    for name, value in labels.items():
        target: Dict[str, Any] = atoms.arrays if name in per_atom_properties else atoms.info
        known = any(keys.REFERENCE_PREFIX.match(str(other)) and str(other).endswith(f"_{name}") for other in target)
        target[f"{'input' if known else 'REF'}_{name}"] = value


def without_labels(atoms: Atoms) -> Atoms:
    """Return a copy of a frame without calculator and without labels, their weights, predictions and uncertainties.

    The first frame of a run often comes from a labelled file, and ASE carries its labels along. In a file of collected
    frames, of other geometries, they would be wrong and be trained on.
    """
    frame = atoms.copy()
    ours = (*our_names(), *keys.WEIGHT_KEYS)
    for columns in (frame.arrays, frame.info):
        # MACE puts a prefix before the names.
        for name in [n for n in columns if n not in _STRUCTURE and (_LABEL.search(str(n)) or str(n).endswith(ours))]:
            del columns[name]
    return frame
