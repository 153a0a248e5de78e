"""`mace.tools.model_script_utils`: build the stock model, then give it the readout."""

from functools import wraps

from mace_ext.options import has_readout
from mace_ext.readout import find_readout


def apply(module):
    """Patch ``configure_model``."""
    stock = module.configure_model

    @wraps(stock)
    def configure_model(args, train_loader, atomic_energies, model_foundation=None, *rest, **kwargs):
        if has_readout(args):
            from mace_ext.configure import configure_e2ip_model

            return configure_e2ip_model(stock, args, train_loader, atomic_energies, model_foundation, *rest, **kwargs)
        if find_readout(model_foundation) is not None:
            from mace_ext.foundation import without_readout

            model_foundation = without_readout(model_foundation)
        return stock(args, train_loader, atomic_energies, model_foundation, *rest, **kwargs)

    module.configure_model = configure_model
