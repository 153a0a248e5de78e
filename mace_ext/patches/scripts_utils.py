"""`mace.tools.scripts_utils`: loss, stage two, optimiser groups and the settings of rebuilt models."""

import logging
from functools import wraps

from mace_ext.options import has_readout, settings_of
from mace_ext.readout import find_readout


def apply(module):
    """Patch the five functions."""
    for name, wrap in (
        ("get_loss_fn", _get_loss_fn),
        ("get_swa", _get_swa),
        ("get_params_options", _get_params_options),
        ("extract_config_mace_model", _extract_config_mace_model),
        ("remove_pt_head", _remove_pt_head),
    ):
        stock = getattr(module, name)
        setattr(module, name, wraps(stock)(wrap(stock)))


def _with_force_term(args, loss_fn):
    from mace_ext.loss import E2IPLoss

    return E2IPLoss(loss_fn, settings_of(args))


def _get_loss_fn(stock):
    def get_loss_fn(args, *rest, **kwargs):
        loss_fn = stock(args, *rest, **kwargs)
        return _with_force_term(args, loss_fn) if has_readout(args) else loss_fn

    return get_loss_fn


def _get_swa(stock):
    def get_swa(args, *rest, **kwargs):
        swa, swas = stock(args, *rest, **kwargs)
        if has_readout(args):
            swa.loss_fn = _with_force_term(args, swa.loss_fn)
            logging.info(f"Stage Two trains with the readout's force term in that loss: {swa.loss_fn}")
        return swa, swas

    return get_swa


def _get_params_options(stock):
    def get_params_options(args, model, *rest, **kwargs):
        options = stock(args, model, *rest, **kwargs)
        readout = find_readout(model)
        if readout is not None:
            # The stock code lists modules by hand: what is not listed is never optimised, without a word.
            group = {"name": "e2ip_readout", "params": list(readout.parameters()), "weight_decay": 0.0}
            options["params"].append(group)
        return options

    return get_params_options


def _extract_config_mace_model(stock):
    def extract_config_mace_model(model, *rest, **kwargs):
        config = stock(model, *rest, **kwargs)
        readout = find_readout(model)
        if readout is not None:
            # For `model.__class__(**config)`, by which MACE converts and copies models.
            config["e2ip_settings"] = readout.settings.to_dict()
        return config

    return extract_config_mace_model


def _remove_pt_head(stock):
    def remove_pt_head(model, *args, **kwargs):
        new = stock(model, *args, **kwargs)
        readout = find_readout(model)
        if readout is not None:
            # Every MACE head has a trunk of its own; the stock code has filled the only one left with the first.
            kept = readout.trunks[model.heads.index(new.heads[0])]
            new.e2ip_readout.trunks[0].load_state_dict(kept.state_dict())
        return new

    return remove_pt_head
