"""From parsed arguments and the training set to an e²IP model."""

import copy
import logging
import sys

import numpy as np
import torch
from mace.modules import models

from e2ip_plugins.errors import InputError
from e2ip_plugins.families.presets_tmp import get_preset, resolve_evidence, resolve_force_unit
from mace_ext.foundation import inherited_force_unit, load_foundation_readout
from mace_ext.model import add_readout, readout_config
from mace_ext.options import wants_auto_unit


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
    head_configs = kwargs.get("head_configs", rest[2] if len(rest) > 2 else None)
    warn_of_masked_forces(head_configs or [])
    model, output_args = stock(
        args, _FiniteForces(train_loader), atomic_energies, without_readout(model_foundation), *rest, **kwargs
    )
    try:
        config = _config(args, train_loader.dataset, inherited_force_unit(model_foundation))
        add_readout(model, config, seed=args.seed)
    except InputError as error:
        print(f"mace_run_train: error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    logging.info(
        f"e2ip readout: preset {config['preset']}, evidence {config['evidence']}, force unit "
        f"{config['force_unit']:.6g} eV / A, {sum(p.numel() for p in model.e2ip_head.parameters())} parameters"
    )
    load_foundation_readout(model, model_foundation)
    return model, output_args


def _config(args, dataset, inherited):
    preset = get_preset(args.e2ip_preset or "default")
    if args.e2ip_force_unit is None and inherited is not None:
        force_unit = inherited
    else:
        force_unit = resolve_force_unit(args.e2ip_force_unit, forces_rms(dataset) if wants_auto_unit(args) else None)
    return readout_config(preset.name, resolve_evidence(preset, args.e2ip_evidence), force_unit)


def without_readout(model):
    """A stock model that shares the weights of an e²IP model; anything else is handed back as it is."""
    if not hasattr(model, "e2ip_head"):
        return model
    plain = copy.copy(model)
    plain.__class__ = models.ScaleShiftMACE
    plain._modules = {name: module for name, module in model._modules.items() if name != "e2ip_head"}
    del plain.e2ip_config
    return plain


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


def warn_of_masked_forces(head_configs) -> None:
    """Warnings per data set: atoms with NaN or infinite reference forces, and frames with no forces at all."""
    for head in head_configs:
        if head.collections is None:
            continue
        sets = [("training", head.collections.train), ("validation", head.collections.valid)]
        for name, configs in [*sets, *((f"test ({test})", configs) for test, configs in head.collections.tests)]:
            where = f"of the {name} set (head {head.head_name})"
            forces = [config.properties.get("forces") for config in configs]
            masked = sum(int((~np.isfinite(array).all(-1)).sum()) for array in forces if array is not None)
            if masked:
                logging.warning(
                    f"{masked} atoms {where} have NaN or infinite reference forces: "
                    "they are left out of loss and metrics"
                )
            unlabelled = sum(array is None for array in forces)
            if unlabelled:
                logging.warning(
                    f"{unlabelled} of {len(forces)} frames {where} have no reference forces: "
                    "the uncertainty learns nothing from them"
                )


class _FiniteForces:
    """A loader whose non-finite reference forces read as the RMS of the others: MACE's force scale stays right."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        for batch in self.loader:
            finite = torch.isfinite(batch.forces)
            if not finite.all():
                batch.forces = batch.forces.where(finite, torch.full_like(batch.forces, forces_rms(self.dataset)))
            yield batch

    def __getattr__(self, name):
        return getattr(self.loader, name)
