"""`mace.cli.plot_train`: `mace_plot_train` without ``--heads`` works under pandas 2, for every model."""

from mace_ext.patches import wrap


def apply(module):
    """Patch ``plot``, which averages all columns by epoch: pandas 2 raises an error for the names of the heads."""
    wrap(module, plot=plot)


def plot(stock, data, *args, **kwargs):
    """Plot without the column of heads if none was asked for."""
    if kwargs.get("heads") is None and "head" in data:
        data = data.drop(columns="head")
    return stock(data, *args, **kwargs)
