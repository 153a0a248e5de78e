"""`mace.tools.model_script_utils`: build the stock model, then give it the readout."""

from functools import wraps


def apply(module):
    """Patch ``configure_model`` and the ``extract_config_mace_model`` that it calls."""
    stock = module.configure_model
    extract = module.extract_config_mace_model

    @wraps(extract)
    def extract_config_mace_model(model):
        # Of an e2ip foundation model the stock class is built, which knows nothing of the readout.
        config = extract(model)
        config.pop("e2ip_config", None)
        return config

    @wraps(stock)
    def configure_model(args, train_loader, atomic_energies, model_foundation=None, *rest, **kwargs):
        if getattr(args, "readout", None) == "e2ip":
            from mace_ext.configure import configure_e2ip_model

            return configure_e2ip_model(stock, args, train_loader, atomic_energies, model_foundation, *rest, **kwargs)
        if hasattr(model_foundation, "e2ip_head"):
            from mace_ext.configure import without_readout

            model_foundation = without_readout(model_foundation)
        return stock(args, train_loader, atomic_energies, model_foundation, *rest, **kwargs)

    module.configure_model = configure_model
    module.extract_config_mace_model = extract_config_mace_model
