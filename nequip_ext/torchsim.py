"""`TorchSimModel` under the path that users import."""

from nequip_ext.inference.torchsim import TorchSimModel

__all__ = ["TorchSimModel"]
