"""``e2ip fit`` for NequIP: a checkpoint or package, with or without a readout, gets one with a fitted leverage.

``e2ip update`` fits the constants of such a file anew.
"""

import copy
from pathlib import Path
from typing import Any, Callable, Dict, Optional, Sequence, Tuple

from hydra.utils import get_class
from nequip.model.modify_utils import only_apply_persistent_modifiers
from nequip.train import NequIPLightningModule
from nequip.train.lightning import _SOLE_MODEL_KEY
from nequip.utils import get_current_code_versions
from nequip.utils.global_state import set_global_state

from e2ip_plugins.errors import InputError
from e2ip_plugins.files import save
from e2ip_plugins.fitting.batches import OnProgress, to_standard_error
from e2ip_plugins.fitting.fit import check_update, is_constant
from e2ip_plugins.fitting.readout_file import fitted_readout
from e2ip_plugins.fitting.records import Records, Work, records_of
from e2ip_plugins.fitting.report import FitReport
from e2ip_plugins.predictions.labelled import LabelledFrame
from nequip_ext.fitting.package import fit_package, wrap_package
from nequip_ext.fitting.passes import fit_frames
from nequip_ext.model.checkpoints import averages_for, explained, leverages, rebuild, refuse_head
from nequip_ext.model.configs import (
    MODEL,
    Config,
    existing,
    from_checkpoints,
    read_checkpoint,
    replaced,
    sections,
    source_of,
)
from nequip_ext.model.elements import types_of
from nequip_ext.model.readout import find_readout, settings_of

_LOSS = "nequip_ext.E2IPLoss"

#: Packages whose versions a checkpoint names, because its readout is of them.
_OURS = ("e2ip_plugins", "nequip_ext")


def fit_file(
    model: Path,
    training: Sequence[LabelledFrame],
    validation: Sequence[LabelledFrame],
    output: Path,
    *,
    head: Optional[str] = None,
    device: str = "cpu",
    batch_size: int = 10,
    on_progress: OnProgress = to_standard_error,
    work: Optional[Work] = None,
) -> FitReport:
    """Write a model whose uncertainty follows its leverage; energies and forces stay as they are, to the last bit.

    A readout in mode ``coupled`` becomes one in mode ``leverage``. A stock model gets a readout with one isotropic Σ0
    per species.

    Parameters
    ----------
    model : Path
        NequIP checkpoint ``….ckpt`` or package ``….nequip.zip``.
    training, validation : sequence of LabelledFrame
        Of species that the model's types are of (`nequip_ext.model.elements.types_of`).
    output : Path
        ``….nequip.zip`` for a package that has a readout; ``….ckpt`` for everything else, for a stock package one that
        goes on reading that. Replaced as a whole or not at all.
    head : str, optional
        For MACE; an error here.
    device : str
    batch_size : int
        Frames.
    on_progress : callable
        Takes lines about the progress.
    work : Work, optional
        Keeps what is finished, so that a killed fit goes on; or a part of the fit, which writes no model.

    Raises
    ------
    InputError
        For all that is wrong with files and frames.
    """
    refuse_head(head)
    set_global_state()
    with records_of(work) as records:
        settings: Any = (device, batch_size, on_progress, records)
        if model.name.endswith(".zip"):
            report = fit_package(model, training, validation, output, *settings)
            if report is not None:
                return report
        return _fit_checkpoint(model, training, validation, output, *settings)


def _fit_checkpoint(
    model: Path,
    training: Sequence[LabelledFrame],
    validation: Sequence[LabelledFrame],
    output: Path,
    device: str,
    batch_size: int,
    on_progress: OnProgress,
    records: Optional[Records],
) -> FitReport:
    """Write a checkpoint with a fitted leverage, of a checkpoint or of a stock package."""
    checkpoint = open_checkpoint(model, output)
    with only_apply_persistent_modifiers(persistent_only=True), explained(model):
        twin, hparams, is_new = _in_mode_leverage(checkpoint, model)
    evaluated = twin.to(device).eval().evaluation_model[_SOLE_MODEL_KEY]
    readout: Any = find_readout(evaluated)
    if is_new:
        for trunk in readout.trunks:
            trunk.make_constant()
    with explained(model):
        report = fit_frames(evaluated, training, validation, batch_size, types_of(model), on_progress, records)
    if report.part is None:
        write_checkpoint(checkpoint, twin, hparams, output, weights=is_constant(readout))
    return report


def update_file(
    model: Path,
    frames: Sequence[LabelledFrame],
    output: Path,
    *,
    head: Optional[str] = None,
    device: str = "cpu",
    batch_size: int = 10,
    on_progress: OnProgress = to_standard_error,
) -> FitReport:
    """Write a model with a fitted leverage whose constants are fitted to new frames.

    What it knows of its training set stays, and so do energies and forces, to the last bit. A package becomes a
    package, a checkpoint a checkpoint.

    Parameters and what is raised: see `fit_file`.
    """
    refuse_head(head)
    set_global_state()
    if model.name.endswith(".zip"):
        report = fit_package(model, None, frames, output, device, batch_size, on_progress)
        if report is not None:
            return report
    checkpoint = open_checkpoint(model, output)
    with only_apply_persistent_modifiers(persistent_only=True), explained(model):
        kind, hparams = training_module(checkpoint, model)
        twin = rebuild(kind, hparams, checkpoint)
    evaluated = twin.to(device).eval().evaluation_model[_SOLE_MODEL_KEY]
    readout = fitted_readout(find_readout(evaluated), model, "to update")
    check_update(readout, frames, model)
    with explained(model):
        report = fit_frames(evaluated, None, frames, batch_size, types_of(model), on_progress)
    write_checkpoint(checkpoint, twin, hparams, output, weights=False)
    return report


def open_checkpoint(model: Path, output: Path) -> Dict[str, Any]:
    """Return a checkpoint, or of a package one that reads it, to be changed and written to ``output``."""
    checkpoint = wrap_package(model) if model.name.endswith(".zip") else read_checkpoint(model)
    if output.suffix != ".ckpt":
        raise InputError(
            f"--output {output}: what is made of {model} is a checkpoint: give it a name that ends with .ckpt"
        )
    return checkpoint


def write_checkpoint(
    checkpoint: Dict[str, Any], twin: NequIPLightningModule, hparams: Dict[str, Any], output: Path, weights: bool
) -> None:
    """Write a checkpoint with the readout of a training module in evaluation; ``weights``: not its leverage alone."""
    checkpoint["state_dict"].update(_state_of_readout(twin.cpu(), weights))
    versions = get_current_code_versions(verbose=False)
    # NequIP compares them when it opens the file: those of the training stay for everything but the readout.
    hparams["info_dict"].setdefault("versions", {}).update({name: versions[name] for name in _OURS})
    checkpoint["hyper_parameters"] = hparams
    save(checkpoint, output)


def _in_mode_leverage(checkpoint: Dict[str, Any], path: Path) -> Tuple[NequIPLightningModule, Dict[str, Any], bool]:
    """Return a training module whose readout is in mode ``leverage``, its hyperparameters, and whether it is new.

    A stock model's checkpoint gets the state of a new readout.
    """
    kind, hparams = training_module(checkpoint, path)
    twin = rebuild(kind, hparams, checkpoint)
    readout = find_readout(twin.model)
    hparams = copy.deepcopy(hparams)
    if readout is None:
        drop_optimiser(checkpoint, path, "fit")
        add_readout(checkpoint, twin, hparams, {"evidence": "leverage"})
    else:
        settings = settings_of(readout)
        if settings.with_leverage(str(path)) != settings:
            change_models(hparams, lambda config: _with_leverage(config, path))
    return rebuild(kind, hparams, checkpoint), hparams, readout is None


def training_module(checkpoint: Dict[str, Any], path: Path, free_standing: bool = False) -> Tuple[Any, Dict[str, Any]]:
    """Return the class and the hyperparameters of a checkpoint's training module.

    The config of a model that is read from another checkpoint becomes what is in that one. With ``free_standing`` this
    is done inside a readout's config, too, whose forces are then no longer fixed.
    """
    hparams = copy.deepcopy(dict(checkpoint["hyper_parameters"]))
    change_models(hparams, lambda config: from_checkpoints(config, path, free_standing))
    source = source_of(hparams["model"])
    if source is not None:
        existing(source, path)
    return get_class(hparams["info_dict"]["training_module"]["_target_"]), hparams


def change_models(hparams: Dict[str, Any], change: Callable[[Config], Config]) -> None:
    """Change the config of the model, in the arguments of the training module and in NequIP's notes about the run.

    A loss of ours that names mode ``coupled`` gets mode ``leverage``.
    """
    for section in (hparams, hparams["info_dict"]["training_module"]):
        section["model"] = change(dict(section["model"]))
        loss = section.get("loss")
        if loss is not None and loss.get("_target_") == _LOSS and loss.get("evidence") == "coupled":
            section["loss"] = {**loss, "evidence": "leverage"}


def _with_leverage(config: Config, path: Path) -> Config:
    if not any(section["_target_"] == MODEL for section in sections(config)):
        raise InputError(
            f"{path}: its readout comes from {source_of(config)}, so that its evidence mode cannot be changed in a "
            "checkpoint: package it with nequip-package and fit the package"
        )
    return replaced(config, lambda part: {**part, "evidence": "leverage"} if part["_target_"] == MODEL else part)


def drop_optimiser(checkpoint: Dict[str, Any], path: Path, verb: str) -> None:
    """Drop the state of an optimiser that knows other weights than the changed model has; ``verb`` is the command's.

    Raises
    ------
    InputError
        For a schedule-free optimiser, which has a part in the weights.
    """
    if "schedulefree_optimizer_state_dict" in checkpoint:
        raise InputError(
            f"{path}: its weights are those of a schedule-free optimiser, which must know all weights of the model: "
            f"package it with nequip-package and {verb} the package"
        )
    for name in ("optimizer_states", "lr_schedulers"):
        checkpoint.pop(name, None)


def add_readout(
    checkpoint: Dict[str, Any], stock: NequIPLightningModule, hparams: Dict[str, Any], options: Dict[str, Any]
) -> None:
    """Give the model of a checkpoint a new readout, in its state and its hyperparameters.

    ``stock`` is its training module, ``options`` are those of `nequip_ext.E2IPModel`.
    """
    change_models(hparams, lambda config: {"_target_": MODEL, "seed": 0, **options, "model": config})
    wrapped = type(stock)(**copy.deepcopy(hparams))
    state = wrapped.state_dict()
    state.update({name: value for name, value in stock.state_dict().items() if not name.startswith("ema.")})
    state.update(averages_for(wrapped, stock))
    checkpoint["state_dict"] = state


def _state_of_readout(twin: NequIPLightningModule, weights: bool) -> Dict[str, Any]:
    """Return entries of a state dictionary for the leverages of a training module in evaluation.

    With ``weights``, for the complete readouts.
    """
    state: Dict[str, Any] = {}
    for prefix in leverages(twin):
        prefix = prefix if not weights else prefix.removesuffix("leverage.")
        state.update({name: value for name, value in twin.state_dict().items() if name.startswith(prefix)})
    if weights and hasattr(twin, "ema"):
        for number, (name, value) in enumerate(twin.model.named_parameters()):
            if f"model.{name}" in state:
                state[f"ema.ema_weight_{number}"] = value.detach()
    return state
