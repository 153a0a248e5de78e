"""Checks of a whole ``nequip-train`` command: its data files, and the checkpoint it restarts from.

NequIP rebuilds model and loss from the checkpoint and ignores what the config says about them; it opens
test files after training. Both cost a user the training, so both are looked at before it.
"""

from typing import Any, Dict, Iterator, List, Optional

import lightning
import torch
from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from nequip.data import AtomicDataDict
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from e2ip_plugins.errors import InputError
from e2ip_plugins.families.presets_tmp import get_preset, resolve_evidence, resolve_force_unit
from e2ip_plugins.readout.loss import force_loss_settings
from nequip_ext.reference import check_reference

_OPTIONS = ("preset", "evidence", "evidence_weight", "force_unit")


class E2IPInputCheck(lightning.Callback):
    """Ends a run before training if a data file lacks forces or energies, or if the checkpoint it
    restarts from has another readout than the config.

    Example usage in config:

    .. code-block:: yaml

        trainer:
          callbacks:
            - _target_: nequip_ext.E2IPInputCheck

    Raises
    ------
    InputError
        Before the first batch.
    """

    def setup(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """Look at the checkpoint, and through validation and test data; the statistics have seen those of training."""
        check_restart()
        data = trainer.datamodule
        if stage != "fit" or data is None:
            return
        check_datasets("validation", data.val_dataset_config, data.val_dataset)
        if "test" in pl_module.hparams["info_dict"]["runs"]:
            check_datasets("test", data.test_dataset_config, instantiate(data.test_dataset_config))


def check_datasets(split: str, configs: List[Dict[str, Any]], datasets: List[torch.utils.data.Dataset]) -> None:
    """Raise `InputError` for frames without reference forces or energies; names the file.

    Data that are not in memory are looked at by their first frame only.
    """
    for config, dataset in zip(configs, datasets, strict=True):
        where = f"{split} data ({config.get('file_path', config.get('_target_'))})"
        frames = getattr(dataset, "data_list", None)
        frames = frames if frames is not None else [dataset[0]]
        for field in (AtomicDataDict.FORCE_KEY, AtomicDataDict.TOTAL_ENERGY_KEY):
            missing = [index for index, frame in enumerate(frames) if field not in frame]
            if 0 < len(missing) < len(frames):
                raise InputError(
                    f"{len(missing)} of {len(frames)} frames of the {where} have no '{field}', the first is frame "
                    f"{missing[0]}: NequIP needs the same labels in all frames; remove these or give them NaN"
                )
            if missing:
                check_reference(frames[0], field, where)


def check_restart() -> None:
    """Raise `InputError` if this is a ``nequip-train`` restart whose config asks for another readout or loss."""
    config = _running_config()
    path = None if config is None else config.get("ckpt_path")
    if path is None:
        return
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=False, mmap=True)
    except FileNotFoundError:
        return  # NequIP says so
    saved = OmegaConf.create(checkpoint["hyper_parameters"]["info_dict"]["training_module"])
    requested, found = _readout(config.training_module), _readout(saved)
    if requested == found:
        return
    differing = sorted(key for key in {**requested, **found} if requested.get(key) != found.get(key))
    describe = [", ".join(f"{key} {side.get(key, 'none')}" for key in differing) for side in (requested, found)]
    raise InputError(
        f"the config asks for {describe[0]}, but the checkpoint {path} was trained with {describe[1]}. "
        "NequIP restarts with the model and loss of the checkpoint: restart with the options it was trained with, "
        "or start a new run from it (without ckpt_path) with 'nequip.model.ModelFromCheckpoint' as the inner model."
    )


def _running_config() -> Optional[DictConfig]:
    """The config of the running Hydra command as its user gave it; ``None`` outside of one."""
    if not (HydraConfig.initialized() and GlobalHydra.instance().is_initialized()):
        return None
    hydra = HydraConfig.get()
    if hydra.job.config_name is None:
        return None
    return compose(hydra.job.config_name, overrides=list(hydra.overrides.task))


def _readout(training_module: DictConfig) -> Dict[str, Any]:
    """What matters of readout and loss: ``readout`` 'e2ip' or 'stock', and the options with defaults filled in."""
    found: Dict[str, Any] = {}
    for key, target in (("readout", "nequip_ext.E2IPModel"), ("loss", "nequip_ext.E2IPLoss")):
        section = training_module.get("model" if key == "readout" else "loss")
        options = next((_options(node) for node in _nodes(section) if node.get("_target_") == target), None)
        found[key] = "stock" if options is None else "e2ip"
        if options is None:
            continue
        preset = options["preset"] or "default"
        if key == "readout":
            found["preset"] = preset
            found["evidence"] = resolve_evidence(get_preset(preset), options["evidence"])
            auto = str(options["force_unit"]).strip().lower() == "auto"
            found["force_unit"] = "auto" if auto else resolve_force_unit(options["force_unit"])
        else:
            settings = force_loss_settings(preset, options["evidence"], options["evidence_weight"])
            found["evidence_weight"] = settings.evidence_weight
    return found


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


def _options(node: DictConfig) -> Dict[str, Any]:
    return {name: node.get(name) for name in _OPTIONS}
