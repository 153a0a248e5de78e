"""`mace.tools.train`: our figures in the validation metrics, the results file and the log."""

from functools import wraps

from mace_ext import metrics


def apply(module):
    """Patch ``MACELoss`` and ``valid_err_log``."""
    stock = module.valid_err_log

    @wraps(stock)
    def valid_err_log(valid_loss, eval_metrics, logger, log_errors, epoch=None, valid_loader_name="Default"):
        stock(valid_loss, eval_metrics, logger, log_errors, epoch, valid_loader_name)
        metrics.log_validation(eval_metrics, epoch, valid_loader_name)

    module.MACELoss = metrics.mace_loss_with_figures(module.MACELoss)
    module.valid_err_log = valid_err_log
