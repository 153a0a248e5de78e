"""What releases of MACE have differently, in one place. An entry goes when its releases are no longer tested.

Loaded while MACE is: imports of MACE wait until they are used.
"""

import inspect
from argparse import Namespace
from types import SimpleNamespace
from typing import Any, Callable

from mace_ext.observed_model import ObservedModel


def option(args: Namespace, name: str) -> Any:
    """Return an option that some releases lack: ``lora`` (0.3.15), ``pseudolabel_replay`` (0.3.14)."""
    return getattr(args, name, False)


def finite_errors(errors: Any, finite: Any, labelled: Any) -> Any:
    """Return the force errors that ``MACELoss`` has noted of a batch, without those of atoms that are not ``finite``.

    ``finite`` (N,) says which atoms have a finite reference. From 0.3.14 on ``errors`` are components (3 L,) of the
    ``labelled`` atoms, in earlier releases they are (N, 3).
    """
    return errors[finite] if errors.dim() == 2 else errors[finite[labelled].repeat_interleave(3)]


def heads_are_chosen(run: Callable[..., Any]) -> bool:
    """Return whether `run` of `mace.cli.eval_configs` follows ``--head``, as it does from 0.3.15 on."""
    code = inspect.unwrap(run).__code__
    return "head_name" in code.co_varnames + code.co_cellvars


def observe_outputs(module: Any, before: Callable, after: Callable) -> None:
    """Let `mace.cli.eval_configs` report calls of the model by ``before(model)`` and ``after(model, batch, output)``.

    From 0.3.14 on it calls models through one function. Earlier releases call the loaded model directly.
    """
    if hasattr(module, "get_model_output"):
        stock = module.get_model_output
        module.get_model_output = lambda model, *args, **kwargs: stock(
            ObservedModel(model, before, after), *args, **kwargs
        )
        return
    torch = module.torch

    def load(*args: Any, **kwargs: Any) -> ObservedModel:
        return ObservedModel(torch.load(*args, **kwargs), before, after)

    module.torch = SimpleNamespace(**{**vars(torch), "load": load})
