"""Fit of the leverage at the end of ``nequip-train``, on the best checkpoint; test runs and exports then carry it."""

import os
from typing import Any, Dict, Optional

import lightning
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from nequip.train import NequIPLightningModule
from nequip.utils import RankedLogger

from e2ip_plugins.errors import InputError
from e2ip_plugins.fitting.batches import Batching, fit_loaders
from e2ip_plugins.fitting.report import WAY_OUT, failure_message
from e2ip_plugins.leverage.module import Leverage
from e2ip_plugins.readout.readout import unfitted
from nequip_ext.fitting.passes import fit_model
from nequip_ext.model.checkpoints import leverages, rebuild, store
from nequip_ext.model.readout import find_readout
from nequip_ext.training.checks import acts

logger = RankedLogger(__name__, rank_zero_only=True)


class E2IPFit(lightning.Callback):
    """Fits the leverage of the checkpoint that Lightning calls best, after the last batch, and writes it into the file.

    Everything else in that file, other checkpoints, and the weights and random numbers of the process stay as they
    are. Without a best checkpoint the model in memory is fitted. What is fitted is what NequIP evaluates: EMA weights
    where there are any. The leverage depends on data and weights alone, not on seed, order or number of processes.

    Every Trainer has one (`nequip_ext.setup`); it does nothing for models that are not ours.
    """

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Reset the leverage, which a restart from a fitted checkpoint has: its weights are going to move."""
        if acts(self, trainer, pl_module):
            for leverage in leverages(pl_module).values():
                leverage.reset()

    def on_test_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Warn of a model that has not been fitted."""
        if acts(self, trainer, pl_module):
            warning = unfitted(find_readout(pl_module))
            if warning:
                logger.warning(warning)

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Warn likewise, except of validation during training, which is of the model as it trains."""
        if trainer.state.fn == "validate":
            self.on_test_start(trainer, pl_module)

    def on_fit_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Fit the best checkpoint: Lightning has written it, and NequIP's test run comes next."""
        # A quick test of one batch shall not make two passes over all data.
        if not acts(self, trainer, pl_module) or not leverages(pl_module) or trainer.fast_dev_run:
            return
        path = best_checkpoint(trainer)
        what = "the model" if path is None else path
        if getattr(trainer.datamodule, "train_dataset", None) is None:
            logger.warning(f"leverage: {what} is not fitted: the Trainer has no datamodule of NequIP; {WAY_OUT}")
            return
        logger.info(f"leverage: fitting {what} to the training and validation sets")
        try:
            with isolate_rng():
                fitted = _fit(trainer, pl_module, path)
        # Neither the training nor its tests are lost for it.
        except Exception as error:
            if trainer.world_size > 1 and not isinstance(error, InputError):
                raise  # InputError meets all processes; with another error they would wait for this one
            logger.warning(f"leverage: {what} stays unfitted: {failure_message(error)}")
            return
        _forget_compiled(pl_module, fitted)
        if path is None:
            for name, leverage in leverages(pl_module).items():
                leverage.load_state_dict(fitted[name].state_dict())
        elif trainer.is_global_zero:
            try:
                store(path, fitted)
            except OSError as error:
                logger.warning(f"leverage: {path} stays as it was, unfitted: {failure_message(error)}")
        trainer.strategy.barrier()

    def on_exception(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, exception: BaseException
    ) -> None:
        """Warn that the best checkpoint of an interrupted training is not fitted."""
        path = best_checkpoint(trainer)
        if trainer.state.fn == "fit" and path and acts(self, trainer, pl_module) and leverages(pl_module):
            logger.warning(
                f"leverage: {path} is not fitted: restart the training from its last checkpoint, or {WAY_OUT}"
            )


def best_checkpoint(trainer: lightning.Trainer) -> Optional[str]:
    """Return the file that ``ckpt_path="best"`` means; None where there is none."""
    path = getattr(trainer.checkpoint_callback, "best_model_path", "")
    return path if path and os.path.isfile(path) else None


def _fit(trainer: lightning.Trainer, pl_module: NequIPLightningModule, path: Optional[str]) -> Dict[str, Leverage]:
    """Return fitted leverages by prefix, of a twin of the training module that has the weights of the checkpoint."""
    if path is None:
        checkpoint: Dict[str, Any] = {"state_dict": pl_module.state_dict()}
        pl_module.on_save_checkpoint(checkpoint)
    else:
        checkpoint = torch.load(path, map_location="cpu", weights_only=False)
    twin = rebuild(type(pl_module), dict(pl_module.hparams), checkpoint)
    # Lightning has moved everything to the CPU by now.
    twin.to(trainer.strategy.root_device).eval()
    data = trainer.datamodule
    of_training, of_validation = Batching.of(data.train_dataloader()), Batching.of(data.val_dataloader()[0])
    loaders = fit_loaders(data.train_dataset[0], data.val_dataset, of_training, of_validation)
    for name, model in twin.evaluation_model.items():
        if leverages(model):
            report = fit_model(model, *loaders, on_progress=logger.info)
            if len(twin.model) > 1:
                logger.info(f"leverage of model {name}:")
            for warning in report.warnings:
                logger.warning(f"leverage: {warning}")
            for line in report.lines():
                logger.info(line)
    return {name: leverage.cpu() for name, leverage in leverages(twin).items()}


def _forget_compiled(pl_module: NequIPLightningModule, fitted: Dict[str, Leverage]) -> None:
    """Clear what NequIP compiled for training if buffers have other shapes now: the test run loads the fitted ones."""
    for name, leverage in leverages(pl_module).items():
        before, after = leverage.state_dict(), fitted[name].state_dict()
        if any(before[key].shape != value.shape for key, value in after.items()):
            for model in pl_module.model.values():
                caches = [cache for cache in getattr(model, "_compiled_cache", ()) if cache]
                for cache in caches:
                    cache.clear()
                if caches:
                    logger.info("leverage: a test run compiles the model anew, which takes as long as the first time")
