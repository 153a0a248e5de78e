"""Frames with predictions, as ``e2ip compare`` and ``e2ip calibrate`` read them; names as in the hosts' results."""

import re
from typing import Any, Dict, Mapping

import numpy as np
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io.extxyz import per_atom_properties

from e2ip_plugins import families
from e2ip_plugins.keys import FAMILY_KEY, FORCE_VIEWS, FRAME_KEYS, LEVERAGE, REFERENCE_PREFIX, UNFITTED, OutputKey

#: Results that ASE's writers and calculators know.
STOCK = ("energy", "forces", "stress")

#: Arrays and info that belong to one geometry: what a labelled frame brings along, and other programs' predictions.
_LABEL = re.compile(r"(^|_)(energy|energies|forces?|stress|stresses|virials?|dipole|charges)$", re.IGNORECASE)

#: Written by ASE itself.
_STRUCTURE = ("numbers", "positions", "momenta", "masses", "tags", "initial_magmoms", "initial_charges")


def uncertainties() -> Dict[str, OutputKey]:
    """Every per-atom output of every family, by name."""
    keys = (*FORCE_VIEWS, *(key for family in families.table().values() for key in family.output_keys()), LEVERAGE)
    return {key.name: key for key in keys}


def predicted(atoms: Atoms, results: Mapping[str, Any]) -> Atoms:
    """A copy of a frame with a model's results, and without those of an earlier evaluation.

    Energy, forces and, of a periodic structure, stress become those of a `SinglePointCalculator`, the rest as
    `put_uncertainties` has it.

    Parameters
    ----------
    atoms : ase.Atoms
        Its calculator is not looked at.
    results
        In the shapes of ``calc.results``.
    """
    frame = atoms.copy()
    put_uncertainties(frame, results, uncertainties())
    stock = {name: results[name] for name in STOCK if results.get(name) is not None}
    if not frame.pbc.all():
        # Hosts give one of whatever box they put a molecule into.
        stock.pop("stress", None)
    frame.calc = SinglePointCalculator(frame, **stock)
    return frame


def put_uncertainties(frame: Atoms, results: Mapping[str, Any], known: Mapping[str, OutputKey]) -> None:
    """Replace what an earlier evaluation left in a frame's arrays and info by a model's uncertainties.

    They become arrays (3×3 as nine row-major columns), `FRAME_KEYS` info. What has not the shape of
    ``calc.results``, and a leverage that was not fitted, is left out.

    Parameters
    ----------
    frame : ase.Atoms
        Changed in place.
    results
        In the shapes of ``calc.results``.
    known
        `uncertainties`.
    """
    for name in (*known, *STOCK):
        frame.arrays.pop(name, None)
        frame.info.pop(name, None)
    for key in known.values():
        values = np.asarray(results.get(key.name, ()))
        if values.shape != (len(frame), *key.shape) or (key == LEVERAGE and (values == UNFITTED).all()):
            continue
        frame.arrays[key.name] = values.reshape(len(frame), -1) if key.shape else values.copy()
    for name in FRAME_KEYS:
        frame.info.pop(name, None)
        if name in results:
            frame.info[name] = results[name]


def keep_references(atoms: Atoms) -> None:
    """Let a frame's labels make room for predictions, in place: ``forces`` becomes ``REF_forces``, and so on.

    ASE's reader makes a calculator of labels with the names of its own results. Beside a reference with another prefix
    (``dft_forces``) the name is ``input_forces``: a file may have one reference only. In a frame with ``uq_family``
    they are no labels but an earlier evaluation's predictions, which `predicted` replaces.
    """
    labels = {} if atoms.calc is None or FAMILY_KEY in atoms.info else atoms.calc.results
    for name, value in labels.items():
        kept: Dict[str, Any] = atoms.arrays if name in per_atom_properties else atoms.info
        known = any(REFERENCE_PREFIX.match(str(other)) and str(other).endswith(f"_{name}") for other in kept)
        kept[f"{'input' if known else 'REF'}_{name}"] = value


def without_labels(atoms: Atoms) -> Atoms:
    """A copy without calculator and without what belongs to another geometry: reference energies, forces and so on.

    The first frame of a run often comes from a labelled file, and ASE carries its labels along. In a file of collected
    frames they would be wrong, and be trained on.
    """
    frame = atoms.copy()
    ours = (*uncertainties(), *FRAME_KEYS)
    for kept in (frame.arrays, frame.info):
        # Hosts put prefixes before the names.
        for name in [n for n in kept if n not in _STRUCTURE and (_LABEL.search(str(n)) or str(n).endswith(ours))]:
            del kept[name]
    return frame
