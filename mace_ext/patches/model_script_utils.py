"""`mace.tools.model_script_utils`: build the stock model, then give it the readout."""

import logging

from mace_ext.patches import wrap
from mace_ext.training.options import has_readout


def apply(module):
    """Patch ``configure_model``."""
    wrap(module, configure_model=configure_model)


def configure_model(stock, args, train_loader, atomic_energies, model_foundation=None, *rest, **kwargs):
    """Build the model with its readout; of an e²IP foundation model the stock function gets the stock part."""
    from mace_ext.model.foundation import without_readout
    from mace_ext.training.configure import configure_e2ip_model

    if has_readout(args):
        return configure_e2ip_model(stock, args, train_loader, atomic_energies, model_foundation, *rest, **kwargs)
    plain = without_readout(model_foundation)
    if plain is not model_foundation:
        logging.warning("the foundation model's readout is left out: this training has no --readout")
    return stock(args, train_loader, atomic_energies, plain, *rest, **kwargs)
