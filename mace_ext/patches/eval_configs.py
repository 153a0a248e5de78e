"""`mace.cli.eval_configs`: `mace_eval_configs` writes the uncertainty columns of e²IP models beside its own.

The stock ``run`` keeps only the outputs it knows. Ours are collected where it calls the model
(`mace_ext.compat.hear_outputs`) and added where it writes the frames (its ``ase.io.write``), so that nothing of
the stock command is repeated here. Files of other models are the stock ones to the byte.
"""

import argparse
import os
import pickle
import sys
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import ase.io
import torch

from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.checks import check_structure
from e2ip_plugins.scores.calibration import Calibration
from mace_ext.compat import heads_are_chosen, hear_outputs
from mace_ext.inference.evaluate import Columns
from mace_ext.model.files import species_of
from mace_ext.model.readout import find_family
from mace_ext.patches import wrap


def apply(module: Any) -> None:
    """Patch ``parse_args``, ``run``, ``main`` and what calls the model."""
    columns, stock_ase, stock_argparse = Columns(), module.ase, module.argparse

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
