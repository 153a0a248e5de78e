"""``e2ip strip`` for MACE: the stock model out of one with a readout."""

from pathlib import Path

from e2ip_plugins.errors import InputError
from e2ip_plugins.files import save
from mace_ext.model.files import open_file
from mace_ext.model.foundation import without_readout
from mace_ext.model.readout import find_readout


def strip_file(model: Path, output: Path) -> None:
    """Write a ``.model`` file without its readout: stock MACE's, which predicts the same to the last bit.

    Raises
    ------
    InputError
        For files of another kind, and models without a readout.
    """
    net = open_file(model)
    if find_readout(net) is None:
        raise InputError(f"{model}: has no readout to be stripped of")
    save(without_readout(net), output)
