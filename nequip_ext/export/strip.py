"""``e2ip strip`` for NequIP: the stock model out of a checkpoint or package with a readout."""

import copy
import inspect
from pathlib import Path
from typing import Any, Dict

import torch
from hydra.utils import get_method
from nequip.model.modify_utils import only_apply_persistent_modifiers
from nequip.model.saved_models.package import data_dict_from_package
from nequip.nn._graph_mixin import GraphModuleMixin
from nequip.train import NequIPLightningModule
from nequip.train.lightning import _SOLE_MODEL_KEY
from nequip.utils.global_state import set_global_state

from e2ip_plugins.errors import InputError
from e2ip_plugins.files import save
from nequip_ext.fitting.file import change_models, drop_optimiser, training_module
from nequip_ext.fitting.package import Package
from nequip_ext.model.checkpoints import averages_for, explained, rebuild
from nequip_ext.model.configs import MODEL, from_packages, read_checkpoint, source_of
from nequip_ext.model.readout import find_readout

#: NequIP's classes that replace ours, with the arguments that both know.
_OURS = {
    "nequip_ext.E2IPLoss": "nequip.train.EnergyForce{}Loss",
    "nequip_ext.E2IPMetrics": "nequip.train.EnergyForce{}Metrics",
    "nequip_ext.E2IPDataStatisticsManager": "nequip.data.CommonDataStatisticsManager",
}
#: Networks of ours, which stay.
_BACKBONES = ("nequip_ext.PaiNNModel", "nequip_ext.AlphaNetModel")

_FIELDS = ("total_energy", "per_atom_energy", "forces", "stress")


def strip_file(model: Path, output: Path) -> None:
    """Write a checkpoint or package without its readout: stock NequIP's, which predicts the same to the last bit.

    What has a network of `nequip_ext.model.backbones` in it still needs this plugin.

    In a checkpoint, NequIP's own loss, metrics and statistics take the place of this plugin's, callbacks of this plugin
    are left out, and so is the state of the optimiser: training from it begins anew.

    Raises
    ------
    InputError
        For files of another kind, and models without a readout.
    """
    set_global_state()
    if model.name.endswith(".zip"):
        _strip_package(model, output)
    else:
        _strip_checkpoint(model, output)


def _strip_checkpoint(model: Path, output: Path) -> None:
    checkpoint = read_checkpoint(model)
    kind, hparams = training_module(checkpoint, model, free_standing=True)
    with only_apply_persistent_modifiers(persistent_only=True), explained(model):
        twin = rebuild(kind, hparams, checkpoint)
        if find_readout(twin) is None:
            raise InputError(f"{model}: has no readout to be stripped of")
        drop_optimiser(checkpoint, model, "strip")
        hparams = _stock(hparams)
        package = source_of(hparams["model"])
        change_models(hparams, lambda config: _stock(from_packages(config, model)))
        versions = hparams["info_dict"].get("versions", {})
        hparams["info_dict"]["versions"] = {
            name: version for name, version in versions.items() if name not in ("nequip_ext", "e2ip_plugins")
        }
        stock = kind(**copy.deepcopy(hparams))
        checkpoint["state_dict"] = _without_readout(twin, stock)
        checkpoint["hyper_parameters"] = hparams
        if package is not None and not _same(twin, rebuild(kind, hparams, checkpoint), package):
            raise InputError(
                f"{model}: its readout comes with the model of {package}, which the installed NequIP cannot build "
                "anew: package the checkpoint with nequip-package and strip the package"
            )
    save(checkpoint, output)


def _same(twin: NequIPLightningModule, stock: NequIPLightningModule, package: Path) -> bool:
    """Return whether ``stock`` has no readout and predicts for the example in a package what ``twin`` does."""
    if find_readout(stock) is not None:
        return False
    models = [module.eval().evaluation_model[_SOLE_MODEL_KEY] for module in (twin, stock)]
    one, two = (model(data_dict_from_package(str(package))) for model in models)
    return all(torch.equal(one[name], two[name]) for name in two if name.startswith(_FIELDS))


def _stock(config: Any) -> Any:
    """Return a config without anything of this plugin."""
    if isinstance(config, (list, tuple)):
        return type(config)(_stock(value) for value in config if not _is_callback(value))
    if not isinstance(config, dict):
        return config
    target = str(config.get("_target_", ""))
    if target == MODEL:
        inner = {**config["model"], **{k: config[k] for k in ("model_dtype", "compile_mode") if config.get(k)}}
        return _stock(inner)
    if target in _OURS:
        coeffs = config.get("coeffs") or {}
        stock_target = _OURS[target].format("Stress" if any(name.startswith("stress") for name in coeffs) else "")
        known = inspect.signature(get_method(stock_target)).parameters
        arguments = {name: value for name, value in config.items() if name in known and value is not None}
        arguments["coeffs"] = {name: value for name, value in coeffs.items() if name.startswith(_FIELDS)}
        if all(value is None for value in arguments["coeffs"].values()):
            del arguments["coeffs"]  # without weights, NequIP's own
        return {"_target_": stock_target, **arguments}
    return {name: None if _is_callback(value) else _stock(value) for name, value in config.items()}


def _is_callback(config: Any) -> bool:
    """Return whether a config is of a part of this plugin that nothing replaces, a callback for example."""
    target = str(config.get("_target_", "")) if isinstance(config, dict) else ""
    return target.startswith("nequip_ext.") and target not in (MODEL, *_OURS, *_BACKBONES)


def _without_readout(twin: NequIPLightningModule, stock: NequIPLightningModule) -> Dict[str, Any]:
    """Return the state of a training module in one whose model has no readout."""
    before, state = twin.state_dict(), stock.state_dict()
    state.update({name: before[name] for name in state if name in before and not name.startswith(("ema.", "loss."))})
    state.update(averages_for(stock, twin))
    return state


def _strip_package(model: Path, output: Path) -> None:
    package = Package.read(model)
    if not output.name.endswith(".nequip.zip"):
        raise InputError(f"--output {output}: what is made of {model} is a package: its name must end with .nequip.zip")
    for models in package.models.values():
        graph_model: Any = models[_SOLE_MODEL_KEY]  # of a class in the package
        if find_readout(graph_model) is None:
            raise InputError(f"{model}: has no readout to be stripped of")
        force_module = graph_model.model
        sequence = force_module.func
        names = [name for name in ("e2ip_tap", "e2ip_last_tap", "e2ip_readout") if name in sequence._modules]
        added = {key for name in names for key in _added(sequence._modules[name])}
        for name in names:
            del sequence._modules[name]
        for outer in (*sequence._modules.values(), sequence, force_module, graph_model):
            for irreps in (getattr(outer, "irreps_in", {}), getattr(outer, "irreps_out", {})):
                for key in added & set(irreps):
                    del irreps[key]
    package.write(output)


def _added(module: GraphModuleMixin) -> set:
    return set(module.irreps_out) - set(module.irreps_in)
