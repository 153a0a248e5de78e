"""The config of the running ``nequip-train``: check of a restart, because NequIP takes model and loss from the
checkpoint, whatever the config says; and what the loss leaves out, which the statistics are computed before."""

from typing import Any, Iterator, Optional

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from nequip.train import NequIPLightningModule
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from e2ip_plugins import families
from e2ip_plugins.errors import InputError
from e2ip_plugins.readout.settings import Settings, resolve_force_unit, wants_auto_unit


def check_restart(pl_module: NequIPLightningModule) -> None:
    """Raise `InputError` if this is a restart whose config asks for another readout or loss than the checkpoint has."""
    config = _running_config()
    path = None if config is None else config.get("ckpt_path")
    if config is None or path is None:
        return
    saved = OmegaConf.create(pl_module.hparams["info_dict"]["training_module"])
    # Statistics are not computed anew: `auto` means what it meant in the run that is continued.
    model = _section(saved.get("model"), "E2IPModel")
    forces_rms = None if model is None else model.get("forces_rms")
    settings = [_settings(section, forces_rms) for section in (config.training_module, saved)]
    requested, used = settings
    if requested is None or used is None:
        differing = ["readout"] if requested is not used else []
    else:
        differing = requested.differences(used)
    if differing:
        asked, trained = (
            ", ".join(f"{name} {'stock' if side is None else side.describe(name)}" for name in differing)
            for side in settings
        )
        raise InputError(
            f"the config asks for {asked}, but the checkpoint {path} was trained with {trained}. "
            "NequIP restarts with the model and loss of the checkpoint: restart with the options it was trained with, "
            "or start a new run from it (without ckpt_path) with 'nequip.model.ModelFromCheckpoint' "
            + ("as the inner model." if used is None else "as the model: its readout comes along.")
        )


def _running_config() -> Optional[DictConfig]:
    """Return the config of the running Hydra command as its user gave it; None outside of ``nequip-train``."""
    if not (HydraConfig.initialized() and GlobalHydra.instance().is_initialized()):
        return None
    hydra = HydraConfig.get()
    if hydra.job.config_name is None:
        return None
    # Overrides may hold interpolations of the config, which mean nothing among Hydra's own settings.
    overrides = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    config = compose(hydra.job.config_name, overrides=list(overrides))
    return config if "training_module" in config else None


def loss_leaves_out_nan() -> bool:
    """Return whether the loss in the config of the running ``nequip-train`` leaves out NaN of any label."""
    config = _running_config()
    if config is None:
        return False
    sections = [part.get("ignore_nan") for part in _mappings(config.training_module.get("loss"))]
    values = [list(part.values()) if isinstance(part, DictConfig) else [part] for part in sections]
    return any(value is True for part in values for value in part)


def _settings(training_module: DictConfig, forces_rms: Optional[float]) -> Optional[Settings]:
    """Return what a config asks for, of model and loss; None without `E2IPModel`."""
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
    """Return the outermost mapping of a config section whose ``_target_`` is this name of ours."""
    return next((part for part in _mappings(node) if part.get("_target_") == f"nequip_ext.{target}"), None)


def _mappings(node: Any) -> Iterator[DictConfig]:
    """Yield every mapping of a config section, outermost first."""
    if isinstance(node, DictConfig):
        yield node
    keys = node if isinstance(node, DictConfig) else range(len(node)) if isinstance(node, ListConfig) else ()
    for key in keys:
        try:
            child = node[key]
        except OmegaConfBaseException:  # ${training_data_stats:…}: unknown before the data has been read
            continue
        yield from _mappings(child)
