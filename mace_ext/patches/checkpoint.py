"""`mace.tools.checkpoint`: a checkpoint of another readout ends the run.

The stock code would load what fits, swallow the error of the rest and start over at epoch 0.
"""

import sys
from functools import wraps


def apply(module):
    """Patch the two methods of ``CheckpointBuilder``; checkpoints carry the readout's settings."""
    builder = module.CheckpointBuilder
    stock_create, stock_load = builder.create_checkpoint, builder.load_checkpoint

    @wraps(stock_create)
    def create_checkpoint(state):
        checkpoint = stock_create(state)
        if hasattr(state.model, "e2ip_config"):
            checkpoint["e2ip_config"] = dict(state.model.e2ip_config)
        return checkpoint

    @wraps(stock_load)
    def load_checkpoint(state, checkpoint, strict):
        difference = readout_difference(checkpoint.get("e2ip_config"), getattr(state.model, "e2ip_config", None))
        if difference:
            print(f"mace_run_train: error: {difference}", file=sys.stderr)
            # Not an Exception: mace_run_train would catch that and train on from scratch.
            raise SystemExit(2)
        stock_load(state, checkpoint, strict)

    builder.create_checkpoint = staticmethod(create_checkpoint)
    builder.load_checkpoint = staticmethod(load_checkpoint)


def readout_difference(saved, wanted):
    """What keeps a checkpoint with settings ``saved`` from being loaded into a model with ``wanted``, or None."""
    way_out = "use the options of the first run, or another --name or --checkpoints_dir"
    if saved is None and wanted is not None:
        return f"the checkpoint to restart from was trained without --readout e2ip; {way_out}"
    if saved is not None and wanted is None:
        return f"the checkpoint to restart from was trained with --readout e2ip; {way_out}"
    if saved is None or saved == wanted:
        return None
    names = [name for name in wanted if saved.get(name) != wanted[name]]
    listed = ", ".join(f"{name} {saved.get(name)} there, {wanted[name]} here" for name in names)
    return f"the checkpoint to restart from has another e2ip readout ({listed}); {way_out}"
