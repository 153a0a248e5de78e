"""A NequIP model run over frames for ``e2ip select``: its readout sees the features."""

from pathlib import Path
from typing import Iterator, Optional, Sequence

import torch

from e2ip_plugins.errors import InputError
from e2ip_plugins.fitting.features import Passes
from e2ip_plugins.predictions.labelled import Frame
from nequip_ext.fitting.passes import FrameBatches, forces_of, run_energies
from nequip_ext.inference.batches import open_model
from nequip_ext.model.elements import types_of
from nequip_ext.model.readout import find_readout


def open_passes(path: Path, *, head: Optional[str] = None, device: str = "cpu", batch_size: int = 10) -> Passes:
    """A checkpoint or package with a readout; `InputError` for others."""
    model = open_model(path, device=device, head=head).model
    readout = find_readout(model)
    if readout is None:
        raise InputError(f"{path}: has no readout of e2ip-plugins; e2ip fit gives it one")

    types = types_of(path)

    def run(frames: Sequence[Frame], forces: bool) -> Iterator[Optional[torch.Tensor]]:
        batches = FrameBatches(model, frames, device, batch_size, types)
        return (forces_of(model, data) for data in batches) if forces else run_energies(model, batches)

    return Passes(str(path), readout, run)
