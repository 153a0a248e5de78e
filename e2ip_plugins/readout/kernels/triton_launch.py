"""The calls of the kernels of this folder: one prediction, and MACE's envelope of pairs."""

import functools
from typing import Any, Dict, Optional, Sequence, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from e2ip_plugins.maths.kernels import triton_launch
from e2ip_plugins.maths.kernels.constants import Constants
from e2ip_plugins.readout.kernels.triton_kernels import (
    SUMS,
    atom_kernel,
    envelope_kernel,
    neighbour_kernel,
    pair_kernel,
)
from e2ip_plugins.readout.kernels.triton_outputs import output_kernel

#: Version of the signatures in this module: a packaged model may bring callers from another version.
SIGNATURES = 3

#: Pairs and, in the last kernel, atoms per program.
BLOCK = 128
#: Numbers of a matrix that a program has at once, 16 for each of its threads; columns of the trunk's.
_AT_ONCE, _CHUNK = 2048, 64

_TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}


@functools.lru_cache(maxsize=64)
def columns(blocks: Tuple[Tuple[int, int], ...], dim: int, components_first: bool, device: torch.device) -> Tensor:
    """Return the columns (C · dim,) of the channels of an irrep, component by component of each channel."""
    listed = []
    for start, channels in blocks:
        block = torch.arange(start, start + channels * dim)
        listed.append(block.view(dim, channels).t().flatten() if components_first else block)
    return torch.cat(listed).to(device, torch.int32) if listed else torch.zeros(1, dtype=torch.int32, device=device)


def atom_constants(flags: Dict[str, Any]) -> Dict[str, Any]:
    """Return what `atom_kernel` is compiled for."""
    features_2 = triton.next_power_of_2(flags["features"])
    coupled, (s_knee, s_ceiling), _ = flags["map"]
    padded = ("hidden", "channels", "pooled", "vectors", "tensors")
    return {
        **{f"{name.upper()}_2": triton.next_power_of_2(flags[name]) if flags[name] else 0 for name in padded},
        "HEADS": flags["heads"], "HIDDEN": flags["hidden"], "WANTED": 3, "CHANNELS": flags["channels"],
        "TENSORS": flags["pooled"] > 0 or flags["tensors"] > 0, "POOLED": flags["pooled"],
        "SENDERS": flags["own_senders"], "NEAREST": flags["nearest"], "FARTHEST": flags["farthest"],
        "REGION_POWER": flags["region_power"], "MOST": flags["max_leverage"], "MAX_RATIO": flags["max_ratio"],
        "S_KNEE": s_knee, "S_CEILING": s_ceiling, "COUPLED": coupled, "AROUND_POWER": flags["around_power"],
        "FEATURES_2": features_2, "ROWS": max(1, _AT_ONCE // features_2), "CHUNK": min(_CHUNK, features_2),
    }  # fmt: skip


def pair_constants(flags: Dict[str, Any]) -> Dict[str, Any]:
    """Return what `pair_kernel` is compiled for."""
    pooled = flags["pooled"]
    of_pool = {"POOLED": pooled, "POOLED_2": triton.next_power_of_2(pooled) if pooled else 0}
    return {**of_pool, "TOUCHING": flags["touching"], "BLOCK": BLOCK}


def output_constants(flags: Dict[str, Any], double: bool) -> Dict[str, Any]:
    """Return what `output_kernel` is compiled for."""
    names = (
        "heads pooled local grows blocks touching unfitted remote linear reach_of_training near_weight "
        "around_power around_share anisotropy evidence max_ratio energy_factor per_component energy_power"
    )
    of_map = triton_launch.fixed(Constants(*flags["map"]), double)
    chosen = {name.upper(): flags[name] for name in names.split()}
    return {**of_map, **chosen, "MOST": flags["max_leverage"], "BLOCK": BLOCK}


def predict(tensors: Dict[str, Any], flags: Dict[str, Any]) -> Dict[str, Tensor]:
    """Return all outputs of atoms, with ``whitened`` (N, D) and, where asked for, ``weights`` (blocks, N) of energies.

    Parameters
    ----------
    tensors : dict of Tensor or None
        Those that `e2ip_plugins.readout.kernels.fused` names.
    flags : dict
        Numbers and options, likewise.
    """
    x = tensors["invariant"]
    n, dtype = x.shape[0], _TYPES[x.dtype]
    out = torch.float64 if flags["double_outputs"] else x.dtype
    like: Dict[str, Any] = {"dtype": out, "device": x.device}
    pooled = max(1, flags["pooled"])
    kept = {"coefficients": torch.empty(n, 8, **like), "whitened": x.new_empty(n, flags["features"])}
    kept |= {"leverage": x.new_empty(n), "powers": x.new_empty(n)}
    kept |= {"sums": x.new_empty(n, SUMS.value), "receivers": x.new_empty(n, pooled)}
    senders = tensors["senders"]
    kept["senders"] = x.new_empty(n, pooled) if senders is None else senders
    # The interpreter takes no tensors with a graph.
    everything = {
        name: x.detach() if x is not None and x.requires_grad else x for name, x in {**tensors, **kept}.items()
    }

    def of(names: str) -> Sequence[Optional[Tensor]]:
        return [everything[name] for name in names.split()]

    inputs = of(
        "invariant columns equivariant vector_columns tensor_columns species heads hidden hidden_bias out out_bias "
        "mix_vectors mix_tensors from_sender from_sender_bias centres axes whitening region_stretch region_offsets "
        "region_norms force_unit log_variance coefficients whitened leverage powers sums senders receivers"
    )
    sizes = [x.stride(0), tensors["equivariant"].stride(0)]
    sizes += [flags[name] for name in ("features", "vectors", "tensors", "axes", "regions", "species_per_head")]
    triton_launch.start(atom_kernel, n, (*inputs, *sizes), {**atom_constants(flags), "DTYPE": dtype})
    _sum_over_pairs(of, tensors, flags, dtype)
    outputs = _outputs(of, n, flags, like)
    outputs["e2ip_coefficients"], outputs["whitened"] = kept["coefficients"], kept["whitened"]
    return outputs


#: The same for readouts with an edge pool, whose kernels are others: each has its own trial.
predict_pooled = predict


def _sum_over_pairs(of: Any, tensors: Dict[str, Any], flags: Dict[str, Any], dtype: Any) -> None:
    pairs = tensors["lengths"].shape[0]
    programs = triton.cdiv(pairs, BLOCK)
    inputs = of("lengths envelope sender receiver vectors radial from_radial senders receivers sums")
    radial, vectors = tensors["radial"], tensors["vectors"]
    sizes = [pairs, 0, 0, 0] if radial is None else [pairs, radial.shape[1], vectors.stride(0), radial.stride(0)]
    triton_launch.start(pair_kernel, programs, (*inputs, *sizes), {**pair_constants(flags), "DTYPE": dtype})
    if not flags["local"]:
        inputs = of("lengths envelope sender receiver leverage powers sums")
        fixed = {"MOST": flags["max_leverage"], "TOUCHING": flags["touching"], "BLOCK": BLOCK, "DTYPE": dtype}
        triton_launch.start(neighbour_kernel, programs, (*inputs, pairs), fixed)


def _outputs(of: Any, n: int, flags: Dict[str, Any], like: Dict[str, Any]) -> Dict[str, Tensor]:
    def new(*shape: int) -> Tensor:
        return torch.empty(n, *shape, **like)

    outputs = {"e2ip_log_sigma0": new(6), "e2ip_sigma0": new(3, 3), "e2ip_nu": new(), "e2ip_kappa": new()}
    outputs |= {"e2ip_plateau": new(), "forces_cov": new(3, 3), "forces_aleatoric_cov": new(3, 3)}
    outputs |= {"forces_epistemic_cov": new(3, 3), "forces_uncertainty": new(3), "forces_epistemic_std": new()}
    outputs["e2ip_leverage"] = new()
    (whitened,) = of("whitened")
    outputs["weights"] = whitened.new_empty(flags["blocks"], n)
    inputs = of(
        "leverage powers sums species heads growth surplus log_variance log_factor fitted force_unit floors "
        "lengths_of_energies coefficients"
    )
    double = like["dtype"] == torch.float64
    fixed = {**output_constants(flags, double), "DTYPE": _TYPES[like["dtype"]]}
    arguments = (*inputs, *outputs.values(), n, flags["species_per_head"])
    triton_launch.start(output_kernel, triton.cdiv(n, BLOCK), arguments, fixed)
    return outputs


def envelope(lengths: Tensor, cutoff: Tensor, power: Tensor) -> Tensor:
    """Return the polynomial envelope of pairs, in the shape of their lengths."""
    lengths, result = lengths.contiguous(), torch.empty_like(lengths, memory_format=torch.contiguous_format)
    n = lengths.numel()
    arguments = (lengths, cutoff, power, result, n)
    triton_launch.start(envelope_kernel, triton.cdiv(n, BLOCK), arguments, {"BLOCK": BLOCK})
    return result
