"""The e²IP model of MACE: the stock model with a readout, and its files."""

from e2ip_plugins.formats import READOUTS


def __getattr__(name: str) -> None:
    """Refuse ``.model`` files of earlier formats, which look here for what makes the model."""
    if name in ("open_model", "empty_model", "ScaleShiftMACE"):
        READOUTS.check(None, "this model")
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
