"""A checkpoint, package or compiled file for ``e2ip evaluate``: batches of any frames."""

from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from ase import Atoms
from nequip.data import AtomicDataDict, from_ase
from nequip.model.inference_models import load_compiled_model
from nequip.model.saved_models.load_utils import load_saved_model
from nequip.nn import graph_model
from nequip.utils.global_state import set_global_state
from torch import Tensor

from e2ip_plugins import families
from e2ip_plugins.errors import InputError
from e2ip_plugins.keys import LEVERAGE
from e2ip_plugins.readout.readout import unfitted
from nequip_ext.compat import IS_0_16
from nequip_ext.model.checkpoints import explained, refuse_conversion, refuse_head
from nequip_ext.model.elements import Types, by_element, types_of
from nequip_ext.model.inputs import transforms_of
from nequip_ext.model.readout import find_name, find_readout


class Batches:
    """What `e2ip_plugins.evaluation.options.BatchModel` asks for.

    Parameters
    ----------
    model : torch.nn.Module
        Eager or compiled.
    species : sequence of str
    transforms : list of callable
        From NequIP's dictionary of a frame to one with types and neighbours, on the CPU.
    family : str or None
        Of the readout.
    one_by_one : bool
        Whether the model takes a frame at a time.
    """

    reads: Sequence[str] = ()

    def __init__(
        self,
        model: Any,
        species: Sequence[str],
        transforms: Sequence[Callable],
        family: Optional[str],
        dtype: str,
        device: str,
        one_by_one: bool = False,
    ) -> None:
        self.model, self.species, self.transforms, self.device = model, list(species), transforms, torch.device(device)
        self.family = None if family is None else families.get(family)
        self.dtype, self.one_by_one = dtype, one_by_one
        self.warning, self.uq_model = unfitted(find_readout(model)), find_name(model)

    def graph(self, atoms: Atoms) -> Tuple[AtomicDataDict.Type, int]:
        """NequIP's dictionary of a frame, and its number of edges."""
        data = from_ase(atoms)
        for transform in self.transforms:
            data = transform(data)
        return data, AtomicDataDict.num_edges(data)

    def evaluate(self, graphs: Sequence[AtomicDataDict.Type], stress: bool) -> Dict[str, Tensor]:
        """Results of a batch."""
        batches: List[AtomicDataDict.Type] = (
            list(graphs) if self.one_by_one else [AtomicDataDict.batched_from_list(list(graphs))]
        )
        found = [self._evaluate(batch, stress) for batch in batches]
        return {name: torch.cat([results[name] for results in found]) for name in found[0]}

    def _evaluate(self, data: AtomicDataDict.Type, stress: bool) -> Dict[str, Tensor]:
        output = self.model(AtomicDataDict.to_(dict(data), self.device))
        assert self.family is not None
        results = {
            "energy": output[AtomicDataDict.TOTAL_ENERGY_KEY].reshape(-1),
            "forces": output[AtomicDataDict.FORCE_KEY],
        }
        if stress and AtomicDataDict.STRESS_KEY in output:
            results["stress"] = output[AtomicDataDict.STRESS_KEY].reshape(-1, 3, 3)
        for key in self.family.output_keys():
            results[key.name] = output[key.name].reshape(-1, *key.shape)
        if LEVERAGE.name in output:  # not in what was saved before there was one
            results[LEVERAGE.name] = output[LEVERAGE.name].reshape(-1)
        return {name: value.detach() for name, value in results.items()}


def open_model(path: Path, *, device: str = "cpu", dtype: Optional[str] = None, head: Optional[str] = None) -> Batches:
    """A checkpoint, package or compiled file, with a readout or without.

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


def of_model(model: Any, device: str = "cpu", types: Types = True) -> Batches:
    """An eager ``GraphModel``, with a readout or without, and its types by element."""
    readout = find_readout(model)
    family = None if readout is None else readout.settings.family
    dtype = model.metadata[graph_model.MODEL_DTYPE_KEY]
    names = list(model.type_names)
    known = by_element(types, names)
    frozen = model.to(device).eval().requires_grad_(False)
    return Batches(frozen, list(known), transforms_of(model.metadata, names, known), family, dtype, device)


def _saved(path: Path, device: str) -> Batches:
    try:
        set_global_state(allow_tf32=False)
        with explained(path):
            return of_model(load_saved_model(str(path)), device, types_of(path))
    except InputError:
        raise
    # Unpickling and unpacking let whatever goes wrong in them through.
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"{path}: cannot be opened as a model of NequIP ({reason})") from error


def _compiled(path: Path, device: str) -> Batches:
    if IS_0_16:
        raise InputError(f"{path}: NequIP 0.16 opens compiled models for ASE alone: give the checkpoint or a package")
    try:
        model, metadata = load_compiled_model(str(path), device)
    # Its loader, too, and it names the device that it was compiled for.
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"{path}: cannot be opened as a compiled model of NequIP ({reason})") from error
    found = families.of_outputs(model.output_keys)
    if found is None:
        raise InputError(
            f"{path}: puts out no uncertainties: compile a model with a readout anew, with nequip-compile --target "
            f"{families.DEFAULT}_batch"
        )
    if AtomicDataDict.TOTAL_ENERGY_KEY not in model.output_keys:
        raise InputError(
            f"{path}: was compiled for LAMMPS: compile the model anew with nequip-compile --target {found.name}_batch"
        )
    names, dtype = metadata[graph_model.TYPE_NAMES_KEY], metadata[graph_model.MODEL_DTYPE_KEY]
    single = AtomicDataDict.BATCH_KEY not in model.input_keys
    with explained(path):
        transforms = transforms_of(metadata, names, by_element(True, names))
    return Batches(model, names, transforms, found.name, dtype, device, single)
