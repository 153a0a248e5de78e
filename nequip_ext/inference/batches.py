"""A checkpoint, package or compiled file for ``e2ip evaluate`` and ``e2ip select``: batches of any frames."""

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Optional, Sequence, Tuple, Type

import torch
from ase import Atoms
from nequip.data import AtomicDataDict, from_ase
from nequip.model.inference_models import load_compiled_model
from nequip.model.saved_models.load_utils import load_saved_model
from nequip.nn import graph_model
from nequip.utils.global_state import set_global_state
from torch import Tensor

from e2ip_plugins import families
from e2ip_plugins.active.features import FeatureModel, required_readout
from e2ip_plugins.errors import InputError
from e2ip_plugins.evaluation.options import Cluster
from e2ip_plugins.evaluation.own_atoms import own_vector
from e2ip_plugins.families.interface import Family
from e2ip_plugins.fitting.batches import in_order
from e2ip_plugins.fitting.force_errors import last_call_of
from e2ip_plugins.keys import ENERGY_ERROR_VECTOR, FRAME_OUTPUTS, LEVERAGE
from e2ip_plugins.predictions.labelled import LabelledFrame
from e2ip_plugins.readout.gradient import feature_gradient
from e2ip_plugins.readout.readout import unfitted, vector_length
from nequip_ext.compat import IS_0_16
from nequip_ext.fitting.passes import Graphs, batching, forces_of, run_features
from nequip_ext.inference.gradient import uncertainty_gradient
from nequip_ext.model.checkpoints import explained, refuse_conversion, refuse_head
from nequip_ext.model.elements import Types, by_element, types_of
from nequip_ext.model.inputs import inputs_of, transforms_of
from nequip_ext.model.readout import find_name, find_readout


@dataclass
class Batches:
    """What `e2ip_plugins.evaluation.options.BatchModel` asks for.

    Parameters
    ----------
    model : torch.nn.Module
        Eager or compiled.
    species : sequence of str
    transforms : list of callable
        From NequIP's dictionary of a frame to one with types and neighbours, on the CPU.
    family : subclass of Family, optional
        Of the readout.
    dtype, device : str
    cutoff : float
        In Å.
    one_by_one : bool
        Whether the model takes a frame at a time.
    """

    model: torch.nn.Module
    species: Sequence[str]
    transforms: Sequence[Callable]
    family: Optional[Type[Family]]
    dtype: str
    device: str
    cutoff: float
    one_by_one: bool = False
    reads: Sequence[str] = ()

    def __post_init__(self) -> None:
        readout = find_readout(self.model)
        self.warning, self.uq_model = unfitted(readout), find_name(self.model)
        self.strictly_local = readout is not None and readout.leverage.strictly_local
        self.vector_length = vector_length(readout)

    def graph(self, atoms: Atoms) -> Tuple[AtomicDataDict.Type, int]:
        """Return NequIP's dictionary of a frame, and its number of edges."""
        data = from_ase(atoms)
        for transform in self.transforms:
            data = transform(data)
        return data, AtomicDataDict.num_edges(data)

    def evaluate(self, graphs: Sequence[AtomicDataDict.Type], stress: bool) -> Dict[str, Tensor]:
        """Return the results of a batch."""
        batches = [[graph] for graph in graphs] if self.one_by_one else [list(graphs)]
        results = [self._evaluate(AtomicDataDict.batched_from_list(batch), stress) for batch in batches]
        return {name: torch.cat([part[name] for part in results]) for name in results[0]}

    def _evaluate(self, data: AtomicDataDict.Type, stress: bool) -> Dict[str, Tensor]:
        assert self.family is not None
        output = self.model(AtomicDataDict.to_(dict(data), torch.device(self.device)))
        results = {
            "energy": output[AtomicDataDict.TOTAL_ENERGY_KEY].reshape(-1),
            "forces": output[AtomicDataDict.FORCE_KEY],
        }
        if stress and AtomicDataDict.STRESS_KEY in output:
            results["stress"] = output[AtomicDataDict.STRESS_KEY].reshape(-1, 3, 3)
        return {**{name: value.detach() for name, value in results.items()}, **self._uncertainties(output)}

    def _uncertainties(self, output: AtomicDataDict.Type) -> Dict[str, Tensor]:
        assert self.family is not None
        # Outputs of compiled files do not say how many frames there are.
        keys, frames = (*self.family.output_keys(), LEVERAGE), len(output[AtomicDataDict.TOTAL_ENERGY_KEY])
        results = {key.name: output[key.name].reshape(-1, *key.shape) for key in keys}
        of_frames = [key for key in FRAME_OUTPUTS if key.name in output]
        results.update({key.name: output[key.name].reshape(frames, *key.shape) for key in of_frames})
        return {name: value.detach() for name, value in results.items()}

    def uncertainties(self, graphs: Sequence[AtomicDataDict.Type], own: Optional[int] = None) -> Dict[str, Tensor]:
        """Return the uncertainties of a batch; energies and forces are not computed."""
        model, data = self._eager(), AtomicDataDict.batched_from_list(list(graphs))
        readout = find_readout(model)
        assert readout is not None
        with torch.no_grad(), last_call_of(readout) as call:
            output = model.model.func(inputs_of(model, AtomicDataDict.to_(data, torch.device(self.device))))
            results = self._uncertainties(output)
            if own is not None:
                results[ENERGY_ERROR_VECTOR.name] = own_vector(readout, call, own)
        return results

    def cluster(self, graph: AtomicDataDict.Type, count: int) -> Cluster:
        """Return energy, forces and virial of the first atoms of a frame that is not periodic."""
        model, data = self._eager(), AtomicDataDict.batched_from_list([graph])
        inputs = inputs_of(model, AtomicDataDict.to_(data, torch.device(self.device)))
        positions = inputs[AtomicDataDict.POSITIONS_KEY].requires_grad_(True)
        with torch.enable_grad():
            energies = model.model.func(inputs)[AtomicDataDict.PER_ATOM_ENERGY_KEY].reshape(-1)
            return Cluster.of(energies, positions, count)

    def feature_gradient(self, graph: AtomicDataDict.Type) -> Tensor:
        """Return the gradient of the first atom's invariant features."""
        model, readout = self._eager(), find_readout(self.model)
        assert readout is not None
        data = AtomicDataDict.to_(AtomicDataDict.batched_from_list([graph]), torch.device(self.device))
        return feature_gradient(readout, lambda value: uncertainty_gradient(model, data, value))

    def _eager(self) -> Any:
        if not isinstance(self.model, graph_model.GraphModel):
            raise InputError("a compiled file gives uncertainties with forces alone: open the checkpoint or package")
        return self.model


def open_model(path: Path, *, device: str = "cpu", dtype: Optional[str] = None, head: Optional[str] = None) -> Batches:
    """Open a checkpoint, package or compiled file, with a readout or without.

    Parameters
    ----------
    path : Path
        ``….ckpt``, ``….nequip.zip``, or ``….nequip.pt2`` of a target ``<readout>_batch`` or ``<readout>_ase``; the
        latter takes one frame at a time.
    device : str
    dtype, head : str, optional
        For MACE. Models of NequIP have their precision and no heads: errors here, unless it is the model's.

    Raises
    ------
    InputError
        For those, files of another kind, and compiled models for another device.
    """
    refuse_head(head)
    opened = _compiled(path, device) if path.suffix == ".pt2" else _saved(path, device)
    refuse_conversion(opened.dtype, dtype, path)
    return opened


def open_passes(path: Path, *, head: Optional[str] = None, device: str = "cpu", batch_size: int = 10) -> FeatureModel:
    """Open a checkpoint or package for passes over features; `InputError` for models without a readout."""
    model = open_model(path, device=device, head=head).model
    types = types_of(path)

    def run(frames: Sequence[LabelledFrame], forces: bool) -> Iterator[Optional[Tensor]]:
        for batch in in_order([Graphs(frames, model, types)], batching(batch_size)):
            batch = AtomicDataDict.to_(batch, torch.device(device))
            if not forces:
                run_features(model, batch)
            yield forces_of(model, batch) if forces else None

    return FeatureModel(str(path), required_readout(find_readout(model), path), run)


def of_model(model: graph_model.GraphModel, device: str = "cpu", types: Types = True) -> Batches:
    """Return batches of an eager model, with a readout or without; ``types`` are the model's by element."""
    readout = find_readout(model)
    family = None if readout is None else families.get(readout.settings.family)
    dtype = model.metadata[graph_model.MODEL_DTYPE_KEY]
    names = list(model.type_names)
    known = by_element(types, names)
    frozen, cutoff = model.to(device).eval().requires_grad_(False), float(model.metadata[graph_model.R_MAX_KEY])
    return Batches(frozen, list(known), transforms_of(model.metadata, names, known), family, dtype, device, cutoff)


@contextmanager
def _openable(path: Path, kind: str) -> Iterator[None]:
    """Raise `InputError` for a file that cannot be opened: unpickling and unpacking raise whatever goes wrong."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"{path}: cannot be opened as {kind} of NequIP ({reason})") from error


def _saved(path: Path, device: str) -> Batches:
    with _openable(path, "a model"), explained(path):
        set_global_state(allow_tf32=False)
        return of_model(load_saved_model(str(path)), device, types_of(path))


def _compiled(path: Path, device: str) -> Batches:
    if IS_0_16:
        raise InputError(f"{path}: NequIP 0.16 opens compiled models for ASE alone: give the checkpoint or a package")
    # The message also names the device that the model was compiled for.
    with _openable(path, "a compiled model"):
        model, metadata = load_compiled_model(str(path), device)
    family = families.of_outputs(model.output_keys)
    if family is None:
        raise InputError(
            f"{path}: puts out no uncertainties: compile a model with a readout anew, with nequip-compile --target "
            f"{families.DEFAULT}_batch"
        )
    if AtomicDataDict.TOTAL_ENERGY_KEY not in model.output_keys:
        raise InputError(
            f"{path}: was compiled for LAMMPS: compile the model anew with nequip-compile --target {family.name}_batch"
        )
    names, dtype = metadata[graph_model.TYPE_NAMES_KEY], metadata[graph_model.MODEL_DTYPE_KEY]
    single = AtomicDataDict.BATCH_KEY not in model.input_keys
    with explained(path):
        transforms = transforms_of(metadata, names, by_element(True, names))
    cutoff = float(metadata[graph_model.R_MAX_KEY])
    return Batches(model, names, transforms, family, dtype, device, cutoff, single)
