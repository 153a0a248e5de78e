"""`TorchSimModel` under the path that users import."""

from mace_ext.inference.torchsim import TorchSimModel

__all__ = ["TorchSimModel"]
