"""The uncertainty columns that `mace_eval_configs` writes beside its own (`mace_ext.patches.eval_configs`)."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Optional, Set, Tuple, Type

import numpy as np
import torch
from ase import Atoms
from torch import Tensor

from e2ip_plugins import families
from e2ip_plugins.errors import InputError
from e2ip_plugins.families.interface import Family
from e2ip_plugins.keys import (
    CALIBRATION_KEY,
    ENERGY_OUTPUTS,
    FAMILY_KEY,
    FORCE_VIEWS,
    FRAME_OUTPUTS,
    LEVERAGE,
    MODEL_KEY,
    UNFITTED,
)
from e2ip_plugins.predictions.checks import check_structure
from e2ip_plugins.readout.readout import unfitted
from e2ip_plugins.scores.calibration import Calibration
from e2ip_plugins.scores.results import calibrated_columns, calibrated_energies, energy_results
from mace_ext.model.files import embedded
from mace_ext.model.readout import find_name, find_readout


@dataclass
class Columns:
    """Per-frame uncertainty arrays of one ``run``.

    Attributes
    ----------
    head : str, optional
        MACE head that the user has chosen.
    calibration : Calibration, optional
    unchecked : list of (str, Atoms)
        Frames that have been read, each with its place for messages, until `begin` checks them.
    family : subclass of Family, optional
        Of the model; known after its first batch.
    uq_model : str, optional
        Name of the model's readout.
    frames : list of dict
        Columns of every frame that has been predicted.
    of_frames : list of dict
        `FRAME_OUTPUTS` of every frame, empty where they were not fitted.
    warnings : set of str
        Warnings that have been printed.
    """

    head: Optional[str] = None
    calibration: Optional[Calibration] = None
    unchecked: List[Tuple[str, Atoms]] = field(default_factory=list)
    family: Optional[Type[Family]] = None
    uq_model: Optional[str] = None
    frames: List[Dict[str, np.ndarray]] = field(default_factory=list)
    of_frames: List[Dict[str, Any]] = field(default_factory=list)
    warnings: Set[str] = field(default_factory=set)

    def clear(self) -> None:
        """Begin the next run."""
        vars(self).update(vars(Columns()))

    def warn(self, text: str) -> None:
        """Print a warning, once in a run; nothing if it is empty."""
        if text and text not in self.warnings:
            print(f"mace_eval_configs: warning: {text}", file=sys.stderr)
            self.warnings.add(text)

    def begin(self, model: torch.nn.Module) -> None:
        """Look at the model and at the frames before its first batch.

        Raises
        ------
        InputError
            For frames without meaning for the model, of which MACE would still predict numbers.
        """
        readout = find_readout(model)
        if readout is None or self.uq_model is not None:
            return
        self.warn(unfitted(readout))
        heads = getattr(model, "heads", ["Default"])
        # As the stock code chooses one.
        head = self.head or ("Default" if "Default" in heads else heads[-1])
        if self.head is None and len(heads) > 1:
            self.warn(f"the model has the heads {', '.join(heads)}; without --head MACE takes {head}")
        unread = ", ".join(key for keys in embedded(model) for key in keys.values())
        if unread:
            self.warn(
                f"the model was trained with {unread} of every frame, of which MACE's command reads nothing: every "
                "frame counts as one without charge and with spin 1 (e2ip evaluate reads them)"
            )
        self.uq_model = find_name(model, head)
        for where, atoms in self.unchecked:
            check_structure(atoms, where)

    def add(self, family: Optional[Type[Family]], output: Dict[str, Tensor], ptr: Tensor) -> None:
        """Split one batch's outputs at the frame boundaries ``ptr``; (3, 3) become 9 row-major columns.

        Nothing happens if the model has no readout (``family`` is None) and the outputs have none of its keys.
        """
        family = family or families.of_outputs(output)
        wanted = FORCE_VIEWS if family is None else family.output_keys()
        missing = [key.name for key in wanted if output.get(key.name) is None]
        if self.calibration is not None and not self.frames:
            self.calibration.check(family, (), "the model", self.uq_model)
        if family is None and len(missing) == len(wanted):
            return
        if family is None or missing:
            raise InputError(f"the model gives a part of its uncertainties only; missing: {', '.join(missing)}")
        self.family, arrays = family, {}
        fitted = not bool((output[LEVERAGE.name] == UNFITTED).all())
        for key in (*wanted, LEVERAGE) if fitted else wanted:
            array = output[key.name].detach().cpu().numpy()
            arrays[key.name] = array.reshape(len(array), -1) if key.shape else array
        energies = {key.name: output[key.name].detach().cpu().numpy() for key in FRAME_OUTPUTS if key.name in output}
        for frame, (start, end) in enumerate(zip(ptr[:-1].tolist(), ptr[1:].tolist(), strict=True)):
            self.frames.append({name: array[start:end] for name, array in arrays.items()})
            self.of_frames.append(energy_results(energies, frame))

    def write_into(self, atoms_list: List[Atoms], prefix: str) -> None:
        """Add the columns, and the names of family, readout and calibration, to ASE frames."""
        if self.family is None:
            return
        for atoms, columns, of_frame in zip(atoms_list, self.frames, self.of_frames, strict=True):
            if not atoms.pbc.all():
                of_frame = {key.name: of_frame[key.name] for key in ENERGY_OUTPUTS if key.name in of_frame}
            of_frame = {**of_frame, **calibrated_energies(self.calibration, of_frame)}
            names: Dict[str, Any] = {**of_frame, FAMILY_KEY: self.family.uq_family, MODEL_KEY: self.uq_model}
            if self.calibration is not None:
                calibrated = calibrated_columns(self.calibration, self.family, columns, atoms.symbols)
                columns = {**columns, **{name: value.numpy() for name, value in calibrated.items()}}
                names[CALIBRATION_KEY] = Path(self.calibration.path).name
            atoms.info.update({prefix + key: name for key, name in names.items() if name is not None})
            for name, array in columns.items():
                atoms.arrays[prefix + name] = array
