"""Configs of models, as checkpoints and packages keep them: models in models, at any depth."""

import copy
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Optional

import torch
import yaml
from nequip.model.saved_models.package import _suppress_package_importer_exporter_warnings

from e2ip_plugins.errors import InputError

#: Target of a config whose model has a readout of its own.
MODEL = "nequip_ext.E2IPModel"

#: Builders of models that have been trained, with the argument that names their file.
TRAINED = {"ModelFromCheckpoint": "checkpoint_path", "ModelFromPackage": "package_path"}

Config = Dict[str, Any]


def builder(config: Config) -> str:
    """Return the name of the function that a config calls, without its module."""
    return str(config["_target_"]).rpartition(".")[2]


def _is_model(value: Any) -> bool:
    return isinstance(value, dict) and "_target_" in value


def sections(config: Config) -> Iterator[Config]:
    """Yield the config of a model and those of all models in it, outermost first."""
    yield config
    for value in filter(_is_model, config.values()):
        yield from sections(value)


def source_of(config: Config) -> Optional[Path]:
    """Return the checkpoint or package that a model in a config is read from; None where all of it is new."""
    return next((Path(part[TRAINED[builder(part)]]) for part in sections(config) if builder(part) in TRAINED), None)


def replaced(config: Config, change: Callable[[Config], Config], inside_readout: bool = True) -> Config:
    """Return a config of a model with ``change`` applied to it and then to the models in it.

    Parameters
    ----------
    config : dict
    change : callable
        Takes the config of a model and returns another.
    inside_readout : bool
        Whether also to change the models in a config whose target is `MODEL`.
    """
    config = dict(change(config))
    if config["_target_"] == MODEL and not inside_readout:
        return config
    return {
        name: replaced(value, change, inside_readout) if _is_model(value) else value for name, value in config.items()
    }


def from_checkpoints(config: Config, path: Path, inside_readout: bool = False) -> Config:
    """Return a config in which models that are read from checkpoints are built by the configs in these checkpoints.

    ``path`` is the file that has the config, for messages. Forces of a readout whose inner model is changed
    (``inside_readout``) are no longer fixed, because its model is no longer a trained one.
    """

    def change(part: Config) -> Config:
        while builder(part) == "ModelFromCheckpoint":
            inner = read_checkpoint(existing(Path(part["checkpoint_path"]), path))
            part = copy.deepcopy(inner["hyper_parameters"]["model"])
        return part

    changed = replaced(config, change, inside_readout)
    if not inside_readout:
        return changed

    def let_move(part: Config) -> Config:
        fixed = part["_target_"] == MODEL and part.get("forces") == "fixed" and source_of(part) is None
        return {**part, "forces": "likelihood"} if fixed else part

    return replaced(changed, let_move)


def from_packages(config: Config, path: Path) -> Config:
    """Return a config in which models that are read from packages with a readout are built by the configs in these.

    Packages without a readout stay. What is built has the weights of neither: those of the checkpoint follow.
    """

    def change(part: Config) -> Config:
        if builder(part) != "ModelFromPackage":
            return part
        package = existing(Path(part["package_path"]), path)
        module = (package_config(package) or {}).get("training_module") or {}
        if not _is_model(module.get("model")):
            return part
        inner = from_packages(from_checkpoints(module["model"], package, inside_readout=True), package)
        return inner if any(section["_target_"] == MODEL for section in sections(inner)) else part

    return replaced(config, change)


def existing(source: Path, path: Path) -> Path:
    """Return the file that a model comes from; raise `InputError` where it does not exist."""
    if not source.is_file():
        raise InputError(f"{path}: its model comes from {source}, which does not exist")
    return source


def read_checkpoint(path: Path) -> Dict[str, Any]:
    """Read a checkpoint of ``nequip-train``; `InputError` for other files."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=False)
        _ = checkpoint["hyper_parameters"]["info_dict"]["training_module"]["_target_"], checkpoint["state_dict"]
    # Unpickling raises whatever goes wrong in it.
    except Exception as error:
        raise InputError(f"{path}: is no checkpoint of nequip-train ({type(error).__name__}: {error})") from error
    return checkpoint


def package_config(path: Path) -> Any:
    """Return the config of the training that a package comes from."""
    with _suppress_package_importer_exporter_warnings():
        return yaml.safe_load(torch.package.PackageImporter(str(path)).load_text("model", "config.yaml"))
