"""`mace.tools.train`: our figures in the validation metrics, the results file and the log."""

from mace_ext import metrics
from mace_ext.patches import wrap


def apply(module):
    """Patch ``MACELoss`` and ``valid_err_log``."""
    module.MACELoss = metrics.mace_loss_with_figures(module.MACELoss)
    wrap(module, "valid_err_log", valid_err_log)


def valid_err_log(stock, valid_loss, eval_metrics, logger, log_errors, epoch=None, valid_loader_name="Default"):
    """The stock lines and ours."""
    stock(valid_loss, eval_metrics, logger, log_errors, epoch, valid_loader_name)
    metrics.log_validation(eval_metrics, epoch, valid_loader_name)
