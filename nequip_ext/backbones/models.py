"""Builders of the backbones, with NequIP's own ends: lengths, cutoffs, scales and shifts, pair potential, forces."""

import math
from typing import Any, Dict, List, Optional, Sequence, Union

from nequip.data import AtomicDataDict
from nequip.model.energy_modules import _append_energy_modules
from nequip.model.utils import model_builder
from nequip.nn import ApplyFactor, ForceStressOutput, PerTypeScaleShift, SequentialGraphNetwork
from nequip.nn.embedding import BesselEdgeLengthEncoding, EdgeLengthNormalizer, PolynomialCutoff

from e2ip_plugins.errors import InputError
from nequip_ext.backbones.atoms import AtomicEnergies, TypeEmbedding
from nequip_ext.backbones.geometry import CosineCutoff, EdgeDirections
from nequip_ext.backbones.layers import xavier_mlp
from nequip_ext.backbones.painn import PaiNNMessage, PaiNNMixing

#: Energies of atoms per type, or one number for all.
PerType = Union[float, Dict[str, float], None]

PRESETS = ("default", "paper")


@model_builder
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
    """PaiNN (arXiv:2102.03150) as a NequIP model; see docs/backbones.md.

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
        Taken as from other NequIP models, and not used: PaiNN's sums are not normalised.
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
    _check("PaiNNModel", preset, r_max, type_names, num_layers=num_layers, num_radial=num_radial)
    if num_features < 2 or num_features % 2:
        raise InputError(f"PaiNNModel: num_features is {num_features}: give an even number from 2 on")
    published = preset == "paper"
    modules = _Sequence({"type_embed": TypeEmbedding(list(type_names), num_features)})
    modules.add("directions", EdgeDirections)
    modules.add(
        "edge_norm",
        EdgeLengthNormalizer,
        r_max=r_max,
        type_names=type_names,
        per_edge_type_cutoff=per_edge_type_cutoff,
    )
    # sin(nπx) / r, times the envelope
    cutoff = CosineCutoff() if published else PolynomialCutoff(6)
    modules.add("radial", BesselEdgeLengthEncoding, num_bessels=num_radial, cutoff=cutoff)
    modules.add("factor", ApplyFactor, in_field=AtomicDataDict.EDGE_EMBEDDING_KEY, factor=math.pi / r_max)
    for layer in range(num_layers):
        modules.add(f"layer{layer}_message", PaiNNMessage, channels=num_features)
        epsilon = 1e-8 if published else 1e-6
        modules.add(f"layer{layer}_mixing", PaiNNMixing, channels=num_features, epsilon=epsilon)
    energies = xavier_mlp(num_features, num_features // 2, 1)
    modules.add("per_atom_energy_readout", AtomicEnergies, energies=energies, channels=num_features)
    return modules.with_ends(list(type_names), **ends)


class _Sequence(Dict[str, Any]):
    """Graph modules by name, in order."""

    def add(self, name: str, module: Any, **arguments: Any) -> None:
        """Append a module that takes what those before it put out."""
        self[name] = module(irreps_in=list(self.values())[-1].irreps_out, **arguments)

    def with_ends(
        self,
        type_names: List[str],
        per_type_energy_scales: PerType = None,
        per_type_energy_shifts: PerType = None,
        per_type_energy_scales_trainable: bool = False,
        per_type_energy_shifts_trainable: bool = False,
        pair_potential: Optional[Dict[str, Any]] = None,
        do_derivatives: bool = True,
    ) -> ForceStressOutput:
        """The whole model, from atomic energies on NequIP's own."""
        self.add(
            "per_type_energy_scale_shift",
            PerTypeScaleShift,
            type_names=type_names,
            field=AtomicDataDict.PER_ATOM_ENERGY_KEY,
            out_field=AtomicDataDict.PER_ATOM_ENERGY_KEY,
            scales=per_type_energy_scales,
            shifts=per_type_energy_shifts,
            scales_trainable=per_type_energy_scales_trainable,
            shifts_trainable=per_type_energy_shifts_trainable,
        )
        sequence = SequentialGraphNetwork(dict(self))
        sequence = _append_energy_modules(model=sequence, type_names=type_names, pair_potential=pair_potential)
        return ForceStressOutput(sequence, do_derivatives)


def _check(name: str, preset: str, r_max: float, type_names: Sequence[str], **counts: int) -> None:
    """`InputError` for what no model can be built with."""
    if preset not in PRESETS:
        raise InputError(f"{name}: unknown preset '{preset}'; choose from: {', '.join(PRESETS)}")
    if not (isinstance(r_max, (int, float)) and 0.0 < r_max < math.inf):
        raise InputError(f"{name}: r_max is {r_max}: give the cutoff in Å")
    wrong = [str(given) for given in type_names if not str(given).isalnum()]
    if wrong or not len(type_names):
        raise InputError(f"{name}: type_names may have letters and digits only; found: {', '.join(wrong) or 'none'}")
    for option, count in counts.items():
        if count < 1:
            raise InputError(f"{name}: {option} is {count}: give a number from 1 on")
