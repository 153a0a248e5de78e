"""A NequIP model run over frames for ``e2ip select``: its readout is given the features."""

from pathlib import Path
from typing import Iterator, Optional, Sequence

import torch
from nequip.data import AtomicDataDict

from e2ip_plugins.fitting.batches import in_order
from e2ip_plugins.fitting.features import Passes, required_readout
from e2ip_plugins.predictions.labelled import Frame
from nequip_ext.fitting.passes import Graphs, batching, forces_of, run_features
from nequip_ext.inference.batches import open_model
from nequip_ext.model.elements import types_of
from nequip_ext.model.readout import find_readout


def open_passes(path: Path, *, head: Optional[str] = None, device: str = "cpu", batch_size: int = 10) -> Passes:
    """Return passes of a checkpoint or package with a readout; `InputError` for others."""
    model = open_model(path, device=device, head=head).model
    types = types_of(path)

    def run(frames: Sequence[Frame], forces: bool) -> Iterator[Optional[torch.Tensor]]:
        for batch in in_order([Graphs(frames, model, types)], batching(batch_size)):
            batch = AtomicDataDict.to_(batch, torch.device(device))
            if not forces:
                run_features(model, batch)
            yield forces_of(model, batch) if forces else None

    return Passes(str(path), required_readout(find_readout(model), path), run)
