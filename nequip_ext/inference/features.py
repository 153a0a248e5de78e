"""A NequIP model run over frames for ``e2ip select``: its readout is given the features."""

from pathlib import Path
from typing import Iterator, Optional, Sequence

import torch
from nequip.data import AtomicDataDict

from e2ip_plugins.fitting.features import Passes
from e2ip_plugins.predictions.labelled import Frame
from nequip_ext.fitting.passes import Graphs, forces_of, in_order, run_features
from nequip_ext.inference.batches import open_model
from nequip_ext.model.elements import types_of
from nequip_ext.model.readout import find_readout


def open_passes(path: Path, *, head: Optional[str] = None, device: str = "cpu", batch_size: int = 10) -> Passes:
    """Return passes of a checkpoint or package with a readout; `InputError` for others."""
    model = open_model(path, device=device, head=head).model
    types = types_of(path)

    def run(frames: Sequence[Frame], forces: bool) -> Iterator[Optional[torch.Tensor]]:
        for batch in in_order([Graphs(frames, model, types)], batch_size):
            batch = AtomicDataDict.to_(batch, torch.device(device))
            yield forces_of(model, batch) if forces else run_features(model, batch)

    return Passes(str(path), find_readout(model), run)
