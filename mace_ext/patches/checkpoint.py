"""`mace.tools.checkpoint`: a checkpoint of another readout ends the run; the leverage is fitted after the last load.

The stock code would load what fits, swallow the error of the rest and start over at epoch 0.
"""

import sys
from typing import Any, Dict, Optional

from e2ip_plugins.errors import InputError
from e2ip_plugins.readout.settings import Settings, outdated
from mace_ext.model.readout import find_readout
from mace_ext.patches import wrap

#: What checkpoints carry: `Settings.to_dict`.
KEY = "e2ip_settings"
_WHERE = "the checkpoint to restart from"


def apply(module):
    """Patch two methods of ``CheckpointBuilder`` and one of the handler; checkpoints carry the readout's settings."""
    for function in (create_checkpoint, load_checkpoint):
        wrap(module.CheckpointBuilder, function.__name__, function)
    wrap(module.CheckpointHandler, "load_latest", load_latest)


def create_checkpoint(stock, state):
    """With the readout's settings."""
    checkpoint, readout = stock(state), find_readout(state.model)
    if readout is not None:
        checkpoint[KEY] = readout.settings.to_dict()
    return checkpoint


def load_checkpoint(stock, state, checkpoint, strict):
    """Ends the run for a readout that differs."""
    try:
        readout = find_readout(state.model)
        check_readout(checkpoint, None if readout is None else readout.settings)
    except InputError as error:
        print(f"mace_run_train: error: {error}", file=sys.stderr)
        # Not an Exception: mace_run_train would catch that and train on from scratch.
        raise SystemExit(2) from error
    stock(state, checkpoint, strict)


def load_latest(stock, self, state, *args, **kwargs):
    """Followed by the fit of the leverage where a training has ended: MACE now saves and evaluates this model."""
    epoch = stock(self, state, *args, **kwargs)
    training = getattr(self, "e2ip_training", None)
    if training is not None:
        from mace_ext.fitting.after_training import fit_trained

        fit_trained(state.model, training)
    return epoch


def check_readout(checkpoint: Dict[str, Any], wanted: Optional[Settings]) -> None:
    """`InputError` unless a model with the settings ``wanted`` (None: a stock model) can go on from a checkpoint."""
    if "e2ip_config" in checkpoint:
        raise InputError(outdated(_WHERE))
    saved = Settings.from_dict(checkpoint[KEY], _WHERE) if KEY in checkpoint else None
    if saved is None and wanted is None:
        return
    if saved is None or wanted is None:
        found = "without --readout" if saved is None else f"with --readout {saved.family}"
        difference = f"was trained {found}"
    else:
        names = wanted.differences(saved)
        if not names:
            return
        listed = ", ".join(f"{name} {saved.describe(name)} there, {wanted.describe(name)} here" for name in names)
        difference = f"has another readout ({listed})"
    raise InputError(f"{_WHERE} {difference}; use the options of the first run, or another --name or --checkpoints_dir")
