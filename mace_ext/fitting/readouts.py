"""Readout files for MACE: ``e2ip export-readout`` and ``e2ip attach`` for ``.model`` files."""

from pathlib import Path
from typing import Any

import mace

from e2ip_plugins.files import save
from e2ip_plugins.fitting.readout_file import Base, ReadoutFile, fitted_readout, hash_of, refuse_readout
from mace_ext.model.files import open_file, precision_of, species_of
from mace_ext.model.foundation import without_readout
from mace_ext.model.model import add_readout
from mace_ext.model.readout import find_readout


def readout_of(model: Path) -> ReadoutFile:
    """Return what a readout file is to have of a ``.model`` file.

    Raises
    ------
    InputError
        For files of another kind, and models whose readout is missing or was never fitted.
    """
    net = open_file(model)
    readout = fitted_readout(find_readout(net), model, "to export")
    return ReadoutFile.of(readout, readout.settings, base_of(net), mace.__version__)


def attach(model: Path, file: ReadoutFile, path: Path, output: Path) -> None:
    """Write a base model with the readout of a file; energies and forces stay what they are, to the last bit.

    Parameters
    ----------
    model : Path
        A stock ``.model`` file.
    file : ReadoutFile
    path : Path
        Where it was read, for messages.
    output : Path
        Complete, or as it was.

    Raises
    ------
    InputError
        For files of another kind, other models than the one that the readout was fitted on, and models with a readout.
    """
    net = open_file(model)
    refuse_readout(find_readout(net), model)
    file.check_base(path, model, base_of(net))
    with precision_of(net):
        add_readout(net, file.settings)
        file.put_on(net.e2ip_readout, path)
    save(net, output)


def base_of(net: Any) -> Base:
    """Return what tells the stock model inside a model from others."""
    dtype = str(next(net.parameters()).dtype).removeprefix("torch.")
    weights = hash_of(without_readout(net).state_dict())
    return Base("mace", weights, dtype, tuple(species_of(net)), tuple(net.heads))
