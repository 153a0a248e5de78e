"""`mace.tools.scripts_utils`: loss, stage two, optimiser groups and the settings of rebuilt models."""

import logging
from functools import wraps


def apply(module):
    """Patch the five functions."""
    module.get_loss_fn = _get_loss_fn(module.get_loss_fn)
    module.get_swa = _get_swa(module.get_swa)
    module.get_params_options = _get_params_options(module.get_params_options)
    module.extract_config_mace_model = _extract_config_mace_model(module.extract_config_mace_model)
    module.remove_pt_head = _remove_pt_head(module.remove_pt_head)


def _evidential(args, loss_fn):
    from mace_ext.loss import EvidentialLoss
    from mace_ext.options import loss_settings

    return EvidentialLoss(loss_fn, loss_settings(args))


def _get_loss_fn(stock):
    @wraps(stock)
    def get_loss_fn(args, *rest, **kwargs):
        loss_fn = stock(args, *rest, **kwargs)
        return _evidential(args, loss_fn) if getattr(args, "readout", None) == "e2ip" else loss_fn

    return get_loss_fn


def _get_swa(stock):
    @wraps(stock)
    def get_swa(args, *rest, **kwargs):
        swa, swas = stock(args, *rest, **kwargs)
        if getattr(args, "readout", None) == "e2ip":
            swa.loss_fn = _evidential(args, swa.loss_fn)
            logging.info(f"Stage Two trains with e2ip's force term in that loss: {swa.loss_fn}")
        return swa, swas

    return get_swa


def _get_params_options(stock):
    @wraps(stock)
    def get_params_options(args, model, *rest, **kwargs):
        options = stock(args, model, *rest, **kwargs)
        if hasattr(model, "e2ip_head"):
            # The stock code lists modules by hand: what is not listed is never optimised, without a word.
            options["params"].append(
                {"name": "e2ip_head", "params": list(model.e2ip_head.parameters()), "weight_decay": 0.0}
            )
        return options

    return get_params_options


def _extract_config_mace_model(stock):
    @wraps(stock)
    def extract_config_mace_model(model, *rest, **kwargs):
        config = stock(model, *rest, **kwargs)
        if hasattr(model, "e2ip_config"):
            # For `model.__class__(**config)`, by which MACE converts and copies models.
            config["e2ip_config"] = dict(model.e2ip_config)
        return config

    return extract_config_mace_model


def _remove_pt_head(stock):
    @wraps(stock)
    def remove_pt_head(model, *args, **kwargs):
        new = stock(model, *args, **kwargs)
        if hasattr(model, "e2ip_head"):
            # Every MACE head has a readout of its own; the stock code has filled the only one left with the first.
            kept = model.e2ip_head.heads[model.heads.index(new.heads[0])]
            new.e2ip_head.heads[0].load_state_dict(kept.state_dict())
        return new

    return remove_pt_head
