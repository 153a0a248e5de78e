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
from e2ip_plugins.leverage.module import Leverage
from nequip_ext.model.readout import graph_readouts


def leverages(pl_module: torch.nn.Module) -> Dict[str, Leverage]:
    """The leverage of every readout, by its prefix in the state dictionary; readouts packaged without one have none."""
    found = graph_readouts(pl_module).items()
    return {f"{name}.readout.leverage.": m.readout.leverage for name, m in found if hasattr(m.readout, "leverage")}


def rebuild(kind: Any, hparams: Dict[str, Any], checkpoint: Dict[str, Any]) -> NequIPLightningModule:
    """A training module, on the CPU and not compiled, as `ModelFromCheckpoint` would make it; the checkpoint is loaded
    already."""
    with override_model_compile_mode("eager"):
        twin = kind(**copy.deepcopy(hparams))
    twin.on_load_checkpoint(checkpoint)
    twin.load_state_dict(checkpoint["state_dict"])
    return twin


def averages_for(target: NequIPLightningModule, source: Any) -> Dict[str, Any]:
    """Entries of a training module's state dictionary: averages of its weights as another has them, by name, or its
    own weights where the other has none of a name; empty where the other averages nothing."""
    if not hasattr(source, "ema"):
        return {}
    # By number, in the order of the weights.
    numbers = {name: number for number, (name, _) in enumerate(source.model.named_parameters())}
    state = {"ema._extra_state": source.ema.get_extra_state()}
    for number, (name, value) in enumerate(target.model.named_parameters()):
        found = source.ema.ema_weights[numbers[name]] if name in numbers else value
        state[f"ema.ema_weight_{number}"] = found.detach().clone()
    return state


def refuse_head(head: Optional[str]) -> None:
    """`InputError` where somebody names one; MACE's models have them."""
    if head is not None:
        raise InputError(f"--head {head}: models of NequIP have no heads")


def refuse_conversion(own: str, wanted: Optional[str], path: Any) -> None:
    """`InputError` where somebody wants another precision than the model's own."""
    if wanted not in (None, own):
        raise InputError(f"--dtype {wanted}: models of NequIP cannot be converted, and {path} is {own}")


@contextmanager
def explained(path: Any) -> Iterator[None]:
    """`InputError` where a checkpoint does not fit into what the installed NequIP makes of the config in it, and where
    the types of a model are no elements.

    Releases have different defaults, and a checkpoint says no more than its config did.
    """
    try:
        yield
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
        found = installed("nequip")
        if saved in (None, found):
            raise
        raise InputError(
            f"{path}: was written with NequIP {saved}, and NequIP {found}, which is installed, makes another model of "
            f"the config in it: use NequIP {saved}, or package it there (nequip-package) and take the package"
        ) from error


def store(path: str, fitted: Dict[str, Leverage]) -> None:
    """Write leverages into a checkpoint file, and change nothing else in it."""
    checkpoint = torch.load(path, map_location="cpu", weights_only=False)
    for prefix, leverage in fitted.items():
        checkpoint["state_dict"].update({prefix + name: value for name, value in leverage.state_dict().items()})
    save(checkpoint, path)
