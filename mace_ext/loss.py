"""The training loss: MACE's own loss with its force term replaced by that of a predictive family."""

import copy
from typing import Optional

import torch
from mace.modules.loss import reduce_loss
from mace.tools import TensorDict
from mace.tools.torch_geometric import Batch
from torch import Tensor, nn

from e2ip_plugins.readout.loss import force_loss
from e2ip_plugins.readout.settings import Settings


class E2IPLoss(nn.Module):
    """Energy, stress and virials terms of a stock loss; forces as in `e2ip_plugins.readout.loss.force_loss`.

    Parameters
    ----------
    stock : nn.Module
        A loss of `mace.modules.loss` with a ``forces_weight``, which keeps its meaning.
    settings : Settings
        The readout's. Its force unit is not read here: the model's outputs carry it.
    """

    def __init__(self, stock: nn.Module, settings: Settings) -> None:
        super().__init__()
        self.stock = stock
        self.settings = settings
        #: Read by `mace_ext.metrics`, too.
        self.family = settings.build()

    def forward(self, ref: Batch, pred: TensorDict, ddp: Optional[bool] = None) -> Tensor:
        """Scalar loss; atoms with a NaN or infinite reference force count like atoms of weight zero."""
        # With equal forces on both sides the stock force term is exactly zero, whatever its form.
        no_forces = torch.zeros_like(ref["forces"])
        without = copy.copy(ref)
        without["forces"] = no_forces
        others = self.stock(ref=without, pred={**pred, "forces": no_forces}, ddp=ddp)

        per_atom, _ = force_loss(self.family, ref["forces"], pred["forces"], pred)
        weight = (ref.weight * ref.forces_weight)[ref.batch]
        return others + self.stock.forces_weight * reduce_loss(weight * per_atom, ddp)

    def __repr__(self) -> str:
        options = "".join(f", {name}={value}" for name, value in self.settings.options.items())
        return f"{self.__class__.__name__}({self.stock}, readout={self.settings.family}{options})"
