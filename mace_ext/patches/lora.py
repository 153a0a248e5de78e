"""`mace.modules.lora`: LoRA adapts the pretrained model; the readout is new and learns with all its weights."""

from mace_ext.model.readout import find_readout
from mace_ext.patches import wrap


def apply(module):
    """Patch ``inject_LoRAs``, which otherwise freezes the readout's weights under adapters of its own."""
    wrap(module, inject_LoRAs=inject_LoRAs)


def inject_LoRAs(stock, model, *args, **kwargs):
    """Inject adapters into everything except the readout, which is taken off meanwhile."""
    readout = find_readout(model)
    if readout is None:
        return stock(model, *args, **kwargs)
    del model.e2ip_readout
    model = stock(model, *args, **kwargs)
    model.e2ip_readout = readout
    return model
