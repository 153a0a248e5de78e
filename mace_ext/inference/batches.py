"""A ``.model`` file for ``e2ip evaluate``: batches of any frames, as `mace_eval_configs` makes them."""

from pathlib import Path
from typing import Any, Dict, Optional, Sequence, Tuple

import torch
from ase import Atoms
from mace import data
from mace.tools import AtomicNumberTable
from mace.tools.torch_geometric import Batch
from torch import Tensor

from e2ip_plugins.keys import LEVERAGE
from e2ip_plugins.readout.readout import unfitted
from mace_ext.model.files import choose_head, configuration, embedded, open_file, precision_of, species_of
from mace_ext.model.readout import find_family, find_name, find_readout


class Batches:
    """What `e2ip_plugins.evaluation.options.BatchModel` asks for."""

    def __init__(self, net: Any, device: str, head: str) -> None:
        self.net, self.device, self.head = net.to(device).eval().requires_grad_(False), device, head
        self.family = find_family(net)
        self.warning, self.uq_model = unfitted(find_readout(net)), find_name(net, head)
        self.heads, self.cutoff = list(net.heads), float(net.r_max)
        self.table = AtomicNumberTable([int(z) for z in net.atomic_numbers])
        self.species = species_of(net)
        self.reads = [key for keys in embedded(net) for key in keys.values()]
        self.dtype = str(next(net.parameters()).dtype).removeprefix("torch.")
        self._warm = False

    def graph(self, atoms: Atoms) -> Tuple[data.AtomicData, int]:
        """MACE's graph of a frame, and its number of edges."""
        config = configuration(atoms, self.net, self.head)
        with precision_of(self.net):
            graph = data.AtomicData.from_config(config, self.table, self.cutoff, self.heads)
        return graph, graph.edge_index.shape[1]

    def evaluate(self, graphs: Sequence[data.AtomicData], stress: bool) -> Dict[str, Tensor]:
        """Results of a batch."""
        with precision_of(self.net):
            batch = Batch.from_data_list(list(graphs)).to(self.device)
            if not self._warm:
                # TorchScript optimises after its first call, which differs from later ones in the last bit: a run that
                # goes on after a stop would differ from one that was not stopped.
                self.net(batch.to_dict(), compute_stress=stress)
                self._warm = True
            output = self.net(batch.to_dict(), compute_stress=stress)
        assert self.family is not None
        wanted = ["energy", "forces", *(["stress"] if stress else ())]
        keys = [key.name for key in (*self.family.output_keys(), LEVERAGE)]
        return {name: output[name].detach() for name in (*wanted, *keys)}


def open_model(path: Path, *, device: str = "cpu", dtype: Optional[str] = None, head: Optional[str] = None) -> Batches:
    """A ``.model`` file, with a readout or without.

    Parameters
    ----------
    device : str
    dtype : str, optional
        Precision to convert it to; default: its own.
    head : str, optional
        MACE head, needed where there are several.

    Raises
    ------
    InputError
        For other files, and heads that are not there.
    """
    net = open_file(path, device)
    return Batches(net if dtype is None else net.to(getattr(torch, dtype)), device, choose_head(path, net, head))
