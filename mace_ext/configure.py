"""From parsed arguments and the training set to an e²IP model."""

import logging

import torch

from e2ip_plugins.errors import InputError
from e2ip_plugins.presets import get_preset, resolve_evidence, resolve_force_unit
from mace_ext.foundation import inherited_force_unit, load_foundation_readout
from mace_ext.model import add_readout, readout_config


def configure_e2ip_model(stock, args, train_loader, atomic_energies, model_foundation=None, *rest, **kwargs):
    """``configure_model`` of `mace.tools.model_script_utils` for ``--readout e2ip``.

    Parameters
    ----------
    stock : callable
        The stock function; its model is upgraded in place, foundation weights already loaded.

    Returns
    -------
    model, output_args
    """
    model, output_args = stock(args, train_loader, atomic_energies, model_foundation, *rest, **kwargs)
    preset = get_preset(args.e2ip_preset or "default")
    evidence = resolve_evidence(preset, args.e2ip_evidence)
    rms = forces_rms(train_loader.dataset) if str(args.e2ip_force_unit).strip().lower() == "auto" else None
    inherited = inherited_force_unit(model_foundation)
    if args.e2ip_force_unit is None and inherited is not None:
        force_unit = inherited
    else:
        force_unit = resolve_force_unit(args.e2ip_force_unit, rms)
    add_readout(model, readout_config(preset.name, evidence, force_unit), seed=args.seed)
    load_foundation_readout(model, model_foundation)
    logging.info(
        f"e2ip readout: preset {preset.name}, evidence {evidence}, force unit {force_unit:.6g} eV / A, "
        f"{sum(p.numel() for p in model.e2ip_head.parameters())} parameters"
    )
    return model, output_args


def forces_rms(dataset) -> float:
    """Root mean square of the finite force components of all labelled frames, in eV/Å.

    Reads the data set, not a loader: iterating a loader would change the order of the batches.
    """
    total, count = 0.0, 0
    for frame in dataset:
        if float(frame.weight * frame.forces_weight) > 0:
            finite = frame.forces[torch.isfinite(frame.forces)].double()
            total += float(finite.square().sum())
            count += finite.numel()
    if count == 0:
        raise InputError("the training set has no finite reference forces")
    return (total / count) ** 0.5
