"""The core's readout on the node features of a MACE model: where the features lie, and which models have a readout.

Loaded while MACE is: imports of MACE and e3nn wait until they are used.
"""

from typing import Any, Optional, Tuple, Type

from e2ip_plugins import families
from e2ip_plugins.families.interface import Family
from e2ip_plugins.keys import ENERGY_OUTPUTS, FRAME_OUTPUTS, OutputKey
from e2ip_plugins.readout.layout import Layout, blocks
from e2ip_plugins.readout.readout import Readout, model_name
from e2ip_plugins.readout.settings import Settings


def find_readout(model: Any) -> Optional[Readout]:
    """Return the readout of a model, scripted or not; None for a stock model or no model."""
    return getattr(model, "e2ip_readout", None)


def find_name(model: Any, head: Optional[str]) -> Optional[str]:
    """Return the name of a model's readout, see `model_name`; if the model has several heads, with that of the head.

    Every head has its own trunk and leverage, so that a calibration of one head does not hold for another.
    """
    name = model_name(find_readout(model))
    return name if name is None or head is None or len(getattr(model, "heads", ())) < 2 else f"{name}-{head}"


def find_family(model: Any) -> Optional[Type[Family]]:
    """Return the family of a model's readout, None for a stock model."""
    readout = find_readout(model)
    return None if readout is None else families.get(readout.family_name)


def has_leverage(model: Any) -> bool:
    """Return whether a model, scripted or not, has a readout whose leverage has been fitted."""
    readout = find_readout(model)
    return readout is not None and bool(readout.leverage.fitted)


def has_energies(model: Any) -> bool:
    """Return whether the energies of a model, scripted or not, have error bars in one of its heads."""
    readout = find_readout(model)
    return readout is not None and bool(readout.leverage.energies.lengths.any())


def frame_outputs(model: Any) -> Tuple[OutputKey, ...]:
    """Return the outputs of whole frames that a model with a readout has."""
    readout = find_readout(model)
    if readout is None or not has_energies(model):
        return ()
    return FRAME_OUTPUTS if len(readout.leverage.energies.stress_factors) else ENERGY_OUTPUTS


def build_readout(model: Any, settings: Settings, seed: int) -> Readout:
    """Return an untrained readout for a stock model: one trunk per MACE head, on the model's device, in its dtype."""
    parameter = next(model.parameters())
    readout = Readout(settings, _layout(model), num_heads=len(model.heads), seed=seed)
    return readout.to(dtype=parameter.dtype, device=parameter.device)


def _layout(model: Any) -> Layout:
    """Return the blocks in the model's ``node_feats``, which concatenate the features of all layers."""
    from e3nn import o3

    # `mace.modules.wrapper_ops.get_layout` does the same, but 0.3.15 lacks it.
    backend = getattr(model.products[0], "cueq_config", None)
    layout = getattr(backend, "layout_str", "mul_ir") if getattr(backend, "enabled", False) else "mul_ir"
    # Through a string, because cuEquivariance has its own class of irreps.
    layers = [o3.Irreps(str(product.linear.irreps_out)) for product in model.products]
    return Layout(
        scalars=blocks(layers, 0, 1),
        vectors=blocks(layers, 1, -1),
        tensors=blocks(layers, 2, 1),
        components_first=layout == "ir_mul",
        num_radial=model.radial_embedding.out_dim,
        num_species=len(model.atomic_numbers),
    )
