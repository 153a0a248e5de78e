"""Fit of the leverage at the end of ``nequip-train``, on the best checkpoint; test runs and exports then carry it."""

import os
from typing import Any, Dict, Iterator, List, Optional

import lightning
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from nequip.data import AtomicDataDict
from nequip.train import NequIPLightningModule
from nequip.utils import RankedLogger
from torch.utils.data import DataLoader, Subset

from e2ip_plugins.errors import InputError
from e2ip_plugins.fitting.fit import training_subset
from e2ip_plugins.fitting.report import WAY_OUT, failure_message
from e2ip_plugins.leverage.module import Leverage
from e2ip_plugins.readout.readout import unfitted
from nequip_ext.fitting.passes import fit_model, tell
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
        """A restart, perhaps from a fitted checkpoint: its weights are going to move."""
        if acts(self, trainer, pl_module):
            for leverage in leverages(pl_module).values():
                leverage.reset()

    def on_test_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Say so where a model has not been fitted."""
        if acts(self, trainer, pl_module):
            warning = unfitted(find_readout(pl_module))
            if warning:
                logger.warning(warning)

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """The same; validation during training is of the model as it trains."""
        if trainer.state.fn == "validate":
            self.on_test_start(trainer, pl_module)

    def on_fit_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Lightning has written its checkpoints; NequIP's test run comes next."""
        # Whoever asks Lightning for one quick batch does not want two passes over all data.
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
        # The training is not lost for it, nor are its tests.
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
        """Checkpoints of a training that was ended are as usable as others, once they are fitted."""
        path = best_checkpoint(trainer)
        if trainer.state.fn == "fit" and path and acts(self, trainer, pl_module) and leverages(pl_module):
            logger.warning(
                f"leverage: {path} is not fitted: restart the training from its last checkpoint, or {WAY_OUT}"
            )


def best_checkpoint(trainer: lightning.Trainer) -> Optional[str]:
    """The file that ``ckpt_path="best"`` means; None where there is none."""
    path = getattr(trainer.checkpoint_callback, "best_model_path", "")
    return path if path and os.path.isfile(path) else None


def _fit(trainer: lightning.Trainer, pl_module: NequIPLightningModule, path: Optional[str]) -> Dict[str, Leverage]:
    """Fitted leverages by prefix, of a twin of the training module that has the weights of the checkpoint."""
    if path is None:
        checkpoint: Dict[str, Any] = {"state_dict": pl_module.state_dict()}
        pl_module.on_save_checkpoint(checkpoint)
    else:
        checkpoint = torch.load(path, map_location="cpu", weights_only=False)
    twin = rebuild(type(pl_module), dict(pl_module.hparams), checkpoint)
    # Lightning has moved everything to the CPU by now.
    device = trainer.strategy.root_device
    twin.to(device).eval()
    data = trainer.datamodule
    for name, model in twin.evaluation_model.items():
        if leverages(model):
            train, like = data.train_dataset[0], data.train_dataloader()
            training = _Batches(trainer, twin, device, [train], like)
            validation = _Batches(trainer, twin, device, data.val_dataset, data.val_dataloader()[0])
            chosen = Subset(train, training_subset(len(train), sum(map(len, data.val_dataset))))
            known = _Batches(trainer, twin, device, [chosen], like)
            if len(twin.model) > 1:
                logger.info(f"leverage of model {name}:")
            tell(fit_model(model, training, validation, known))
    return {name: leverage.cpu() for name, leverage in leverages(twin).items()}


def _forget_compiled(pl_module: NequIPLightningModule, fitted: Dict[str, Leverage]) -> None:
    """What NequIP compiled for training knows the shapes of buffers, and the test run loads those that were fitted."""
    for name, leverage in leverages(pl_module).items():
        own, new = leverage.state_dict(), fitted[name].state_dict()
        if any(own[key].shape != value.shape for key, value in new.items()):
            for model in pl_module.model.values():
                caches = [cache for cache in getattr(model, "_compiled_cache", ()) if cache]
                for cache in caches:
                    cache.clear()
                if caches:
                    logger.info("leverage: a test run compiles the model anew, which takes as long as the first time")


class _Batches:
    """This process's share of some datasets, in their order and in batches as the host's loader makes them."""

    def __init__(
        self, trainer: lightning.Trainer, twin: Any, device: torch.device, datasets: List[Any], like: Any
    ) -> None:
        self.move = lambda batch: twin.transfer_batch_to_device(batch, device, 0)
        self.loaders = [
            DataLoader(
                Subset(dataset, range(trainer.global_rank, len(dataset), trainer.world_size)),
                batch_size=getattr(like, "batch_size", None) or 1,
                collate_fn=getattr(like, "collate_fn", AtomicDataDict.batched_from_list),
            )
            for dataset in datasets
        ]

    def __len__(self) -> int:
        return sum(map(len, self.loaders))

    def __iter__(self) -> Iterator[AtomicDataDict.Type]:
        for loader in self.loaders:
            yield from map(self.move, loader)
