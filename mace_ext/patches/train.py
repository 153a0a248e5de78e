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
    for function in (valid_err_log, train, take_step):
        wrap(module, function.__name__, function)


def valid_err_log(stock, valid_loss, eval_metrics, logger, log_errors, epoch=None, valid_loader_name="Default"):
    """The stock lines and ours."""
    stock(valid_loss, eval_metrics, logger, log_errors, epoch, valid_loader_name)
    metrics.log_validation(eval_metrics, epoch, valid_loader_name)


def train(stock, *args, **kwargs):
    """Without what the leverage was fitted to before; afterwards the checkpoint handler knows that it can be fitted."""
    given = inspect.signature(stock).bind(*args, **kwargs).arguments
    readout = find_readout(given["model"])
    if readout is not None:
        readout.leverage.resize(1)
    with remembering(given["model"]):
        stock(*args, **kwargs)
    if readout is not None:
        from mace_ext.fitting.after_training import Training

        given["checkpoint_handler"].e2ip_training = Training(given["train_loader"], given["valid_loaders"])


def take_step(stock, model, loss_fn, batch, optimizer, ema, output_args, max_grad_norm, device):
    """With ``forces: host``, gradients are clipped as if there were no readout, and the readout's by themselves."""
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
    """A model, DDP or not, that computes everything and names all parameters but the readout's."""

    def __init__(self, model: torch.nn.Module, readout: torch.nn.Module) -> None:
        self._model, self._left_out = model, {id(parameter) for parameter in readout.parameters()}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def parameters(self) -> Any:
        """The host's."""
        return (parameter for parameter in self._model.parameters() if id(parameter) not in self._left_out)
