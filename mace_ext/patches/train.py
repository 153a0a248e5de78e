"""`mace.tools.train`: our figures in the validation metrics, the results file and the log; what follows a training."""

import inspect
from typing import Any

import torch

from mace_ext.model.readout import find_readout
from mace_ext.patches import wrap
from mace_ext.training import metrics
from mace_ext.training.remembered import remembering


def apply(module):
    """Patch ``MACELoss`` and the functions."""
    module.MACELoss = metrics.mace_loss_with_figures(module.MACELoss)
    wrap(module, valid_err_log=valid_err_log, train=train, take_step=take_step)


def valid_err_log(stock, valid_loss, eval_metrics, logger, log_errors, epoch=None, valid_loader_name="Default"):
    """Log the stock lines, then ours."""
    stock(valid_loss, eval_metrics, logger, log_errors, epoch, valid_loader_name)
    metrics.log_validation(eval_metrics, epoch, valid_loader_name)


def train(stock, *args, **kwargs):
    """Train with an unfitted leverage; afterwards tell the checkpoint handler with which data to fit it."""
    arguments = inspect.signature(stock).bind(*args, **kwargs).arguments
    readout = find_readout(arguments["model"])
    if readout is not None:
        readout.leverage.resize(1)
    with remembering(arguments["model"]):
        stock(*args, **kwargs)
    if readout is not None:
        from mace_ext.fitting.fit import Training

        data = Training(arguments["train_loader"], arguments["valid_loaders"], arguments["device"])
        arguments["checkpoint_handler"].e2ip_training = data


def take_step(stock, model, loss_fn, batch, optimizer, ema, output_args, max_grad_norm, device):
    """Take a step; with ``forces: host`` MACE's gradients and the readout's are clipped apart."""
    arguments = (loss_fn, batch, optimizer, ema, output_args, max_grad_norm, device)
    readout = find_readout(getattr(model, "module", model))
    if readout is None or readout.settings.forces != "host":
        return stock(model, *arguments)

    def clip(*_: Any) -> None:
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(readout.parameters(), max_norm=max_grad_norm)

    with optimizer.register_step_pre_hook(clip):
        return stock(_WithoutReadout(model, readout), *arguments)


class _WithoutReadout:
    """A model, DDP or not, that computes everything and lists all parameters except the readout's."""

    def __init__(self, model: torch.nn.Module, readout: torch.nn.Module) -> None:
        self._model, self._omitted = model, {id(parameter) for parameter in readout.parameters()}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def parameters(self) -> Any:
        """Return MACE's parameters."""
        return (parameter for parameter in self._model.parameters() if id(parameter) not in self._omitted)
