"""A MACE model run over frames for ``e2ip select``: its readout sees the features."""

from pathlib import Path
from typing import Iterator, Optional, Sequence

import torch

from e2ip_plugins.errors import InputError
from e2ip_plugins.fitting.features import Passes
from e2ip_plugins.predictions.labelled import Frame
from mace_ext.fitting.fit import Graphs, check_species, in_order
from mace_ext.model.files import choose_head, open_file, precision_of
from mace_ext.model.readout import find_readout


def open_passes(path: Path, *, head: Optional[str] = None, device: str = "cpu", batch_size: int = 10) -> Passes:
    """A ``.model`` file with a readout; `InputError` for others, and unknown heads."""
    net = open_file(path, device).eval().requires_grad_(False)
    readout, own_head = find_readout(net), choose_head(path, net, head)
    if readout is None:
        raise InputError(f"{path}: has no readout of e2ip-plugins; e2ip fit gives it one")

    def run(frames: Sequence[Frame], forces: bool) -> Iterator[Optional[torch.Tensor]]:
        check_species(net, frames)
        with precision_of(net):
            for batch in in_order(Graphs(frames, net, own_head), batch_size):
                inputs = batch.to(device).to_dict()
                if forces:
                    yield net(inputs, compute_force=True)["forces"].detach()
                else:
                    with torch.no_grad():
                        net.uncertainty_outputs(inputs)
                    yield None

    return Passes(str(path), readout, run)
