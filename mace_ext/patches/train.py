"""`mace.tools.train`: our figures in the validation metrics, the results file and the log; what follows a training."""

import inspect
from typing import Any

import torch

from e2ip_plugins.readout.loss import clip_apart
from mace_ext.model.readout import find_readout
from mace_ext.patches import wrap
from mace_ext.training import metrics
from mace_ext.training.frozen_features import remembering


def apply(module):
    """Patch ``MACELoss`` and the functions."""
    module.MACELoss = metrics.mace_loss_with_figures(module.MACELoss)
    wrap(module, valid_err_log=valid_err_log, evaluate=evaluate, train=train, take_step=take_step)


def valid_err_log(stock, valid_loss, eval_metrics, logger, log_errors, epoch=None, valid_loader_name="Default"):
    """Log the stock lines, then ours."""
    stock(valid_loss, eval_metrics, logger, log_errors, epoch, valid_loader_name)
    metrics.log_validation(eval_metrics, epoch, valid_loader_name)


def evaluate(stock, model, *args, **kwargs):
    """Return loss and metrics of a data set, for which the model returns what the readout's loss reads."""
    from mace_ext.model.model import for_loss

    with for_loss(model):
        return stock(model, *args, **kwargs)


def train(stock, *args, **kwargs):
    """Train with an unfitted leverage; afterwards tell the checkpoint handler with which data to fit it."""
    arguments = inspect.signature(stock).bind(*args, **kwargs).arguments
    readout = find_readout(arguments["model"])
    if readout is not None:
        # Takes away a fit, and gives the buffers the shapes of a new leverage.
        readout.leverage.resize(1)
    with remembering(arguments["model"]):
        stock(*args, **kwargs)
    if readout is not None:
        from mace_ext.fitting.after_training import Training

        data = Training(arguments["train_loader"], arguments["valid_loaders"])
        arguments["checkpoint_handler"].e2ip_training = data


def take_step(stock, model, loss_fn, batch, optimizer, ema, output_args, max_grad_norm, device):
    """Take a step; with ``forces: host`` MACE's gradients and the readout's are clipped apart."""
    readout = find_readout(getattr(model, "module", model))
    if readout is None or readout.settings.forces != "host" or max_grad_norm is None:
        return stock(model, loss_fn, batch, optimizer, ema, output_args, max_grad_norm, device)

    def clip() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=max_grad_norm)

    def before_step(*_: Any) -> None:
        clip_apart(clip, readout.parameters(), model.parameters())

    with optimizer.register_step_pre_hook(before_step):
        return stock(model, loss_fn, batch, optimizer, ema, output_args, None, device)
