"""``e2ip fit`` for NequIP: a checkpoint or package, with or without a readout, gets one with a fitted leverage."""

import copy
from pathlib import Path
from typing import Any, Callable, Dict, Optional, Sequence

import torch
from hydra.utils import get_class
from nequip.model.modify_utils import only_apply_persistent_modifiers
from nequip.train import NequIPLightningModule
from nequip.train.lightning import _SOLE_MODEL_KEY
from nequip.utils.global_state import set_global_state

from e2ip_plugins.errors import InputError
from e2ip_plugins.files import save
from e2ip_plugins.fitting.fit import is_constant
from e2ip_plugins.fitting.report import FitReport
from e2ip_plugins.predictions.labelled import Frame
from nequip_ext.fitting.package import fit_package, wrap_package
from nequip_ext.fitting.passes import batches_of, fit_model
from nequip_ext.model.checkpoints import averages_for, explained, leverages, rebuild, refuse_head
from nequip_ext.model.elements import types_of
from nequip_ext.model.readout import find_readout, settings_of

MODEL, _LOSS = "nequip_ext.E2IPModel", "nequip_ext.E2IPLoss"


def fit_file(
    model: Path,
    training: Sequence[Frame],
    validation: Sequence[Frame],
    output: Path,
    *,
    head: Optional[str] = None,
    device: str = "cpu",
    batch_size: int = 10,
) -> FitReport:
    """Write a model whose uncertainty follows its leverage; energies and forces stay as they are, to the last bit.

    A readout in mode ``coupled`` becomes one in mode ``leverage``. A stock model gets a readout with one isotropic Σ0
    per species.

    Parameters
    ----------
    model : Path
        NequIP checkpoint ``….ckpt`` or package ``….nequip.zip``.
    training, validation : sequence of Frame
        Of species that the model's types are of (`nequip_ext.model.elements.types_of`).
    output : Path
        ``….nequip.zip`` for a package that has a readout; ``….ckpt`` for everything else, for a stock package one that
        goes on reading that. Replaced as a whole or not at all.
    head : str, optional
        For MACE; an error here.
    device : str
    batch_size : int
        Frames.

    Raises
    ------
    InputError
        For all that is wrong with files and frames.
    """
    refuse_head(head)
    set_global_state()
    if model.name.endswith(".zip"):
        found = fit_package(model, training, validation, output, device, batch_size)
        if found is not None:
            return found
        checkpoint = wrap_package(model)
    else:
        checkpoint = read_checkpoint(model)
    if output.suffix != ".ckpt":
        raise InputError(
            f"--output {output}: what is made of {model} is a checkpoint: give it a name that ends with .ckpt"
        )
    kind, hparams = training_module(checkpoint, model)
    with only_apply_persistent_modifiers(persistent_only=True), explained(model):
        twin = rebuild(kind, hparams, checkpoint)
        stock = find_readout(twin.model) is None
        hparams = copy.deepcopy(hparams)
        if stock:
            if "schedulefree_optimizer_state_dict" in checkpoint:
                raise InputError(
                    f"{model}: its weights are those of a schedule-free optimiser, which must know all weights of the "
                    "model: package it with nequip-package and fit the package"
                )
            _change_models(hparams, _wrapped)
            checkpoint["state_dict"] = _with_readout(twin, kind(**copy.deepcopy(hparams)))
            # Of an optimiser that does not know the readout.
            for name in ("optimizer_states", "lr_schedulers"):
                checkpoint.pop(name, None)
        else:
            _change_models(hparams, lambda config: _in_mode_leverage(config, twin, model))
        twin = rebuild(kind, hparams, checkpoint)
    twin.to(device).eval()
    evaluated = twin.evaluation_model[_SOLE_MODEL_KEY]
    readout: Any = find_readout(evaluated)
    if stock:
        for trunk in readout.trunks:
            trunk.make_constant()
    constant = is_constant(readout)
    with explained(model):
        batches = batches_of(evaluated, training, validation, device, batch_size, types_of(model))
    report = fit_model(evaluated, *batches, constant=constant)
    checkpoint["state_dict"].update(_state_of_readout(twin.cpu(), weights=constant))
    checkpoint["hyper_parameters"] = hparams
    save(checkpoint, output)
    return report


def read_checkpoint(path: Path) -> Dict[str, Any]:
    """A checkpoint of ``nequip-train``; `InputError` for files that are none."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=False)
        _ = checkpoint["hyper_parameters"]["info_dict"]["training_module"]["_target_"], checkpoint["state_dict"]
    # Unpickling lets through whatever goes wrong in it.
    except Exception as error:
        raise InputError(f"{path}: is no checkpoint of nequip-train ({type(error).__name__}: {error})") from error
    return checkpoint


def training_module(checkpoint: Dict[str, Any], path: Path, free_standing: bool = False) -> Any:
    """Its class and hyperparameters; models that are read from a checkpoint on their part are as they are there.

    With ``free_standing`` so is what a readout is around, of which nothing is then said to be fixed.
    """
    hparams = copy.deepcopy(dict(checkpoint["hyper_parameters"]))

    def inlined(config: Dict[str, Any]) -> Dict[str, Any]:
        while _reads_checkpoint(config):
            inner = Path(config["checkpoint_path"])
            if not inner.is_file():
                raise InputError(f"{path}: its model comes from {inner}, which is not there")
            config = copy.deepcopy(read_checkpoint(inner)["hyper_parameters"]["model"])
        if free_standing and config["_target_"] == MODEL and _reads_checkpoint(config["model"]):
            return {**config, "model": inlined(dict(config["model"])), "forces": "likelihood"}
        return config

    _change_models(hparams, inlined)
    return get_class(hparams["info_dict"]["training_module"]["_target_"]), hparams


def _reads_checkpoint(config: Dict[str, Any]) -> bool:
    return config["_target_"].rpartition(".")[2] == "ModelFromCheckpoint"


def _change_models(hparams: Dict[str, Any], change: Callable[[Dict[str, Any]], Dict[str, Any]]) -> None:
    """The config of the model stands in the arguments of the training module and in what NequIP notes about the run."""
    for section in (hparams, hparams["info_dict"]["training_module"]):
        section["model"] = change(dict(section["model"]))
        loss = section.get("loss")
        if loss is not None and loss.get("_target_") == _LOSS and loss.get("evidence") == "coupled":
            section["loss"] = {**loss, "evidence": "leverage"}


def _wrapped(config: Dict[str, Any]) -> Dict[str, Any]:
    return {"_target_": MODEL, "seed": 0, "evidence": "leverage", "model": config}


def _in_mode_leverage(config: Dict[str, Any], twin: Any, path: Path) -> Dict[str, Any]:
    readout: Any = find_readout(twin.model)
    settings = settings_of(readout)
    if settings.with_leverage(str(path)) == settings:
        return config
    if config["_target_"] != MODEL:
        source = config.get("package_path", config["_target_"])
        raise InputError(
            f"{path}: its readout comes from {source}, so that its evidence mode cannot be changed in a checkpoint: "
            "package it with nequip-package and fit the package"
        )
    return {**config, "evidence": "leverage"}


def _with_readout(stock: NequIPLightningModule, wrapped: NequIPLightningModule) -> Dict[str, Any]:
    """State of a stock training module in one whose model has a readout besides."""
    state = wrapped.state_dict()
    state.update({name: value for name, value in stock.state_dict().items() if not name.startswith("ema.")})
    state.update(averages_for(wrapped, stock))
    return state


def _state_of_readout(twin: Any, weights: bool) -> Dict[str, Any]:
    """Entries of a state dictionary for the leverages of a training module in evaluation, or for the whole readouts."""
    state: Dict[str, Any] = {}
    for prefix in leverages(twin):
        prefix = prefix if not weights else prefix.removesuffix("leverage.")
        state.update({name: value for name, value in twin.state_dict().items() if name.startswith(prefix)})
    if weights and hasattr(twin, "ema"):
        for number, (name, value) in enumerate(twin.model.named_parameters()):
            if f"model.{name}" in state:
                state[f"ema.ema_weight_{number}"] = value.detach()
    return state
