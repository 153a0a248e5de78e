"""`mace.tools.checkpoint`: a checkpoint of another readout ends the run; the leverage is fitted after the last load.

The stock code would load what fits, swallow the error about the rest and start over at epoch 0.
"""

import sys
from typing import Any, Dict, Optional

from e2ip_plugins.errors import InputError
from e2ip_plugins.readout.settings import Settings
from mace_ext.model.readout import find_readout
from mace_ext.patches import wrap

#: Key of `Settings.to_dict` in checkpoints.
KEY = "e2ip_settings"
_WHERE = "the checkpoint to restart from"


def apply(module):
    """Patch two methods of ``CheckpointBuilder`` and one of the handler; checkpoints carry the readout's settings."""
    wrap(module.CheckpointBuilder, create_checkpoint=create_checkpoint, load_checkpoint=load_checkpoint)
    wrap(module.CheckpointHandler, load_latest=load_latest)


def create_checkpoint(stock, state):
    """Return the stock checkpoint with the readout's settings."""
    checkpoint, readout = stock(state), find_readout(state.model)
    if readout is not None:
        checkpoint[KEY] = readout.settings.to_dict()
    return checkpoint


def load_checkpoint(stock, state, checkpoint, strict):
    """Load a checkpoint, or end the run if its readout differs."""
    try:
        readout = find_readout(state.model)
        check_readout(checkpoint, None if readout is None else readout.settings)
    except InputError as error:
        print(f"mace_run_train: error: {error}", file=sys.stderr)
        # No Exception: mace_run_train would catch that and train from scratch.
        raise SystemExit(2) from error
    stock(state, checkpoint, strict)


def load_latest(stock, self, state, *args, **kwargs):
    """Load the latest checkpoint; after a training also fit the leverage, because MACE then saves the model."""
    epoch = stock(self, state, *args, **kwargs)
    training = getattr(self, "e2ip_training", None)
    if training is not None:
        from mace_ext.fitting.after_training import fit_trained

        fit_trained(state.model, training)
    return epoch


def check_readout(checkpoint: Dict[str, Any], wanted: Optional[Settings]) -> None:
    """Raise `InputError` unless a model with settings ``wanted`` (None: a stock model) can go on from a checkpoint."""
    saved = Settings.from_dict(checkpoint[KEY], _WHERE) if KEY in checkpoint else None
    if saved is None and wanted is None:
        return
    if saved is None or wanted is None:
        difference = "was trained " + ("without --readout" if saved is None else f"with --readout {saved.family}")
    else:
        names = wanted.differences(saved)
        if not names:
            return
        listed = ", ".join(f"{name} {saved.describe(name)} there, {wanted.describe(name)} here" for name in names)
        difference = f"has another readout ({listed})"
    raise InputError(f"{_WHERE} {difference}; use the options of the first run, or another --name or --checkpoints_dir")
