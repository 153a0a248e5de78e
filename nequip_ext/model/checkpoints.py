"""NequIP's checkpoint files: training modules from them, leverages in them."""

import copy
from contextlib import contextmanager
from typing import Any, Dict, Iterator, Optional

import torch
from nequip.model.utils import override_model_compile_mode
from nequip.train import NequIPLightningModule

from e2ip_plugins.contract import installed
from e2ip_plugins.errors import InputError
from e2ip_plugins.files import save
from e2ip_plugins.formats import FormatError
from e2ip_plugins.leverage.module import Leverage
from nequip_ext.model.readout import graph_readouts


def leverages(pl_module: torch.nn.Module) -> Dict[str, Leverage]:
    """Return the leverage of every readout, by its prefix in the state dictionary."""
    return {f"{name}.readout.leverage.": part.readout.leverage for name, part in graph_readouts(pl_module).items()}


def rebuild(kind: Any, hparams: Dict[str, Any], checkpoint: Dict[str, Any]) -> NequIPLightningModule:
    """Return the training module of a loaded checkpoint, on the CPU and not compiled, as `ModelFromCheckpoint` does."""
    with override_model_compile_mode("eager"):
        twin = kind(**copy.deepcopy(hparams))
    twin.on_load_checkpoint(checkpoint)
    twin.load_state_dict(checkpoint["state_dict"])
    return twin


def averages_for(target: NequIPLightningModule, source: Any) -> Dict[str, Any]:
    """Return entries of a state dictionary: averages of the weights of one training module as another has them.

    A weight that ``source`` lacks is its own average; without averages in ``source`` there are no entries.
    """
    if not hasattr(source, "ema"):
        return {}
    # NequIP numbers averages in the order of the weights.
    averages = {name: source.ema.ema_weights[i] for i, (name, _) in enumerate(source.model.named_parameters())}
    state = {"ema._extra_state": source.ema.get_extra_state()}
    for number, (name, value) in enumerate(target.model.named_parameters()):
        state[f"ema.ema_weight_{number}"] = averages.get(name, value).detach().clone()
    return state


def refuse_head(head: Optional[str]) -> None:
    """Raise `InputError` for a head: only models of MACE have them."""
    if head is not None:
        raise InputError(f"--head {head}: models of NequIP have no heads")


def refuse_conversion(dtype: str, wanted: Optional[str], path: Any) -> None:
    """Raise `InputError` for a precision other than the model's."""
    if wanted not in (None, dtype):
        raise InputError(f"--dtype {wanted}: models of NequIP cannot be converted, and {path} is {dtype}")


@contextmanager
def explained(path: Any) -> Iterator[None]:
    """Raise `InputError` for a checkpoint of another format, one that does not fit the model which the installed NequIP
    builds from its config (releases have different defaults), and for types that are no elements."""
    try:
        yield
    except FormatError as error:  # of a readout, which knows no path
        raise FormatError(f"{path}:", error.reason) from error
    except ValueError as error:
        if "chemical symbol" not in str(error):
            raise
        raise InputError(
            f"{path}: the model has types that are no elements ({error}), and the file does not tell which atoms are "
            "of which; checkpoints do, and E2IPCalculator takes a chemical_species_to_atom_type_map"
        ) from error
    except RuntimeError as error:
        if "state_dict" not in str(error):
            raise
        checkpoint = torch.load(path, map_location="cpu", weights_only=False)
        saved = checkpoint["hyper_parameters"]["info_dict"].get("versions", {}).get("nequip")
        here = installed("nequip")
        if saved in (None, here):
            raise
        raise InputError(
            f"{path}: was written with NequIP {saved}, and NequIP {here}, which is installed, makes another model of "
            f"the config in it: use NequIP {saved}, or package it there (nequip-package) and take the package"
        ) from error


def store(path: str, fitted: Dict[str, Leverage]) -> None:
    """Write leverages into a checkpoint file; nothing else in it changes."""
    checkpoint = torch.load(path, map_location="cpu", weights_only=False)
    for prefix, leverage in fitted.items():
        checkpoint["state_dict"].update({prefix + name: value for name, value in leverage.state_dict().items()})
    save(checkpoint, path)
