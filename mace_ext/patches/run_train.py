"""`mace.cli.run_train`: while a training with a readout runs, labels that frames do not have weigh nothing."""

from mace_ext.patches import wrap
from mace_ext.training.options import has_readout


def apply(module):
    """Patch ``run``, which all ways to start a training call."""
    wrap(module, run=run)


def run(stock, args):
    """Train, with graphs as `mace_ext.patches.atomic_data` makes them."""
    from mace_ext.training.labels import reading_labels

    with reading_labels(has_readout(args)):
        stock(args)
