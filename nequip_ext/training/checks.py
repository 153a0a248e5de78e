"""Set-up of a training, before its first batch: loss and metrics get the model's settings, input is looked at.

NequIP builds model, loss and metrics apart, rebuilds them from the checkpoint at a restart, whatever the config says
about them, and opens test files after training. What does not fit would cost a user the training.
"""

from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple, Union, cast

import lightning
import torch
from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from nequip.data import AtomicDataDict
from nequip.data._key_registry import get_field_type
from nequip.train import MetricsManager, NequIPLightningModule
from nequip.utils import RankedLogger
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from e2ip_plugins import families
from e2ip_plugins.errors import InputError
from e2ip_plugins.keys import LEVERAGE
from e2ip_plugins.predictions.checks import check_apart, check_atoms, check_finite
from e2ip_plugins.predictions.doubts import Configuration, doubts
from e2ip_plugins.readout.readout import Readout
from e2ip_plugins.readout.settings import Settings, resolve_force_unit, wants_auto_unit
from nequip_ext.compat import XYZFileWriter, metric_entries
from nequip_ext.model.readout import find_readout, settings_of
from nequip_ext.training.host_forces import clip_apart
from nequip_ext.training.loss import WRAP, ForceLoss
from nequip_ext.training.metrics import ForceFigure
from nequip_ext.training.naming import name_models_in_files
from nequip_ext.training.reference import check_reference, file_of, in_memory, known_species
from nequip_ext.training.remembered import forget, remember

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
        if bind(pl_module):
            check_restart(pl_module)
            name_models_in_files()
            check_files_written(trainer.callbacks, find_readout(pl_module))
            if stage == "fit":
                check_callbacks(trainer.callbacks, pl_module.loss)
        readout = find_readout(pl_module)
        forces = "likelihood" if stage != "fit" or readout is None else settings_of(readout).forces
        if stage == "fit" and readout is not None and not _users(pl_module.loss):
            text = "the loss is not nequip_ext.E2IPLoss, and with another one the readout of the model learns nothing"
            if forces != "likelihood":
                raise InputError(f"with 'forces: {forces}': {text}")
            logger.warning(f"{text}: its uncertainties stay what they are, but for what is fitted at the end")
        if forces != "likelihood" and not pl_module.automatic_optimization:
            raise InputError(
                f"with 'forces: {forces}': {type(pl_module).__name__} weighs the gradients of all terms of the loss "
                "against one another, the readout's with those of energies and forces: take EMALightningModule"
            )
        if forces == "host":
            clip_apart(pl_module)
        if forces == "fixed":
            check_that_progress_shows(pl_module.val_metrics)
            remember(pl_module)
        data = trainer.datamodule
        if stage != "fit" or data is None:
            return
        check_atom_types(pl_module.model, [*data.train_dataset, *data.val_dataset])
        if _users(pl_module.loss, pl_module.train_metrics):
            labels = labels_of(pl_module.loss)
            check_datasets("training", data.train_dataset_config, data.train_dataset, labels)
        # The leverage is fitted to them after the training, which would be too late to say so.
        fitted = readout is not None and readout.family.takes_support
        if _users(pl_module.val_metrics) or fitted:
            labels = labels_of(pl_module.val_metrics)
            check_datasets("validation", data.val_dataset_config, data.val_dataset, labels)
        if fitted:
            for text in doubts(_configurations(data.train_dataset), _configurations(data.val_dataset)):
                logger.warning(text)
        if _users(pl_module.test_metrics) and "test" in pl_module.hparams["info_dict"]["runs"]:
            labels = labels_of(pl_module.test_metrics)
            check_datasets("test", data.test_dataset_config, instantiate(data.test_dataset_config), labels)

    def teardown(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """Give memory back."""
        forget(pl_module)

    def on_load_checkpoint(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, checkpoint: Dict[str, Any]
    ) -> None:
        """Restart of a stock model: `setup` does not see that there is a checkpoint."""
        if acts(self, trainer, pl_module) and trainer.state.fn == "fit" and find_readout(pl_module) is None:
            check_restart(pl_module)


def acts(callback: lightning.Callback, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> bool:
    """Whether a callback of ours is the first of its kind, and the training one of NequIP's."""
    first = next(found for found in trainer.callbacks if isinstance(found, type(callback)))
    return callback is first and isinstance(pl_module, NequIPLightningModule)


def check_callbacks(callbacks: Iterable[Any], loss: Any) -> None:
    """Raise `InputError` for those that would take the readout's loss away, or test other weights than are fitted."""
    averaging = getattr(lightning.pytorch.callbacks, "WeightAveraging", ())
    for callback in callbacks:
        if isinstance(callback, averaging):
            raise InputError(
                f"{type(callback).__name__} tests other weights than those of the best checkpoint, to which the "
                "leverage is fitted: take _target_: nequip.train.EMALightningModule instead"
            )
        if type(callback).__name__ == "LossCoefficientScheduler" and _users(loss):
            known = list(metric_entries(loss))
            # NequIP takes no notice of others, and counts what is not named as switched off.
            unknown = {name for coefficients in callback.schedule.values() for name in coefficients} - set(known)
            if unknown:
                raise InputError(
                    f"LossCoefficientScheduler names {', '.join(sorted(unknown))}, which the loss does not have: its "
                    f"terms are {', '.join(known)}"
                )


def check_that_progress_shows(val_metrics: Any) -> None:
    """Raise `InputError` where the weighted sum has errors alone, which never change while the forces are fixed."""
    for manager in val_metrics:
        weighted = [manager[name] for name, (coeff, _) in metric_entries(manager).items() if coeff is not None]
        if not any(isinstance(metric, ForceFigure) for metric in weighted):
            raise InputError(
                "with 'forces: fixed' errors never change, but val_metrics weighs nothing else, so that the best "
                "checkpoint would be the first: add e2ip_nll: 1.0 (with the readout's name) to its coeffs"
            )


def _users(*parts: Optional[torch.nn.Module]) -> List[Union[ForceLoss, ForceFigure]]:
    """Losses and metrics of ours in parts of a training module."""
    modules = [module for part in parts if part is not None for module in part.modules()]
    return [module for module in modules if isinstance(module, (ForceLoss, ForceFigure))]


def bind(pl_module: torch.nn.Module) -> bool:
    """Give losses and metrics the settings of the model's readout; returns whether there is a readout.

    Raises
    ------
    InputError
        Where their options are not the model's, or the model has no readout.
    """
    readout = find_readout(pl_module)
    if readout is None:
        for user in _users(pl_module):
            raise InputError(f"{user.owner} needs a model with a readout, which this model does not have: {WRAP}")
        return False
    settings = settings_of(readout)
    for user in _users(pl_module):
        settings = user.bind(settings)
    # Packaged models carry a class of their own.
    readout.settings = type(readout.settings)(*settings)
    return True


def check_files_written(callbacks: List[lightning.Callback], readout: Optional[Readout]) -> None:
    """Raise `InputError` for xyz writers that are to write what the model does not have; NequIP notices in the test."""
    assert readout is not None
    own = [key.name for key in (*readout.family.output_keys(), LEVERAGE)]
    known = {key.name for family in families.table().values() for key in family.output_keys()}
    for fields in (callback.extra_fields for callback in callbacks if isinstance(callback, XYZFileWriter)):
        unknown = [name for name in fields if get_field_type(name, error_on_unregistered=False) is None]
        wrong = [name for name in fields if name in unknown or (name in known and name not in own)]
        if wrong:
            raise InputError(
                f"extra_fields of the xyz writer names {', '.join(wrong)}, which the model does not put out; "
                f"readout '{readout.settings.family}' puts out: {', '.join(own)}"
            )


def check_atom_types(model: torch.nn.Module, datasets: List[torch.utils.data.Dataset]) -> None:
    """Raise `InputError` where data number their atom types in another order than a model that is there already;
    NequIP compares the numbers of them at most."""
    models = [part for part in model.modules() if getattr(part, "is_graph_model", False)]
    expected = [list(cast(Iterable[str], part.type_names)) for part in models]
    for dataset in datasets:
        for transform in in_memory(dataset)[1]:
            found = list(getattr(transform, "model_type_names", ()))
            for names in expected:
                if found != names[: len(found)]:
                    raise InputError(
                        f"the data have the atom types [{', '.join(found)}], the model has [{', '.join(names)}], in "
                        f"this order: give chemical_species=[{','.join(names)}]"
                    )


class Labels(NamedTuple):
    """What metrics compare with references, beside forces, where the ones that are not finite are always left out.

    Attributes
    ----------
    wanted : tuple of str
        NequIP's names of fields.
    masked : tuple of str
        Those of which every metric leaves NaN out (``ignore_nan``).
    """

    wanted: Tuple[str, ...]
    masked: Tuple[str, ...]


_ENERGIES = Labels((AtomicDataDict.TOTAL_ENERGY_KEY,), ())

#: How names of metrics of a field begin.
_METRICS = {
    AtomicDataDict.TOTAL_ENERGY_KEY: ("total_energy_", "per_atom_energy_"),
    AtomicDataDict.STRESS_KEY: ("stress_",),
}


def labels_of(metrics: Optional[torch.nn.Module]) -> Labels:
    """Of the `MetricsManager` s in a part of a training module, by the names that NequIP and we give to metrics."""
    modules = [] if metrics is None else metrics.modules()
    managers = [module for module in modules if isinstance(module, MetricsManager)]
    entries = [entry for manager in managers for entry in metric_entries(manager).items()]
    wanted, masked = [], []
    for field, prefixes in _METRICS.items():
        ignored = [ignore for name, (_, ignore) in entries if name.startswith(prefixes)]
        wanted += [field] if ignored or field == AtomicDataDict.TOTAL_ENERGY_KEY else []
        masked += [field] if ignored and all(ignored) else []
    return Labels(tuple(wanted), tuple(masked))


def check_datasets(
    split: str,
    configs: List[Dict[str, Any]],
    datasets: List[torch.utils.data.Dataset],
    labels: Labels = _ENERGIES,
) -> None:
    """Raise `InputError` for frames without reference forces or one of the ``labels``, and for unknown species,
    positions and, but in test data, labels that are not finite, and atoms at the same place; names the file.

    Data that are not in memory are looked at by their first frame only.
    """
    for config, dataset in zip(configs, datasets, strict=True):
        where = f"{split} data ({file_of(config)})"
        numbered, transforms = in_memory(dataset)
        numbered = [(0, dataset[0])] if numbered is None else numbered
        known = known_species(transforms)
        for index, frame in numbered:
            numbers = frame.get(AtomicDataDict.ATOMIC_NUMBERS_KEY, torch.zeros(0, dtype=torch.long)).reshape(-1)
            positions = frame.get(AtomicDataDict.POSITIONS_KEY, torch.zeros(0, 3))
            check_atoms(numbers.numpy(), positions.numpy(), f"frame {index} of the {where}", known)
            cell, periodic = (frame.get(key) for key in (AtomicDataDict.CELL_KEY, AtomicDataDict.PBC_KEY))
            cell = None if cell is None else cell.reshape(3, 3).numpy()
            periodic = None if periodic is None else periodic.reshape(3).numpy()
            check_apart(positions.numpy(), cell, periodic, f"frame {index} of the {where}")
            if split != "test":
                for field in (field for field in labels.wanted if field not in labels.masked):
                    name = "energy" if field == AtomicDataDict.TOTAL_ENERGY_KEY else field
                    check_finite(frame.get(field, torch.zeros(1)).numpy(), f"frame {index} of the {where}", name)
        for field in (AtomicDataDict.FORCE_KEY, *labels.wanted):
            missing = [index for index, frame in numbered if field not in frame]
            if 0 < len(missing) < len(numbered):
                raise InputError(
                    f"{len(missing)} of {len(numbered)} frames of the {where} have no '{field}', the first is frame "
                    f"{missing[0]}: NequIP needs the same labels in all frames; remove these{_NAN.get(field, '')}"
                )
            if missing:
                check_reference(numbered[0][1], field, where)


#: Another way out for frames without a label.
_NAN = {
    AtomicDataDict.FORCE_KEY: " or give them NaN",
    AtomicDataDict.STRESS_KEY: ", or give them NaN and E2IPLoss and E2IPMetrics 'ignore_nan: {stress: true}'",
}


def _configurations(datasets: List[torch.utils.data.Dataset]) -> Iterator[Configuration]:
    """Of data in memory."""
    for dataset in datasets:
        for _, frame in in_memory(dataset)[0] or ():
            species = frame.get(AtomicDataDict.ATOMIC_NUMBERS_KEY, frame.get(AtomicDataDict.ATOM_TYPE_KEY))
            cell = frame.get(AtomicDataDict.CELL_KEY, torch.zeros(3, 3))
            if species is not None:
                positions = frame[AtomicDataDict.POSITIONS_KEY].numpy()
                forces = frame.get(AtomicDataDict.FORCE_KEY)
                yield Configuration(
                    species.reshape(-1).numpy(),
                    positions,
                    cell.reshape(3, 3).numpy(),
                    forces=None if forces is None else forces.numpy(),
                )


def check_restart(pl_module: NequIPLightningModule) -> None:
    """Raise `InputError` if this is a ``nequip-train`` restart whose config asks for another readout or loss."""
    config = _running_config()
    path = None if config is None else config.get("ckpt_path")
    if config is None or path is None:
        return
    saved = OmegaConf.create(pl_module.hparams["info_dict"]["training_module"])
    # Statistics are not computed anew: `auto` means what it meant in the run that is continued.
    model = _section(saved.get("model"), "E2IPModel")
    forces_rms = None if model is None else model.get("forces_rms")
    requested, found = (_settings(section, forces_rms) for section in (config.training_module, saved))
    if requested is None or found is None:
        differing = ["readout"] if requested is not found else []
    else:
        differing = requested.differences(found)
    if differing:
        described = [
            ", ".join(f"{name} {'stock' if side is None else side.describe(name)}" for name in differing)
            for side in (requested, found)
        ]
        raise InputError(
            f"the config asks for {described[0]}, but the checkpoint {path} was trained with {described[1]}. "
            "NequIP restarts with the model and loss of the checkpoint: restart with the options it was trained with, "
            "or start a new run from it (without ckpt_path) with 'nequip.model.ModelFromCheckpoint' "
            + ("as the inner model." if found is None else "as the model: its readout comes along.")
        )


def _running_config() -> Optional[DictConfig]:
    """The config of the running Hydra command as its user gave it; ``None`` outside of ``nequip-train``."""
    if not (HydraConfig.initialized() and GlobalHydra.instance().is_initialized()):
        return None
    hydra = HydraConfig.get()
    if hydra.job.config_name is None:
        return None
    # Overrides may hold interpolations of the config, which mean nothing among Hydra's own settings.
    overrides = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    config = compose(hydra.job.config_name, overrides=list(overrides))
    return config if "training_module" in config else None


def _settings(training_module: DictConfig, forces_rms: Optional[float]) -> Optional[Settings]:
    """What a config asks for, of model and loss; None without `E2IPModel`."""
    model = _section(training_module.get("model"), "E2IPModel")
    if model is None:
        return None
    family = model.get("readout") or families.DEFAULT
    names = [option.name for option in families.get(family).options]
    unit = model.get("force_unit")
    unit = resolve_force_unit(unit, forces_rms if wants_auto_unit(unit) else None)
    settings = Settings.of(family, {name: model.get(name) for name in names}, unit, model.get("forces"))
    loss = _section(training_module.get("loss"), "E2IPLoss")
    if loss is not None:
        settings = settings.with_aliases(loss.get("readout"), {name: loss.get(name) for name in names}, "E2IPLoss")
    return settings


def _section(node: Any, target: str) -> Optional[DictConfig]:
    """The outermost mapping of a config section whose ``_target_`` is this name of ours."""
    return next((found for found in _nodes(node) if found.get("_target_") == f"nequip_ext.{target}"), None)


def _nodes(node: Any) -> Iterator[DictConfig]:
    """Every mapping of a config section, outermost first."""
    if isinstance(node, DictConfig):
        yield node
    keys = node if isinstance(node, DictConfig) else range(len(node)) if isinstance(node, ListConfig) else ()
    for key in keys:
        try:
            child = node[key]
        except OmegaConfBaseException:  # ${training_data_stats:…}: unknown before the data has been read
            continue
        yield from _nodes(child)
