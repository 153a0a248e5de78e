"""PaiNN and AlphaNet as NequIP models: `nequip_ext.PaiNNModel`, `nequip_ext.AlphaNetModel`; docs/howto/backbones.md.

`models` builds them from modules that act on NequIP's dictionaries. These travel inside packaged models, so that they
import no more of NequIP than `nequip_ext.model.readout` does.
"""
