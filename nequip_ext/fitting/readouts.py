"""Readout files for NequIP: ``e2ip export-readout`` and ``e2ip attach`` for checkpoints and packages."""

from pathlib import Path
from typing import Any, Dict

import nequip
from nequip.model.modify_utils import only_apply_persistent_modifiers
from nequip.train import NequIPLightningModule
from nequip.train.lightning import _SOLE_MODEL_KEY
from nequip.utils.global_state import set_global_state

from e2ip_plugins.fitting.readout_file import Base, ReadoutFile, fitted_readout, hash_of, refuse_readout
from nequip_ext.fitting.file import add_readout, drop_optimiser, open_checkpoint, training_module, write_checkpoint
from nequip_ext.fitting.package import Package
from nequip_ext.model.checkpoints import explained, rebuild
from nequip_ext.model.configs import read_checkpoint, source_of
from nequip_ext.model.readout import find_readout, graph_readouts, settings_of


def readout_of(model: Path) -> ReadoutFile:
    """Return what a readout file is to have of a checkpoint or package.

    Raises
    ------
    InputError
        For files of another kind, and models whose readout is missing or was never fitted.
    """
    set_global_state()
    with only_apply_persistent_modifiers(persistent_only=True), explained(model):
        if model.name.endswith(".zip"):
            evaluated = Package.read(model).models["eager"][_SOLE_MODEL_KEY]
        else:
            checkpoint = read_checkpoint(model)
            drop_optimiser(checkpoint, model, "export the readout of")
            evaluated = _evaluated(rebuild(*training_module(checkpoint, model), checkpoint))
        readout = fitted_readout(find_readout(evaluated), model, "to export")
        return ReadoutFile.of(readout, settings_of(readout), base_of(evaluated), nequip.__version__)


def attach(model: Path, file: ReadoutFile, path: Path, output: Path) -> None:
    """Write a base model with the readout of a file; energies and forces stay what they are, to the last bit.

    Parameters
    ----------
    model : Path
        Stock checkpoint or package.
    file : ReadoutFile
    path : Path
        Where it was read, for messages.
    output : Path
        A checkpoint; of a package, one that goes on reading that. Complete, or as it was.

    Raises
    ------
    InputError
        For files of another kind, other models than the one that the readout was fitted on, and models with a readout.
    """
    set_global_state()
    checkpoint = open_checkpoint(model, output)
    with only_apply_persistent_modifiers(persistent_only=True), explained(model):
        kind, hparams = training_module(checkpoint, model)
        stock = rebuild(kind, hparams, checkpoint)
        refuse_readout(find_readout(stock.model), model)
        drop_optimiser(checkpoint, model, "attach to")
        add_readout(checkpoint, stock, hparams, _options(file, hparams))
        # Last, because it exchanges the module's weights for their averages.
        file.check_base(path, model, base_of(_evaluated(stock)))
        twin = rebuild(kind, hparams, checkpoint)
    readout = find_readout(_evaluated(twin))
    assert readout is not None
    file.put_on(readout, path)
    write_checkpoint(checkpoint, twin, hparams, output, weights=True)


def base_of(model: Any) -> Base:
    """Return what tells the stock model inside a model from others, whether of a checkpoint or of a package."""
    readouts = tuple(f"{name}." for name in graph_readouts(model))
    state = {name: values for name, values in model.state_dict().items() if not name.startswith(readouts)}
    dtype = str(model.model_dtype).removeprefix("torch.")
    return Base("nequip", hash_of(state), dtype, tuple(model.type_names))


def _evaluated(module: NequIPLightningModule) -> Any:
    return module.eval().evaluation_model[_SOLE_MODEL_KEY]


def _options(file: ReadoutFile, hparams: Dict[str, Any]) -> Dict[str, Any]:
    """Return the options of `nequip_ext.E2IPModel` that make the readout of a file."""
    settings = file.settings
    # Only a model that comes from a file can be fixed.
    fixed = settings.forces == "fixed" and source_of(hparams["model"]) is None
    return {
        "readout": settings.family,
        "force_unit": settings.force_unit,
        "forces": None if fixed else settings.forces,
        **{name: settings.options[name] for name in settings.given},
    }
