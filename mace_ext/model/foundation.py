"""Fine-tuning an e²IP model with ``--foundation_model``: its readout is kept where it means the same."""

import logging
from typing import Any

from mace.modules import models

from e2ip_plugins.readout.readout import Readout
from mace_ext.model.model import ScaleShiftMACE, add_readout
from mace_ext.model.readout import find_readout


def without_readout(model: Any) -> Any:
    """Return a stock model that shares the weights of an e²IP model; anything else is returned as it is."""
    if find_readout(model) is None:
        return model
    plain = models.ScaleShiftMACE.__new__(models.ScaleShiftMACE)
    plain.__dict__ = {name: value for name, value in model.__dict__.items() if name != "learns_alone"}
    plain._modules = {name: module for name, module in model._modules.items() if name != "e2ip_readout"}
    return plain


def with_readout_of_head(model: Any, readout: Readout, head: int) -> None:
    """Give a stock model with one MACE head the readout that a model with several heads has for one of them."""
    add_readout(model, readout.settings)
    _copy_weights(readout, head, model.e2ip_readout)
    model.e2ip_readout.leverage.take_head(readout.leverage, head)


def _copy_weights(source: Readout, head: int, target: Readout) -> None:
    """Copy the pool and the trunk of one head into all heads of another readout."""
    if source.has_pool:
        target.pool.load_state_dict(source.pool.state_dict())
    for trunk in target.trunks:
        trunk.load_state_dict(source.trunks[head].state_dict())


def load_foundation_readout(model: ScaleShiftMACE, foundation: Any) -> None:
    """Copy the readout of an e²IP foundation model into every MACE head of ``model``.

    MACE has by then reduced the foundation model to one head. The readout is left out, with a warning in the log, where
    the settings give the same weights another meaning.
    """
    source, target = find_readout(foundation), model.e2ip_readout
    if source is None:
        return
    differing = target.settings.differences(source.settings, weights_only=True)
    if differing:
        logging.warning(f"e2ip readout of the foundation model not used, it differs in: {', '.join(differing)}")
        return
    _copy_weights(source, 0, target)
    logging.info("e2ip readout taken over from the foundation model")
