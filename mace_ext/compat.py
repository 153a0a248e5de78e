"""What releases of MACE have differently, in one place. An entry goes when its releases are no longer tested.

Loaded while MACE is: imports of MACE wait until they are used.
"""

import inspect
from argparse import Namespace
from types import SimpleNamespace
from typing import Any, Callable

from mace_ext.heard import Heard


def option(args: Namespace, name: str) -> Any:
    """An option of `mace_run_train` that not every release has: ``lora`` (0.3.15), ``pseudolabel_replay`` (0.3.14)."""
    return getattr(args, name, False)


def finite_errors(errors: Any, finite: Any, labelled: Any) -> Any:
    """Force errors that ``MACELoss`` has noted of a batch, of atoms with a ``finite`` (N,) reference alone.

    From 0.3.14 on they are components (3 L,) of the ``labelled`` atoms, before they are (N, 3).
    """
    return errors[finite] if errors.dim() == 2 else errors[finite[labelled].repeat_interleave(3)]


def heads_are_chosen(run: Callable[..., Any]) -> bool:
    """Whether `run` of `mace.cli.eval_configs` heeds ``--head``, as it does from 0.3.15 on."""
    code = inspect.unwrap(run).__code__
    return "head_name" in code.co_varnames + code.co_cellvars


def hear_outputs(module: Any, before: Callable[[Any], None], after: Callable[[Any, Any, Any], None]) -> None:
    """Let `mace.cli.eval_configs` tell of every call of the model: ``before(model)``, ``after(model, batch, output)``.

    From 0.3.14 on it calls models through one function. Before, the loaded model is called as it is.
    """
    if hasattr(module, "get_model_output"):
        stock = module.get_model_output

        def get_model_output(model, batch, *args, **kwargs):
            before(model)
            output = stock(model, batch, *args, **kwargs)
            after(model, batch, output)
            return output

        module.get_model_output = get_model_output
        return
    torch = module.torch

    def load(*args, **kwargs):
        return Heard(torch.load(*args, **kwargs), before, after)

    module.torch = SimpleNamespace(**{**vars(torch), "load": load})
