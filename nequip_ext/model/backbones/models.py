"""Builders of PaiNN and AlphaNet, with NequIP's modules for lengths, scales and shifts, pair potential and forces."""

import functools
import inspect
import math
from typing import Any, Callable, Dict, List, Optional, Sequence, Union

import torch
from nequip.data import AtomicDataDict
from nequip.model.energy_modules import _append_energy_modules
from nequip.model.utils import model_builder
from nequip.nn import ApplyFactor, ForceStressOutput, PerTypeScaleShift, SequentialGraphNetwork
from nequip.nn.embedding import BesselEdgeLengthEncoding, EdgeLengthNormalizer, PolynomialCutoff

from e2ip_plugins.errors import InputError
from nequip_ext.model.backbones.alphanet import (
    EDGES_KEY,
    GATES_KEY,
    STATE_KEY,
    AlphaNetEmbedding,
    AlphaNetEnergies,
    AlphaNetMessage,
    AlphaNetMixing,
)
from nequip_ext.model.backbones.atoms import AtomicEnergies, TypeEmbedding
from nequip_ext.model.backbones.geometry import CosineCutoff, EdgeDirections, GaussianEncoding
from nequip_ext.model.backbones.layers import xavier_mlp
from nequip_ext.model.backbones.painn import PaiNNMessage, PaiNNMixing
from nequip_ext.model.backbones.phases import GROUPS, EdgePhases, PhaseState
from nequip_ext.model.compiler import mend

#: Energies of atoms per type, or one number for all.
PerType = Union[float, Dict[str, float], None]

PRESETS = ("default", "paper")

#: Options of every NequIP model.
_COMMON_OPTIONS = ("seed", "model_dtype", "compile_mode")

#: Options of what follows the network, with their defaults: scales and shifts, pair potential, forces.
_END_OPTIONS: Dict[str, Any] = {
    "per_type_energy_scales": None,
    "per_type_energy_shifts": None,
    "per_type_energy_scales_trainable": False,
    "per_type_energy_shifts_trainable": False,
    "pair_potential": None,
    "do_derivatives": True,
}


def _builder(function: Callable[..., Any]) -> Callable[..., Any]:
    build = model_builder(function)
    return functools.wraps(function)(lambda *args, **kwargs: mend(build(*args, **kwargs)))


@_builder
def PaiNNModel(
    r_max: float,
    type_names: Sequence[str],
    preset: str = "default",
    num_layers: int = 3,
    num_features: int = 128,
    num_radial: int = 20,
    avg_num_neighbors: Any = None,
    per_edge_type_cutoff: Optional[Dict[str, Union[float, Dict[str, float]]]] = None,
    **ends: Any,
) -> ForceStressOutput:
    """PaiNN (arXiv:2102.03150) as a NequIP model; see docs/howto/backbones.md.

    Parameters
    ----------
    seed, model_dtype, compile_mode
        As of every NequIP model.
    r_max : float
        Cutoff in Å.
    type_names : sequence of str
    preset : str
        ``default``: polynomial envelope, twice differentiable at the cutoff, and ε = 1e-6 in the norms of vectors;
        ``paper``: cosine envelope and ε = 1e-8.
    num_layers, num_features, num_radial : int
        Layers, channels F of scalars and of vectors, radial functions R.
    avg_num_neighbors
        Accepted as by other NequIP models, and not used: PaiNN's sums are not normalised.
    per_edge_type_cutoff : dict, optional
        As in NequIP's model.
    per_type_energy_scales, per_type_energy_shifts : float or dict, optional
        In eV.
    per_type_energy_scales_trainable, per_type_energy_shifts_trainable : bool
    pair_potential : dict, optional
        As in NequIP's model.
    do_derivatives : bool
        Whether forces and stresses are computed.

    Raises
    ------
    InputError
        For options out of range, and without torch-geometric.
    """
    counts = {"num_layers": num_layers, "num_features": num_features, "num_radial": num_radial}
    _check(PaiNNModel, preset, r_max, type_names, ends, counts)
    if num_features % 2:
        raise InputError(f"PaiNNModel: num_features is {num_features}: give an even number from 2 on")
    published = preset == "paper"
    modules = _Sequence({"type_embed": TypeEmbedding(list(type_names), num_features)})
    modules.add_geometry(r_max, list(type_names), per_edge_type_cutoff)
    modules.add_sines(num_radial, CosineCutoff() if published else PolynomialCutoff(6), math.pi / r_max)
    for layer in range(num_layers):
        modules.add(f"layer{layer}_message", PaiNNMessage, channels=num_features)
        epsilon = 1e-8 if published else 1e-6
        modules.add(f"layer{layer}_mixing", PaiNNMixing, channels=num_features, epsilon=epsilon)
    energies = xavier_mlp(num_features, num_features // 2, 1)
    modules.add("per_atom_energy_readout", AtomicEnergies, energies=energies, channels=num_features)
    return modules.with_ends(list(type_names), ends)


@_builder
def AlphaNetModel(
    r_max: float,
    type_names: Sequence[str],
    preset: str = "default",
    num_layers: int = 4,
    num_features: int = 128,
    num_radial: int = 64,
    num_phase_channels: int = 96,
    num_phases: int = 32,
    num_states: int = 32,
    phase_rank: int = 8,
    avg_num_neighbors: PerType = None,
    per_edge_type_cutoff: Optional[Dict[str, Union[float, Dict[str, float]]]] = None,
    **ends: Any,
) -> ForceStressOutput:
    """AlphaNet (arXiv:2501.07155) as a NequIP model, written from its equations alone; see docs/howto/backbones.md.

    Parameters
    ----------
    seed, model_dtype, compile_mode
        As of every NequIP model.
    r_max : float
        Cutoff in Å.
    type_names : sequence of str
    preset : str
        ``default``: everything vanishes smoothly at the cutoff, and phases have neither jumps nor poles; ``paper``:
        radial functions, mean neighbours, phases and states as published, which is not continuous at the cutoff.
        Both have squares where an L1 norm was published, which breaks rotations.
    num_layers, num_features, num_radial : int
        Layers, channels H of scalars and of vectors, radial functions R.
    num_phase_channels, num_phases, num_states, phase_rank : int
        X, χ₁, C and χ₂ of the complex channels.
    avg_num_neighbors : float or dict
        Mean number of neighbours, per type or of all; needed by ``default``.
    per_edge_type_cutoff, per_type_energy_scales, per_type_energy_shifts, per_type_energy_scales_trainable, \
    per_type_energy_shifts_trainable, pair_potential, do_derivatives
        As of `PaiNNModel`.

    Raises
    ------
    InputError
        For options out of range, and without torch-geometric.
    """
    sizes = {"num_features": num_features, "num_phase_channels": num_phase_channels}
    counts = {"num_layers": num_layers, "num_radial": num_radial, "num_phases": num_phases}
    counts.update(num_states=num_states, phase_rank=phase_rank, **sizes)
    _check(AlphaNetModel, preset, r_max, type_names, ends, counts)
    for option, size in sizes.items():
        if size % GROUPS:
            raise InputError(f"AlphaNetModel: {option} is {size}: give a multiple of {GROUPS}")
    published, types = preset == "paper", list(type_names)
    neighbours = None if published else _mean_neighbours(avg_num_neighbors, types)
    modules = _Sequence({"type_embed": TypeEmbedding(types, num_features, normalised=True)})
    modules.add_geometry(r_max, types, per_edge_type_cutoff)
    if published:
        modules.add("radial", GaussianEncoding, cutoff=CosineCutoff(), num_radial=num_radial, r_max=r_max)
    else:
        modules.add_sines(num_radial, PolynomialCutoff(6), 2.0 * math.pi / r_max**2, trainable=True)
    shape = {"num_types": len(types), "channels": num_features, "states": num_states}
    modules.add("embedding", AlphaNetEmbedding, mean_neighbours=neighbours, **shape)
    epsilon, epsilon_of_sums = (0.0, 1e-5) if published else (0.1, 1.0)
    for layer in range(num_layers):
        phases = EdgePhases(num_features, num_phase_channels, num_phases, phase_rank, epsilon)
        options = {"channels": num_features, "epsilon": epsilon_of_sums, "last": layer == num_layers - 1}
        modules.add(f"layer{layer}_message", AlphaNetMessage, phases=phases, **options)
        if not published:
            modules[f"layer{layer}_message"].start_larger()
        state = PhaseState(num_features, num_states, epsilon)
        modules.add(f"layer{layer}_mixing", AlphaNetMixing, channels=num_features, state=state)
    energies = AlphaNetEnergies(num_features, num_states)
    fields = {"beside": STATE_KEY, "drop": (EDGES_KEY, GATES_KEY)}
    modules.add("per_atom_energy_readout", AtomicEnergies, energies=energies, channels=num_features, **fields)
    return modules.with_ends(types, ends)


def _mean_neighbours(mean: PerType, type_names: List[str]) -> torch.Tensor:
    """Return the mean number of neighbours of every type (T, 1)."""
    by_type = mean if isinstance(mean, dict) else dict.fromkeys(type_names, mean)
    numbers = [float(by_type.get(name) or 0.0) for name in type_names]
    if not all(number > 0.0 for number in numbers):
        raise InputError(
            f"AlphaNetModel: avg_num_neighbors is {mean}, but preset default weighs neighbours by their mean number: "
            "give it, for example ${training_data_stats:num_neighbors_mean}"
        )
    return torch.tensor(numbers, dtype=torch.float64).unsqueeze(1)


class _Sequence(Dict[str, Any]):
    """Graph modules by name, in order."""

    def add(self, name: str, module: Any, **arguments: Any) -> None:
        """Append a module that takes the outputs of the last one."""
        self[name] = module(irreps_in=list(self.values())[-1].irreps_out, **arguments)

    def add_geometry(self, r_max: float, type_names: List[str], per_edge_type_cutoff: Any) -> None:
        """Append directions and reduced lengths x of edges."""
        self.add("directions", EdgeDirections)
        cutoffs = {"r_max": r_max, "type_names": type_names, "per_edge_type_cutoff": per_edge_type_cutoff}
        self.add("edge_norm", EdgeLengthNormalizer, **cutoffs)

    def add_sines(self, num_radial: int, cutoff: torch.nn.Module, factor: float, trainable: bool = False) -> None:
        """Append radial functions ``factor`` sin(nπx)/(πx), times the envelope."""
        self.add("radial", BesselEdgeLengthEncoding, num_bessels=num_radial, cutoff=cutoff, trainable=trainable)
        self.add("factor", ApplyFactor, in_field=AtomicDataDict.EDGE_EMBEDDING_KEY, factor=factor)

    def with_ends(self, type_names: List[str], options: Dict[str, Any]) -> ForceStressOutput:
        """Return the whole model, with NequIP's modules after the atomic energies; ``options`` are `_END_OPTIONS`."""
        options = {**_END_OPTIONS, **options}
        names = ("scales", "shifts", "scales_trainable", "shifts_trainable")
        fields = {name: AtomicDataDict.PER_ATOM_ENERGY_KEY for name in ("field", "out_field")}
        per_type = {name: options[f"per_type_energy_{name}"] for name in names}
        self.add("per_type_energy_scale_shift", PerTypeScaleShift, type_names=type_names, **fields, **per_type)
        sequence = _append_energy_modules(
            model=SequentialGraphNetwork(dict(self)), type_names=type_names, pair_potential=options["pair_potential"]
        )
        return ForceStressOutput(sequence, options["do_derivatives"])


def _check(
    builder: Any, preset: str, r_max: float, type_names: Sequence[str], ends: Dict[str, Any], counts: Dict[str, Any]
) -> None:
    """Raise `InputError` for options with which no model can be built."""
    name = builder.__name__
    unknown = ", ".join(option for option in ends if option not in _END_OPTIONS)
    if unknown:
        options = [option for option in inspect.signature(builder).parameters if option != "ends"]
        known = ", ".join(dict.fromkeys([*_COMMON_OPTIONS, *options, *_END_OPTIONS]))
        raise InputError(f"{name}: unknown option {unknown}; it has: {known}")
    if preset not in PRESETS:
        raise InputError(f"{name}: unknown preset '{preset}'; choose from: {', '.join(PRESETS)}")
    if not (isinstance(r_max, (int, float)) and 0.0 < r_max < math.inf):
        raise InputError(f"{name}: r_max is {r_max}: give the cutoff in Å")
    wrong = [str(type_name) for type_name in type_names if not str(type_name).isalnum()]
    if wrong or not len(type_names):
        raise InputError(f"{name}: type_names may have letters and digits only; found: {', '.join(wrong) or 'none'}")
    for option, count in counts.items():
        if not isinstance(count, int) or count < 1:
            raise InputError(f"{name}: {option} is {count}: give a whole number from 1 on")
