"""`mace.tools.multihead_tools`: in a training with a readout, labels that frames do not have weigh nothing."""

from mace_ext.patches import wrap
from mace_ext.training.options import has_readout


def apply(module):
    """Patch ``dict_head_to_dataclass``, which a training calls for every MACE head before it reads data."""
    wrap(module, dict_head_to_dataclass=dict_head_to_dataclass)


def dict_head_to_dataclass(stock, head, head_name, args):
    """Return the stock description of a MACE head; from now on graphs are as `mace_ext.patches.atomic_data` says."""
    from mace_ext.training.labels import weigh_missing_labels

    weigh_missing_labels(not has_readout(args))
    return stock(head, head_name, args)
