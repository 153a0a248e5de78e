"""The core's readout on the node features of a MACE model: where the features lie, and who has a readout.

Loaded while MACE is: imports of MACE and e3nn wait until they are used.
"""

from typing import Any, Dict, Optional, Tuple, Type

from e2ip_plugins import families
from e2ip_plugins.errors import InputError
from e2ip_plugins.families.interface import Family
from e2ip_plugins.keys import LEVERAGE, OutputKey
from e2ip_plugins.readout.layout import Layout, blocks
from e2ip_plugins.readout.readout import Readout, model_name
from e2ip_plugins.readout.settings import Settings, outdated


def find_readout(model: Any) -> Optional[Readout]:
    """The readout of a model, scripted or not; None for a stock model or no model, `InputError` for an old one."""
    if hasattr(model, "e2ip_head"):
        raise InputError(outdated("this model"))
    return getattr(model, "e2ip_readout", None)


def find_name(model: Any, head: Optional[str]) -> Optional[str]:
    """Name of a model's readout, see `model_name`; of one that has several heads, with the head that is asked.

    Every head has a trunk and a leverage of its own: what was found out about one is not true of another.
    """
    name = model_name(find_readout(model))
    return name if name is None or head is None or len(getattr(model, "heads", ())) < 2 else f"{name}-{head}"


def find_family(model: Any) -> Optional[Type[Family]]:
    """The family of a model's readout, None for a stock model."""
    readout = find_readout(model)
    return None if readout is None else families.get(readout.family_name)


def has_leverage(model: Any) -> bool:
    """Whether a model, scripted or not, has a readout whose leverage has been fitted."""
    leverage = getattr(find_readout(model), "leverage", None)
    return leverage is not None and bool(leverage.fitted)


def output_keys(family: Type[Family], outputs: Dict[str, Any]) -> Tuple[OutputKey, ...]:
    """What a model puts out for users: the family's keys and the leverage, which older models have not."""
    return family.output_keys() + ((LEVERAGE,) if outputs.get(LEVERAGE.name) is not None else ())


def build_readout(model: Any, settings: Settings, seed: int) -> Readout:
    """An untrained readout that fits a stock model: one trunk per MACE head, on the model's device and of its dtype."""
    parameter = next(model.parameters())
    readout = Readout(settings, _layout(model), num_heads=len(model.heads), seed=seed)
    return readout.to(dtype=parameter.dtype, device=parameter.device)


def _layout(model: Any) -> Layout:
    """Blocks in the model's ``node_feats``, which concatenate the features of all layers."""
    from e3nn import o3

    # By way of a string: cuEquivariance has irreps of its own.
    # Not by `mace.modules.wrapper_ops.get_layout`, which 0.3.15 lacks.
    backend = getattr(model.products[0], "cueq_config", None)
    layout = getattr(backend, "layout_str", "mul_ir") if getattr(backend, "enabled", False) else "mul_ir"
    layers = [o3.Irreps(str(product.linear.irreps_out)) for product in model.products]
    return Layout(
        scalars=blocks(layers, 0, 1),
        vectors=blocks(layers, 1, -1),
        tensors=blocks(layers, 2, 1),
        components_first=layout == "ir_mul",
        num_radial=model.radial_embedding.out_dim,
        num_species=len(model.atomic_numbers),
    )
