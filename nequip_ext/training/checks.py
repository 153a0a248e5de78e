"""Set-up of a training, before its first batch: loss and metrics get the model's settings, input is checked.

NequIP builds model, loss and metrics apart, rebuilds them from the checkpoint at a restart, whatever the config says
about them, and opens test files after training. What does not fit would cost a user the training.
"""

import functools
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Union

import lightning
import torch
from hydra.utils import instantiate
from nequip.data._key_registry import get_field_type
from nequip.train import NequIPLightningModule
from nequip.utils import RankedLogger

from e2ip_plugins import families
from e2ip_plugins.errors import InputError
from e2ip_plugins.keys import LEVERAGE
from e2ip_plugins.predictions.doubts import doubts
from e2ip_plugins.readout import loss as readout_loss
from e2ip_plugins.readout.readout import Readout
from nequip_ext.compat import XYZFileWriter, metric_entries
from nequip_ext.model.readout import find_readout, graph_readouts, settings_of
from nequip_ext.training.data_sets import (
    check_atom_types,
    check_datasets,
    check_lacking_types,
    configurations,
    labels_of,
)
from nequip_ext.training.frozen_features import forget, remember
from nequip_ext.training.loss import ForceLoss
from nequip_ext.training.metrics import ForceFigure
from nequip_ext.training.reference import WRAP, check_ignored
from nequip_ext.training.restarts import check_restart
from nequip_ext.training.writers import mend_writers

logger = RankedLogger(__name__, rank_zero_only=True)


class E2IPInputCheck(lightning.Callback):
    """Gives loss and metrics the settings of the model, and ends a run before training if they do not go together, if
    a data file lacks forces or energies, or if the checkpoint it restarts from has another readout than the config.

    Every Trainer has one (`nequip_ext.setup`); more in a config change nothing.

    Raises
    ------
    InputError
        Before the first batch.
    """

    def setup(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """See the class; training modules without anything of e2ip are left alone."""
        if not acts(self, trainer, pl_module):
            return
        readout = bind(pl_module)
        if readout is not None:
            check_restart(pl_module)
            mend_writers()
            check_files_written(trainer.callbacks, readout)
        if stage == "fit":
            if readout is not None:
                check_ignored(pl_module.hparams)
                check_callbacks(trainer.callbacks, pl_module.loss)
                set_up_forces(pl_module, settings_of(readout).forces)
            if trainer.datamodule is not None:
                check_data(pl_module, trainer.datamodule, readout)

    def teardown(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """Give memory back."""
        forget(pl_module)

    def on_load_checkpoint(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, checkpoint: Dict[str, Any]
    ) -> None:
        """Check the restart of a stock model, of which `setup` does not know."""
        if acts(self, trainer, pl_module) and trainer.state.fn == "fit" and find_readout(pl_module) is None:
            check_restart(pl_module)


def acts(callback: lightning.Callback, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> bool:
    """Return whether a callback of ours is the first of its kind, and the training one of NequIP's."""
    first = next(other for other in trainer.callbacks if isinstance(other, type(callback)))
    return callback is first and isinstance(pl_module, NequIPLightningModule)


def _users(*parts: Optional[torch.nn.Module]) -> List[Union[ForceLoss, ForceFigure]]:
    """Return losses and metrics of ours in parts of a training module."""
    modules = [module for part in parts if part is not None for module in part.modules()]
    return [module for module in modules if isinstance(module, (ForceLoss, ForceFigure))]


def bind(pl_module: torch.nn.Module) -> Optional[Readout]:
    """Give losses and metrics the settings of the model's readout; return the readout, None where there is none.

    Raises
    ------
    InputError
        Where their options are not the model's, or the model has no readout.
    """
    readout = find_readout(pl_module)
    if readout is None:
        for user in _users(pl_module):
            raise InputError(f"{user.owner} needs a model with a readout, which this model does not have: {WRAP}")
        return None
    settings = settings_of(readout)
    for user in _users(pl_module):
        settings = user.bind(settings)
    # Packaged models carry a class of their own.
    readout.settings = type(readout.settings)(*settings)
    return readout


def set_up_forces(pl_module: NequIPLightningModule, forces: str) -> None:
    """Prepare a training module for what trains its forces; `InputError` where something else in it is in the way."""
    if not _users(pl_module.loss):
        text = "the loss is not nequip_ext.E2IPLoss, and with another one the readout of the model learns nothing"
        if forces != "likelihood":
            raise InputError(f"with 'forces: {forces}': {text}")
        logger.warning(f"{text}: its uncertainties stay what they are, except for what is fitted at the end")
    if forces != "likelihood" and not pl_module.automatic_optimization:
        raise InputError(
            f"with 'forces: {forces}': {type(pl_module).__name__} weighs the readout's gradients against those of "
            "energies and forces: take EMALightningModule"
        )
    if forces == "host":
        clip_apart(pl_module)
    if forces == "fixed":
        check_that_progress_shows(pl_module.val_metrics)
        remember(pl_module)


def clip_apart(pl_module: Any) -> None:
    """Let the gradients of a readout, and those of everything else, be clipped as if the other were not there."""
    clip = pl_module.configure_gradient_clipping
    if not isinstance(clip, functools.partial):
        pl_module.configure_gradient_clipping = functools.partial(_clip_apart, pl_module, clip)


def _clip_apart(pl_module: torch.nn.Module, clip: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    parts = [parameter for readout in graph_readouts(pl_module).values() for parameter in readout.parameters()]
    readout_loss.clip_apart(functools.partial(clip, *args, **kwargs), parts, pl_module.parameters())


def check_data(pl_module: NequIPLightningModule, data: Any, readout: Optional[Readout]) -> None:
    """Check the data sets of a datamodule: for the losses and metrics of ours, and for the fit of the leverage."""
    check_atom_types(pl_module.model, [*data.train_dataset, *data.val_dataset])
    if readout is not None:
        for text in check_lacking_types(pl_module.hparams["model"], [*data.train_dataset, *data.val_dataset]):
            logger.warning(text)
    if _users(pl_module.loss, pl_module.train_metrics):
        check_datasets("training", data.train_dataset_config, data.train_dataset, labels_of(pl_module.loss))
    # The leverage is fitted to them after the training, which would be too late to say so.
    fitted = readout is not None and readout.family.takes_support
    if _users(pl_module.val_metrics) or fitted:
        check_datasets("validation", data.val_dataset_config, data.val_dataset, labels_of(pl_module.val_metrics))
    if fitted:
        for text in doubts(configurations(data.train_dataset), configurations(data.val_dataset)):
            logger.warning(text)
    if _users(pl_module.test_metrics) and "test" in pl_module.hparams["info_dict"]["runs"]:
        datasets = instantiate(data.test_dataset_config)
        check_datasets("test", data.test_dataset_config, datasets, labels_of(pl_module.test_metrics))


def check_callbacks(callbacks: Sequence[Any], loss: Any) -> None:
    """Raise `InputError` for those that would take the readout's loss away, or test other weights than are fitted."""
    averaging = getattr(lightning.pytorch.callbacks, "WeightAveraging", ())
    for callback in callbacks:
        if isinstance(callback, averaging):
            raise InputError(
                f"{type(callback).__name__} tests other weights than the leverage is fitted to: take "
                "_target_: nequip.train.EMALightningModule instead"
            )
    if _users(loss):
        check_schedulers(callbacks, loss)


#: Terms of the loss that NequIP's schedulers name, by class; `SoftAdapt` acts on all.
_SCHEDULED: Dict[str, Callable[[Any, Iterable[str]], Iterable[str]]] = {
    "LossCoefficientScheduler": lambda callback, terms: {name for part in callback.schedule.values() for name in part},
    "LinearLossCoefficientScheduler": lambda callback, terms: callback.final_coeffs,
    "SoftAdapt": lambda callback, terms: terms,
}


def check_schedulers(callbacks: Sequence[Any], loss: Any) -> None:
    """Raise `InputError` for schedulers of NequIP's that name terms which the loss does not have, or that start from
    coefficients which are null. NequIP notices at the epoch when they act, or counts what is not named as switched off.
    """
    entries = metric_entries(loss)
    kinds = [(type(callback).__name__, callback) for callback in callbacks]
    named = [(kind, sorted(_SCHEDULED[kind](callback, entries))) for kind, callback in kinds if kind in _SCHEDULED]
    for kind, terms in named:
        unknown = [term for term in terms if term not in entries]
        if unknown:
            raise InputError(
                f"{kind} names {', '.join(unknown)}, which the loss does not have: its terms are {', '.join(entries)}"
            )
    # These may have a coefficient by then.
    switched = {term for kind, terms in named if kind == "LossCoefficientScheduler" for term in terms}
    for kind, terms in named:
        null = [term for term in terms if entries[term][0] is None and term not in switched]
        if null and kind != "LossCoefficientScheduler":
            raise InputError(
                f"{kind} starts from the coefficients of the loss, but that of {', '.join(null)} is null: give 0.0"
            )


def check_that_progress_shows(val_metrics: Any) -> None:
    """Raise `InputError` where the weighted sum has errors alone, which never change while the forces are fixed."""
    for manager in val_metrics:
        weighted = [manager[name] for name, (coeff, _) in metric_entries(manager).items() if coeff is not None]
        if not any(isinstance(metric, ForceFigure) for metric in weighted):
            raise InputError(
                "with 'forces: fixed' errors never change, and the best checkpoint would be the first: add "
                "e2ip_nll: 1.0 (with the readout's name) to the coeffs of val_metrics"
            )


def check_files_written(callbacks: List[lightning.Callback], readout: Readout) -> None:
    """Raise `InputError` for xyz writers that are to write what the model does not have; NequIP notices in the test."""
    outputs = [key.name for key in (*readout.family.output_keys(), LEVERAGE)]
    known = {key.name for family in families.table().values() for key in family.output_keys()}
    for fields in (callback.extra_fields for callback in callbacks if isinstance(callback, XYZFileWriter)):
        unknown = [name for name in fields if get_field_type(name, error_on_unregistered=False) is None]
        wrong = [name for name in fields if name in unknown or (name in known and name not in outputs)]
        if wrong:
            raise InputError(
                f"extra_fields of the xyz writer names {', '.join(wrong)}, which the model does not put out; "
                f"readout '{readout.settings.family}' puts out: {', '.join(outputs)}"
            )
