"""A MACE model run over frames for ``e2ip select``: its readout is given the features."""

from pathlib import Path
from typing import Iterator, Optional, Sequence

import torch

from e2ip_plugins.fitting.batches import in_order
from e2ip_plugins.fitting.features import Passes, required_readout
from e2ip_plugins.predictions.labelled import Frame
from mace_ext.fitting.passes import Graphs, batching, forces_of, run_features
from mace_ext.model.files import choose_head, open_file, precision_of
from mace_ext.model.readout import find_readout


def open_passes(path: Path, *, head: Optional[str] = None, device: str = "cpu", batch_size: int = 10) -> Passes:
    """Return passes of a ``.model`` file with a readout; `InputError` for others, and unknown heads."""
    net = open_file(path, device).eval().requires_grad_(False)
    head = choose_head(path, net, head)

    def run(frames: Sequence[Frame], forces: bool) -> Iterator[Optional[torch.Tensor]]:
        with precision_of(net):
            for batch in in_order([Graphs(frames, net, head)], batching(batch_size)):
                batch = batch.to(device)
                if not forces:
                    run_features(net, batch)
                yield forces_of(net, batch) if forces else None

    return Passes(str(path), required_readout(find_readout(net), path), run)
