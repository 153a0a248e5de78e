"""The uncertainty columns that `mace_eval_configs` writes beside its own (`mace_ext.patches.eval_configs`)."""

import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Set, Tuple, Type

import numpy as np
import torch
from torch import Tensor

from e2ip_plugins import families
from e2ip_plugins.errors import InputError
from e2ip_plugins.families.interface import Family
from e2ip_plugins.keys import CALIBRATION_KEY, FAMILY_KEY, FORCE_VIEWS, LEVERAGE, MODEL_KEY, UNFITTED
from e2ip_plugins.predictions.checks import check_structure
from e2ip_plugins.readout.readout import unfitted
from e2ip_plugins.scores.calibration import Calibration
from mace_ext.model.files import embedded
from mace_ext.model.readout import find_name, find_readout


class Columns:
    """Per-frame uncertainty arrays of the ``run`` in progress."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.family: Optional[Type[Family]] = None
        self.uq_model: Optional[str] = None
        self.frames: List[Dict[str, np.ndarray]] = []
        self.warned: Set[str] = set()
        self.calibration: Optional[Calibration] = None
        self.unchecked: List[Tuple[str, Any]] = []
        self.head: Optional[str] = None

    def check_structures(self) -> None:
        """`InputError` for frames that MACE would predict numbers of that mean nothing; once in a run."""
        for where, atoms in self.unchecked:
            check_structure(atoms, where)
        self.unchecked = []

    def warn(self, text: str) -> None:
        """Once in a run."""
        if text and text not in self.warned:
            print(f"mace_eval_configs: warning: {text}", file=sys.stderr)
            self.warned.add(text)

    def begin(self, model: Any) -> None:
        """Look at the model and at the frames before its first batch."""
        readout = find_readout(model)
        self.warn(unfitted(readout))
        if readout is not None:
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
            self.uq_model = self.uq_model or find_name(model, head)
            self.check_structures()

    def add(self, family: Optional[Type[Family]], output: Dict[str, Tensor], ptr: Tensor) -> None:
        """Split one batch's outputs at the frame boundaries ``ptr``; (3, 3) become 9 row-major columns.

        Nothing happens where the model has no readout (``family`` is None) and the outputs look like none of ours.
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
        leverage = output.get(LEVERAGE.name)
        fitted = leverage is not None and not bool((leverage == UNFITTED).all())
        for key in (*wanted, LEVERAGE) if fitted else wanted:
            array = output[key.name].detach().cpu().numpy()
            arrays[key.name] = array.reshape(len(array), -1) if key.shape else array
        for start, end in zip(ptr[:-1].tolist(), ptr[1:].tolist(), strict=True):
            self.frames.append({name: array[start:end] for name, array in arrays.items()})

    def write_into(self, atoms_list: List[Any], prefix: str) -> None:
        """Add the columns and the family to ASE frames."""
        if self.family is None:
            return
        for atoms, columns in zip(atoms_list, self.frames, strict=True):
            atoms.info[prefix + FAMILY_KEY] = self.family.uq_family
            if self.uq_model is not None:
                atoms.info[prefix + MODEL_KEY] = self.uq_model
            if self.calibration is not None:
                columns = {**columns, **self._calibrated(self.family, self.calibration, columns, atoms.symbols)}
                atoms.info[prefix + CALIBRATION_KEY] = Path(self.calibration.path).name
            for name, array in columns.items():
                atoms.arrays[prefix + name] = array

    @staticmethod
    def _calibrated(
        family: Type[Family], calibration: Calibration, columns: Dict[str, np.ndarray], species: Any
    ) -> Dict[str, np.ndarray]:
        parameters = {
            key.name: torch.as_tensor(columns[key.name], dtype=torch.float64).reshape(-1, *key.shape)
            for key in family.parameter_keys
        }
        found = calibration.in_units(family, parameters, 1.0, species)
        return {name: value.numpy().reshape(columns[name].shape) for name, value in found.items()}
