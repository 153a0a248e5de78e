"""`mace_eval_configs` writes the uncertainty columns of e²IP models beside its own.

The stock ``run`` keeps only the outputs it knows. Ours are collected where it calls the model
(``get_model_output``) and added where it writes the frames (its ``ase.io.write``), so that nothing of
the stock command is repeated here. Files of other models are the stock ones to the byte.
"""

import os
import pickle
import sys
from functools import wraps
from types import SimpleNamespace

import ase.io
import torch
from ase.data import chemical_symbols

from e2ip_plugins.keys import NIW, OUTPUT_KEYS


class _Columns:
    """Per-frame uncertainty arrays of the ``run`` in progress."""

    def __init__(self):
        self.frames = []

    def add(self, output, ptr):
        """Split one batch's outputs at the frame boundaries ``ptr``; (3, 3) become 9 row-major columns."""
        arrays = {}
        for key in OUTPUT_KEYS:
            array = output[key.name].detach().cpu().numpy()
            arrays[key.name] = array.reshape(len(array), -1) if key.shape else array
        for start, end in zip(ptr[:-1].tolist(), ptr[1:].tolist(), strict=True):
            self.frames.append({name: array[start:end] for name, array in arrays.items()})

    def write_into(self, atoms_list, prefix):
        """Add the columns and the family to ASE frames."""
        for atoms, columns in zip(atoms_list, self.frames, strict=True):
            atoms.info[prefix + "uq_family"] = NIW
            for name, array in columns.items():
                atoms.arrays[prefix + name] = array


def patch_eval_configs(module):
    """Patch ``get_model_output``, ``run`` and ``main`` of `mace.cli.eval_configs`."""
    columns = _Columns()
    stock_output, stock_run, stock_main, stock_ase = module.get_model_output, module.run, module.main, module.ase

    @wraps(stock_output)
    def get_model_output(model, batch, *args, **kwargs):
        output = stock_output(model, batch, *args, **kwargs)
        if all(key.name in output for key in OUTPUT_KEYS):
            columns.add(output, batch["ptr"])
        return output

    @wraps(stock_run)
    def run(args):
        folder = os.path.dirname(args.output)
        if folder and not os.path.isdir(folder):
            raise FileNotFoundError(f"the folder of --output {args.output} does not exist")
        columns.frames.clear()

        def write(filename, images, **kwargs):
            if columns.frames:
                columns.write_into(images, args.info_prefix)
            stock_ase.io.write(filename, images=images, **kwargs)

        # The stock code looks `ase.io.write` up when it has everything: hand it one that adds the columns.
        module.ase = SimpleNamespace(data=stock_ase.data, io=SimpleNamespace(read=stock_ase.io.read, write=write))
        try:
            stock_run(args)
        finally:
            module.ase = stock_ase
            columns.frames.clear()

    @wraps(stock_main)
    def main():
        try:
            stock_main()
        except (FileNotFoundError, pickle.UnpicklingError, AssertionError, ValueError) as error:
            message = _explanation(error, module.parse_args())
            if not message:
                raise
            print(f"mace_eval_configs: error: {message}", file=sys.stderr)
            raise SystemExit(2) from error

    module.get_model_output, module.run, module.main = get_model_output, run, main


def _explanation(error, args):
    """What the user can mend, or an empty string; the stock checks fail without a word or a name."""
    if isinstance(error, FileNotFoundError):
        return str(error)
    if isinstance(error, pickle.UnpicklingError):
        return f"--model {args.model} is not a model file of mace_run_train"
    model = torch.load(args.model, map_location="cpu")
    heads = getattr(model, "heads", [])
    if args.head is not None and args.head not in heads:
        return f"--head {args.head}: {args.model} has no such head; choose from: {', '.join(heads)}"
    known = {int(z) for z in model.atomic_numbers}
    unknown = {z for atoms in ase.io.read(args.configs, index=":") for z in atoms.numbers.tolist()} - known
    if unknown:
        missing, there = (", ".join(chemical_symbols[z] for z in sorted(numbers)) for numbers in (unknown, known))
        return f"--configs {args.configs} has elements that {args.model} does not know: {missing}; it knows {there}"
    return ""
