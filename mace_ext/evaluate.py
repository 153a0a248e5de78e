"""`mace_eval_configs` writes the uncertainty columns of e²IP models beside its own.

The stock ``run`` keeps only the outputs it knows. Ours are collected where it calls the model
(`mace_ext.compat.hear_outputs`) and added where it writes the frames (its ``ase.io.write``), so that nothing of
the stock command is repeated here. Files of other models are the stock ones to the byte.
"""

import argparse
import os
import pickle
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, List, Optional, Set, Tuple, Type

import ase.io
import numpy as np
import torch
from torch import Tensor

from e2ip_plugins import families
from e2ip_plugins.errors import InputError
from e2ip_plugins.families.interface import Family
from e2ip_plugins.keys import CALIBRATION_KEY, FAMILY_KEY, FORCE_VIEWS, LEVERAGE, MODEL_KEY, UNFITTED
from e2ip_plugins.readout.readout import unfitted
from e2ip_plugins.scores.calibration import Calibration
from e2ip_plugins.tools.frames import check_structure
from mace_ext.compat import heads_are_chosen, hear_outputs
from mace_ext.files import embedded, species_of
from mace_ext.patches import wrap
from mace_ext.readout import find_family, find_name, find_readout


class _Columns:
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


def patch_eval_configs(module: Any) -> None:
    """Patch ``parse_args``, ``run``, ``main`` and what calls the model in `mace.cli.eval_configs`."""
    columns, stock_ase, stock_argparse = _Columns(), module.ase, module.argparse

    class Parser(argparse.ArgumentParser):
        def parse_args(self, *args, **kwargs):
            self.add_argument("--e2ip_calibration", help="file of e2ip calibrate, applied to the uncertainties")
            return super().parse_args(*args, **kwargs)

    def parse_args(stock):
        # The stock code makes its parser and parses in one go: hand it one that knows an option more.
        module.argparse = SimpleNamespace(**{**vars(argparse), "ArgumentParser": Parser})
        try:
            return stock()
        finally:
            module.argparse = stock_argparse

    def before(model):
        columns.begin(model)

    def after(model, batch, output):
        columns.add(find_family(model), output, batch["ptr"])

    def run(stock, args):
        folder = os.path.dirname(args.output)
        if folder and not os.path.isdir(folder):
            raise FileNotFoundError(f"the folder of --output {args.output} does not exist")
        columns.clear()
        columns.head = getattr(args, "head", None)
        if columns.head is not None and not heads_are_chosen(stock):
            columns.warn(f"--head {columns.head} has no effect in this release of MACE")
            columns.head = None
        given = getattr(args, "e2ip_calibration", None)
        calibration = columns.calibration = None if given is None else Calibration.read(given)

        def read(filename, *rest, **kwargs):
            frames = stock_ase.io.read(filename, *rest, **kwargs)
            if calibration is not None:
                calibration.check_species({symbol for atoms in frames for symbol in atoms.symbols}, args.configs)
            columns.unchecked = [(f"{args.configs}, frame {i}", atoms) for i, atoms in enumerate(frames)]
            return frames

        def write(filename, images, **kwargs):
            columns.write_into(images, args.info_prefix)
            stock_ase.io.write(filename, images=images, **kwargs)

        # The stock code looks both up when it calls them: hand it a `write` that adds the columns.
        module.ase = SimpleNamespace(data=stock_ase.data, io=SimpleNamespace(read=read, write=write))
        try:
            stock(args)
        finally:
            module.ase = stock_ase
            columns.clear()

    def main(stock):
        try:
            stock()
        except (FileNotFoundError, pickle.UnpicklingError, AssertionError, ValueError) as error:
            message = _explanation(error, module.parse_args())
            if not message:
                raise
            print(f"mace_eval_configs: error: {message}", file=sys.stderr)
            raise SystemExit(2) from error

    hear_outputs(module, before, after)
    for function in (parse_args, run, main):
        wrap(module, function.__name__, function)


def _explanation(error: Exception, args: Namespace) -> str:
    """What the user can mend, or an empty string; the stock checks fail without a word or a name."""
    if isinstance(error, FileNotFoundError):
        return str(error)
    if isinstance(error, pickle.UnpicklingError):
        return f"--model {args.model} is not a model file of mace_run_train"
    if isinstance(error, InputError):
        if args.e2ip_calibration is not None and args.e2ip_calibration in str(error):
            return f"--e2ip_calibration: {error}"
        if str(error).startswith(args.configs):
            return f"--configs {error}"
        return f"--model {args.model}: {error}"
    model = torch.load(args.model, map_location="cpu")
    heads = getattr(model, "heads", [])
    if args.head is not None and args.head not in heads:
        return f"--head {args.head}: {args.model} has no such head; choose from: {', '.join(heads)}"
    known = species_of(model)
    try:
        for number, atoms in enumerate(ase.io.read(args.configs, index=":")):
            check_structure(atoms, f"--configs {args.configs}, frame {number}", known)
    except InputError as found:
        return str(found)
    return ""
