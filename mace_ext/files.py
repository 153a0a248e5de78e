"""``.model`` files of `mace_run_train`: opened with a check of what they are."""

import warnings
from pathlib import Path
from typing import Any, Optional

import torch
from mace.modules import models

from e2ip_plugins.errors import InputError


def open_file(path: Path, device: str = "cpu") -> Any:
    """A stock or an e²IP `ScaleShiftMACE`; `InputError` for anything else."""
    try:
        with warnings.catch_warnings():
            # That it is a TorchScript file is said below.
            warnings.filterwarnings("ignore", message=".*TorchScript archive", category=UserWarning)
            net = torch.load(path, map_location=device, weights_only=False)
    except InputError:
        raise
    # Unpickling lets whatever goes wrong inside it through.
    except Exception as error:
        raise InputError(f"{path}: is not a model file of mace_run_train ({type(error).__name__}: {error})") from error
    if isinstance(net, torch.jit.ScriptModule):
        raise InputError(f"{path}: is a TorchScript file; give the .model file that was written with it")
    if not isinstance(net, models.ScaleShiftMACE):
        raise InputError(f"{path}: is a {type(net).__name__}; only ScaleShiftMACE models have readouts")
    if not hasattr(net, "heads"):  # published before MACE had any
        net.heads = ["Default"]
    return net


def choose_head(path: Path, net: Any, head: Optional[str]) -> str:
    """The head that is wanted, or the only one; `InputError` where it is none or there are more."""
    if head is None and len(net.heads) == 1:
        return net.heads[0]
    if head is None or head not in net.heads:
        problem = f"has {len(net.heads)} heads" if head is None else f"has no head '{head}'"
        raise InputError(f"{path}: {problem}; give --head, one of: {', '.join(net.heads)}")
    return head
