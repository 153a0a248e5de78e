"""A ``.model`` file for ``e2ip evaluate`` and ``e2ip select``: batches of frames."""

from pathlib import Path
from typing import Dict, Iterator, Optional, Sequence, Tuple

import torch
from ase import Atoms
from mace import data
from mace.modules import models
from mace.tools import AtomicNumberTable
from mace.tools.torch_geometric import Batch
from torch import Tensor

from e2ip_plugins.active.features import FeatureModel, required_readout
from e2ip_plugins.evaluation.options import Cluster
from e2ip_plugins.evaluation.own_atoms import own_vector
from e2ip_plugins.fitting.batches import in_order
from e2ip_plugins.fitting.force_errors import last_call_of
from e2ip_plugins.keys import ENERGY_ERROR_VECTOR, FRAME_OUTPUTS, LEVERAGE
from e2ip_plugins.predictions.labelled import LabelledFrame
from e2ip_plugins.readout.gradient import feature_gradient
from e2ip_plugins.readout.readout import unfitted, vector_length
from mace_ext.fitting.passes import Graphs, batching, forces_of, run_features
from mace_ext.inference.gradient import uncertainty_gradient
from mace_ext.model.files import choose_head, configuration, embedded, open_file, precision_of, species_of
from mace_ext.model.readout import find_family, find_name, find_readout


class Batches:
    """What `e2ip_plugins.evaluation.options.BatchModel` asks for."""

    def __init__(self, net: models.ScaleShiftMACE, device: str, head: str) -> None:
        self.net, self.device, self.head = net.to(device).eval().requires_grad_(False), device, head
        self.family = find_family(net)
        readout = find_readout(net)
        self.warning, self.uq_model = unfitted(readout), find_name(net, head)
        self.strictly_local = readout is not None and readout.leverage.strictly_local
        self.heads, self.cutoff = list(net.heads), float(net.r_max)
        self.vector_length = vector_length(readout, self.heads.index(head))
        self.table = AtomicNumberTable([int(z) for z in net.atomic_numbers])
        self.species = species_of(net)
        self.reads = [key for keys in embedded(net) for key in keys.values()]
        self.dtype = str(next(net.parameters()).dtype).removeprefix("torch.")
        self._warm = False

    def graph(self, atoms: Atoms) -> Tuple[data.AtomicData, int]:
        """Return MACE's graph of a frame, and its number of edges."""
        config = configuration(atoms, self.net, self.head)
        with precision_of(self.net):
            graph = data.AtomicData.from_config(config, self.table, self.cutoff, self.heads)
        return graph, graph.edge_index.shape[1]

    def evaluate(self, graphs: Sequence[data.AtomicData], stress: bool) -> Dict[str, Tensor]:
        """Return the results of a batch."""
        assert self.family is not None
        with precision_of(self.net):
            batch = Batch.from_data_list(list(graphs)).to(self.device)
            if not self._warm:
                # TorchScript optimises after its first call, which differs from later ones in the last bit: a run that
                # goes on after a stop would differ from one that was not stopped.
                self.net(batch.to_dict(), compute_stress=stress)
                self._warm = True
            output = self.net(batch.to_dict(), compute_stress=stress)
        names = ["energy", "forces", *(["stress"] if stress else ())]
        return {**{name: output[name].detach() for name in names}, **self._uncertainties(output)}

    def _uncertainties(self, output: Dict[str, Tensor]) -> Dict[str, Tensor]:
        assert self.family is not None
        names = [key.name for key in (*self.family.output_keys(), LEVERAGE)]
        names += [key.name for key in FRAME_OUTPUTS if key.name in output]
        return {name: output[name].detach() for name in names}

    def uncertainties(self, graphs: Sequence[data.AtomicData], own: Optional[int] = None) -> Dict[str, Tensor]:
        """Return the uncertainties of a batch; energies and forces are not computed."""
        readout = self.net.e2ip_readout
        with precision_of(self.net), torch.no_grad(), last_call_of(readout) as call:
            batch = Batch.from_data_list(list(graphs)).to(self.device)
            output = self._uncertainties(self.net.uncertainty_outputs(batch.to_dict()))
            if own is not None:
                output[ENERGY_ERROR_VECTOR.name] = own_vector(readout, call, own)
        return output

    def cluster(self, graph: data.AtomicData, count: int) -> Cluster:
        """Return energy, forces and virial of the first atoms of a frame that is not periodic."""
        with precision_of(self.net), torch.enable_grad():
            batch = Batch.from_data_list([graph]).to(self.device).to_dict()
            batch["positions"].requires_grad_(True)
            energies = self.net.host_forward(batch, compute_force=False)["node_energy"]
            return Cluster.of(energies, batch["positions"], count)

    def feature_gradient(self, graph: data.AtomicData) -> Tensor:
        """Return the gradient of the first atom's invariant features."""
        with precision_of(self.net):
            batch = Batch.from_data_list([graph]).to(self.device).to_dict()
            return feature_gradient(self.net.e2ip_readout, lambda value: uncertainty_gradient(self.net, batch, value))


def open_model(path: Path, *, device: str = "cpu", dtype: Optional[str] = None, head: Optional[str] = None) -> Batches:
    """Open a ``.model`` file, with a readout or without.

    Parameters
    ----------
    path : Path
    device : str
    dtype : str, optional
        Precision to convert it to; default: its own.
    head : str, optional
        MACE head, needed where there are several.

    Raises
    ------
    InputError
        For other files, and unknown heads.
    """
    net = open_file(path, device)
    return Batches(net if dtype is None else net.to(getattr(torch, dtype)), device, choose_head(path, net, head))


def open_passes(path: Path, *, head: Optional[str] = None, device: str = "cpu", batch_size: int = 10) -> FeatureModel:
    """Open a ``.model`` file for passes over features; `InputError` for unknown heads and models without a readout."""
    net = open_file(path, device).eval().requires_grad_(False)
    head = choose_head(path, net, head)

    def run(frames: Sequence[LabelledFrame], forces: bool) -> Iterator[Optional[Tensor]]:
        with precision_of(net):
            for batch in in_order([Graphs(frames, net, head)], batching(batch_size)):
                batch = batch.to(device)
                if not forces:
                    run_features(net, batch)
                yield forces_of(net, batch) if forces else None

    return FeatureModel(str(path), required_readout(find_readout(net), path), run)
