"""`mace.cli.plot_train`: `mace_plot_train` without ``--heads`` works under pandas 2, for every model."""

from functools import wraps


def apply(module):
    """Patch ``plot``, which averages all columns by epoch: pandas 2 raises an error for the names of the heads."""
    stock = module.plot

    @wraps(stock)
    def plot(data, *args, **kwargs):
        if kwargs.get("heads") is None and "head" in data:
            data = data.drop(columns="head")
        return stock(data, *args, **kwargs)

    module.plot = plot
