"""`mace.tools.scripts_utils`: loss, stage two, optimiser groups and the settings of rebuilt models."""

import logging

from mace_ext.model.readout import find_readout
from mace_ext.patches import wrap
from mace_ext.training.options import has_readout, settings_of


def apply(module):
    """Patch five functions."""
    wrap(module, get_loss_fn=get_loss_fn, get_swa=get_swa, get_params_options=get_params_options)
    wrap(module, extract_config_mace_model=extract_config_mace_model, remove_pt_head=remove_pt_head)


def _with_force_term(args, loss_fn):
    from mace_ext.training.loss import E2IPLoss

    return E2IPLoss(loss_fn, settings_of(args)) if has_readout(args) else loss_fn


def get_loss_fn(stock, args, *rest, **kwargs):
    """Return the stock loss with the force term of the readout's family."""
    return _with_force_term(args, stock(args, *rest, **kwargs))


def get_swa(stock, args, *rest, **kwargs):
    """Return stage two with the same force term in its loss."""
    swa, swas = stock(args, *rest, **kwargs)
    swa.loss_fn = _with_force_term(args, swa.loss_fn)
    if has_readout(args):
        logging.info(f"Stage Two trains with the readout's force term in that loss: {swa.loss_fn}")
    return swa, swas


def get_params_options(stock, args, model, *rest, **kwargs):
    """Return the optimiser's options with the readout's weights: MACE silently leaves out what it does not list."""
    options = stock(args, model, *rest, **kwargs)
    readout = find_readout(model)
    if readout is not None:
        group = {"name": "e2ip_readout", "params": list(readout.parameters()), "weight_decay": 0.0}
        options["params"].append(group)
    return options


def extract_config_mace_model(stock, model, *rest, **kwargs):
    """Return the config with the readout's settings: MACE converts and copies models by `model.__class__(**config)`."""
    config = stock(model, *rest, **kwargs)
    readout = find_readout(model)
    if readout is not None:
        config["e2ip_settings"] = readout.settings.to_dict()
        config["e2ip_axes"] = readout.leverage.whitening.shape[1]
        config["e2ip_regions"] = readout.leverage.region_norms.shape[1]
        config["e2ip_stress"] = len(readout.leverage.energies.stress_factors) > 0
    return config


def remove_pt_head(stock, model, *args, **kwargs):
    """Return the model of one MACE head, with the trunk and leverage of that head."""
    from mace_ext.model.foundation import with_readout_of_head, without_readout

    new, readout = stock(without_readout(model), *args, **kwargs), find_readout(model)
    if readout is not None:
        with_readout_of_head(new, readout, model.heads.index(new.heads[0]))
    return new
