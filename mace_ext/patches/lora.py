"""`mace.modules.lora`: LoRA adapts the pretrained model; the readout is new and learns with all its weights."""

from functools import wraps

from mace_ext.readout import find_readout


def apply(module):
    """Patch ``inject_LoRAs``, which otherwise freezes the readout's weights under adapters of its own."""
    stock = module.inject_LoRAs

    @wraps(stock)
    def inject_LoRAs(model, *args, **kwargs):
        readout = find_readout(model)
        if readout is None:
            return stock(model, *args, **kwargs)
        del model.e2ip_readout
        model = stock(model, *args, **kwargs)
        model.e2ip_readout = readout
        return model

    module.inject_LoRAs = inject_LoRAs
