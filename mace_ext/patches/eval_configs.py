"""`mace.cli.eval_configs`: `mace_eval_configs` writes the uncertainty columns of e²IP models beside its own.

The stock ``run`` keeps only the outputs it knows. Ours are collected where it calls the model
(`mace_ext.compat.observe_outputs`) and added where it writes the frames (its ``ase.io.write``), so that nothing of
the stock command is repeated here. Files of other models are the stock ones to the byte.
"""

import argparse
import os
import pickle
import sys
from argparse import Namespace
from functools import partial
from types import SimpleNamespace
from typing import Any

import ase.io
import torch

from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.checks import check_structure
from e2ip_plugins.scores.calibration import Calibration
from mace_ext.compat import heads_are_chosen, observe_outputs
from mace_ext.inference.eval_configs import Columns
from mace_ext.model.files import species_of
from mace_ext.model.readout import find_family
from mace_ext.patches import replaced, wrap


def apply(module: Any) -> None:
    """Patch ``parse_args``, ``run``, ``main`` and what calls the model."""
    columns = Columns()

    def after(model, batch, output):
        columns.add(find_family(model), output, batch["ptr"])

    observe_outputs(module, columns.begin, after)
    wrap(module, parse_args=partial(parse_args, module), run=partial(run, module, columns), main=partial(main, module))


class _Parser(argparse.ArgumentParser):
    def parse_args(self, *args, **kwargs):
        self.add_argument("--e2ip_calibration", help="file of e2ip calibrate, applied to the uncertainties")
        return super().parse_args(*args, **kwargs)


def parse_args(module, stock):
    """Parse the command line; the stock function makes its parser from a class that knows one option more."""
    with replaced(module, "argparse", SimpleNamespace(**{**vars(argparse), "ArgumentParser": _Parser})):
        return stock()


def run(module, columns, stock, args):
    """Evaluate the model on frames and write them with the uncertainty columns."""
    folder = os.path.dirname(args.output)
    if folder and not os.path.isdir(folder):
        raise FileNotFoundError(f"the folder of --output {args.output} does not exist")
    columns.clear()
    columns.head = getattr(args, "head", None)
    if columns.head is not None and not heads_are_chosen(stock):
        columns.warn(f"--head {columns.head} has no effect in this release of MACE")
        columns.head = None
    if getattr(args, "e2ip_calibration", None) is not None:
        columns.calibration = Calibration.read(args.e2ip_calibration)

    def read(filename, *rest, **kwargs):
        frames = ase.io.read(filename, *rest, **kwargs)
        if columns.calibration is not None:
            columns.calibration.check_species({symbol for atoms in frames for symbol in atoms.symbols}, args.configs)
        columns.unchecked = [(f"{args.configs}, frame {i}", atoms) for i, atoms in enumerate(frames)]
        return frames

    def write(filename, images, **kwargs):
        columns.write_into(images, args.info_prefix)
        ase.io.write(filename, images=images, **kwargs)

    try:
        # The stock code looks `ase.io` up when it calls it.
        with replaced(module, "ase", SimpleNamespace(data=module.ase.data, io=SimpleNamespace(read=read, write=write))):
            stock(args)
    finally:
        columns.clear()


def main(module, stock):
    """Run the command; what the user can mend ends it with one line instead of a traceback."""
    try:
        stock()
    except (FileNotFoundError, pickle.UnpicklingError, AssertionError, ValueError) as error:
        message = _explanation(error, module.parse_args())
        if not message:
            raise
        print(f"mace_eval_configs: error: {message}", file=sys.stderr)
        raise SystemExit(2) from error


def _explanation(error: Exception, args: Namespace) -> str:
    """Return what the user can mend, or an empty string; the stock checks fail without a message or a name."""
    if isinstance(error, FileNotFoundError):
        return str(error)
    if isinstance(error, pickle.UnpicklingError):
        return f"--model {args.model} is not a model file of mace_run_train"
    if isinstance(error, InputError):
        if args.e2ip_calibration is not None and args.e2ip_calibration in str(error):
            return f"--e2ip_calibration: {error}"
        return f"--configs {error}" if str(error).startswith(args.configs) else f"--model {args.model}: {error}"
    model = torch.load(args.model, map_location="cpu")
    heads = getattr(model, "heads", [])
    if args.head is not None and args.head not in heads:
        return f"--head {args.head}: {args.model} has no such head; choose from: {', '.join(heads)}"
    try:
        for number, atoms in enumerate(ase.io.read(args.configs, index=":")):
            check_structure(atoms, f"--configs {args.configs}, frame {number}", species_of(model))
    except InputError as problem:
        return str(problem)
    return ""
