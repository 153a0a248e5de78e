"""When the readout predicts with the kernels of this folder, and what it hands to them.

That is on CUDA (or in Triton's interpreter), where ``E2IP_KERNEL`` chooses Triton, for family ``e2ip``, where nothing
traces or differentiates the call and deterministic algorithms are not asked for. Everything else takes the plain form.
"""

import functools
import importlib
from typing import Any, Dict, Optional, Sequence, Tuple

import torch
from torch import Tensor

from e2ip_plugins.leverage.form import FORM, reach_of_training
from e2ip_plugins.leverage.module import Neighbours
from e2ip_plugins.maths.kernels import paths
from e2ip_plugins.readout.layout import Edges, count

#: Those of `triton_launch` that this file calls.
_SIGNATURES = 3

#: Channels of an irrep that a program has at once.
MAX_CHANNELS = 1024


# By name, as in `paths`.
@functools.cache
def _launchers() -> Any:
    """Return the module `triton_launch`, None where it does not fit; it needs Triton."""
    launchers = importlib.import_module("e2ip_plugins.readout.kernels.triton_launch")
    return launchers if getattr(launchers, "SIGNATURES", None) == _SIGNATURES else None


def _failure(kernel: str, device: torch.device, dtype: torch.dtype) -> Optional[Exception]:
    if _launchers() is None:
        return ImportError("this model was packaged with another version of e2ip-plugins")
    return importlib.import_module("e2ip_plugins.readout.kernels.trial").failure(_launchers(), kernel, device, dtype)


def _chosen(like: Tensor, kernel: str) -> bool:
    """Whether a kernel is to be used for a tensor."""
    if like.device.type not in paths.TRITON_DEVICES and not paths.interpreted():
        return False
    if like.dtype not in (torch.float32, torch.float64) or torch.are_deterministic_algorithms_enabled():
        return False
    return paths.choose(like.device, like.dtype, (kernel,), failure=_failure) == "triton"


def _recorded(tensors: Sequence[Optional[Tensor]]) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def polynomial_envelope(lengths: Tensor, cutoff: Tensor, power: Tensor) -> Optional[Tensor]:
    """Return the polynomial envelope of pairs with exponents from ``power`` on; None: to be computed in another way."""
    if _recorded([lengths]) or paths.tracer_of([lengths]) != paths.NOT_TRACED or cutoff.dtype != lengths.dtype:
        return None
    return _launchers().envelope(lengths, cutoff, power) if _chosen(lengths, "envelope") else None


def predict(
    readout: Any,
    invariant: Tensor,
    equivariant: Tensor,
    species: Tensor,
    neighbours: Optional[Neighbours],
    edges: Optional[Edges],
    node_heads: Optional[Tensor],
    energies: bool,
) -> Optional[Dict[str, Tensor]]:
    """Return all outputs of atoms, as `e2ip_plugins.readout.readout.Readout.forward`; None: not with these kernels.

    With ``whitened`` (N, D) and, for ``energies``, ``weights`` (blocks, N) of atoms in error vectors.
    """
    if readout.family_name != "e2ip" or neighbours is None or (readout.has_pool and edges is None):
        return None
    # `last_call_of` (in a fit) has hooked the leverage, whose `forward` the kernels leave out: the plain form.
    if readout.leverage._forward_hooks or paths.tracer_of([invariant]) != paths.NOT_TRACED:
        return None
    if not _chosen(invariant, "predict_pooled" if readout.has_pool else "predict"):
        return None
    tensors, flags = inputs(readout, invariant, equivariant, species, neighbours, edges, node_heads, energies)
    channels = max(flags["features"], flags["vectors"], flags["tensors"])
    if _recorded(list(tensors.values())) or channels > MAX_CHANNELS or (flags["heads"] > 1 and node_heads is None):
        return None
    outputs = _launchers().predict(tensors, flags)
    outputs["e2ip_force_unit"] = readout.force_unit.to(outputs["e2ip_nu"].dtype).expand(invariant.shape[0])
    return outputs


def inputs(
    readout: Any,
    invariant: Tensor,
    equivariant: Tensor,
    species: Tensor,
    neighbours: Neighbours,
    edges: Optional[Edges],
    node_heads: Optional[Tensor],
    energies: bool,
) -> Tuple[Dict[str, Optional[Tensor]], Dict[str, Any]]:
    """Return the arguments of the launcher's function ``predict``."""
    pooled = edges if readout.has_pool else None

    def columns(blocks: Sequence, dim: int) -> Tensor:
        components_first = readout.components_first and dim > 1
        return _launchers().columns(tuple(map(tuple, blocks)), dim, components_first, invariant.device)

    tensors: Dict[str, Optional[Tensor]] = {
        "invariant": _rows(invariant),
        "equivariant": _rows(equivariant),
        "columns": columns(readout.scalar_blocks, 1),
        "vector_columns": columns(readout.vector_blocks, 3),
        "tensor_columns": columns(readout.tensor_blocks, 5),
        "species": species.contiguous(),
        "heads": None if node_heads is None else node_heads.contiguous(),
        **{name: values.contiguous() for name, values in neighbours._asdict().items()},
        **{"vectors": None, "radial": None, "senders": None},
        **_weights(readout),
    }
    if pooled is not None:
        tensors["vectors"], tensors["radial"] = _rows(pooled.vectors), _rows(pooled.radial)
        tensors["senders"] = None if pooled.senders is None else readout.pool.from_sender(pooled.senders)
    return tensors, {**_flags(readout, energies), "own_senders": pooled is not None and pooled.senders is None}


def _rows(x: Tensor) -> Tensor:
    """Return the tensor with numbers of a row beside each other."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _weights(readout: Any) -> Dict[str, Optional[Tensor]]:
    trunks, leverage, energies = list(readout.trunks), readout.leverage, readout.leverage.energies

    def of_heads(name: str) -> Optional[Tensor]:
        # Of a readout for an irrep that a model does not have there are no weights.
        values = [functools.reduce(lambda part, key: getattr(part, key, None), name.split("."), t) for t in trunks]
        return values[0] if len(values) == 1 or values[0] is None else torch.stack(values)

    tensors = {"hidden": of_heads("hidden.weight"), "hidden_bias": of_heads("hidden.bias")}
    tensors |= {"out": of_heads("out.weight"), "out_bias": of_heads("out.bias")}
    tensors |= {name: of_heads(name) for name in ("mix_vectors", "mix_tensors")}
    pool = readout.pool if readout.has_pool else None
    tensors["from_radial"] = None if pool is None else pool.from_radial.weight
    tensors["from_sender"] = None if pool is None else pool.from_sender.weight
    tensors["from_sender_bias"] = None if pool is None else pool.from_sender.bias
    names = "centres axes whitening region_stretch region_offsets region_norms growth surplus log_variance log_factor"
    tensors |= {name: getattr(leverage, name) for name in f"{names} fitted".split()}
    return {
        **tensors,
        "force_unit": readout.force_unit,
        "floors": energies.floors,
        "lengths_of_energies": energies.lengths,
    }


def _flags(readout: Any, energies: bool) -> Dict[str, Any]:
    trunk, leverage, family = readout.trunks[0], readout.leverage, readout.family
    error_vectors = leverage.energies
    flags = {name: getattr(FORM, name) for name in FORM._fields}
    flags |= {"reach_of_training": reach_of_training(FORM), "touching": leverage.touching}
    flags |= {"unfitted": leverage.unfitted, "local": leverage.strictly_local}
    flags |= {"features": count(readout.scalar_blocks), "vectors": count(readout.vector_blocks)}
    flags |= {"tensors": count(readout.tensor_blocks), "pooled": readout.pool.channels if readout.has_pool else 0}
    flags |= {"hidden": trunk.hidden.out_features, "channels": trunk.channels, "heads": len(readout.trunks)}
    flags |= {"axes": leverage.whitening.shape[1], "regions": leverage.region_stretch.shape[1]}
    flags |= {"species_per_head": leverage.species_per_head(), "double_outputs": readout.double_outputs}
    flags |= {"grows": family.takes_support, "map": (family.coupled, family.scalar_damper, family.tensor_damper)}
    flags |= {"blocks": error_vectors.blocks if energies else 0, "energy_factor": error_vectors.factor}
    return flags | {"per_component": error_vectors.per_component, "energy_power": error_vectors.power}
