"""Fit of the leverage at the end of `mace_run_train`.

MACE loads the best checkpoint once more after training, for every stage; then it saves the model, compiles it, and
makes the final tables. The fit comes right after that load, so that all of them carry it.
"""

import logging
from typing import Dict, NamedTuple

from mace.modules import models
from mace.tools.torch_geometric.dataloader import DataLoader
from torch.utils.data import ConcatDataset

from e2ip_plugins.errors import InputError
from e2ip_plugins.fitting.batches import Batching, fit_loaders
from e2ip_plugins.fitting.report import failure_message
from e2ip_plugins.processes import distributed
from mace_ext.fitting.passes import fit_model
from mace_ext.training.frozen_features import remembering


class Training(NamedTuple):
    """What a fit needs of the training that has just ended.

    Attributes
    ----------
    train_loader : DataLoader
    valid_loaders : dict of DataLoader
        By MACE head.
    """

    train_loader: DataLoader
    valid_loaders: Dict[str, DataLoader]


def fit_trained(model: models.ScaleShiftMACE, training: Training) -> None:
    """Fit the leverage of a model to the data it was trained on, and log the result.

    All processes of a distributed training must call it. A fit that is impossible leaves the model unfitted, with a
    warning: the training is not lost for it.
    """
    logging.info("Fitting the leverage to training and validation set")
    train, valid = training.train_loader, list(training.valid_loaders.values())
    # One data set, whose batches may be of several heads.
    validation: ConcatDataset = ConcatDataset([loader.dataset for loader in valid])
    loaders = fit_loaders(train.dataset, [validation], Batching.of(train), Batching.of(valid[0]))
    try:
        with remembering(model, more=False):
            report = fit_model(model, *loaders, on_progress=logging.info)
    except Exception as error:
        if distributed() and not isinstance(error, InputError):
            raise  # InputError meets all processes; with another error they would wait for this one
        model.e2ip_readout.leverage.reset()
        logging.warning(f"The leverage was not fitted: {failure_message(error)}")
        return
    for warning in report.warnings:
        logging.warning(warning)
    for line in report.lines():
        logging.info(line)
