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

    With ``forces: host`` the loss is the stock one, to the last bit, for everything but the readout, whose gradient is
    that of its force term for the forces as they are. With ``forces: fixed`` there is nothing but that force term.

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
        #: Read by `mace_ext.training.metrics`, too.
        self.family = settings.build()

    def forward(self, ref: Batch, pred: TensorDict, ddp: Optional[bool] = None) -> Tensor:
        """Scalar loss; atoms with a NaN or infinite reference force count like atoms of weight zero."""
        if self.settings.forces == "host":
            return self._beside_stock(ref, pred, ddp)
        if self.settings.forces == "fixed":
            return self._of_readout(ref, pred, pred["forces"].detach(), ddp)
        # With equal forces on both sides the stock force term is exactly zero, whatever its form.
        no_forces = torch.zeros_like(ref["forces"])
        without = copy.copy(ref)
        without["forces"] = no_forces
        others = self.stock(ref=without, pred={**pred, "forces": no_forces}, ddp=ddp)

        return others + self._of_readout(ref, pred, pred["forces"], ddp)

    def _of_readout(self, ref: Batch, pred: TensorDict, forces: Tensor, ddp: Optional[bool]) -> Tensor:
        per_atom, _ = force_loss(self.family, ref["forces"], forces, pred)
        weight = (ref.weight * ref.forces_weight)[ref.batch]
        return self.stock.forces_weight * reduce_loss(weight * per_atom, ddp)

    def _beside_stock(self, ref: Batch, pred: TensorDict, ddp: Optional[bool]) -> Tensor:
        forces, reference = pred["forces"].detach(), ref["forces"]
        finite = torch.isfinite(reference).all(dim=-1, keepdim=True)
        masked = copy.copy(ref)
        masked["forces"] = torch.where(finite, reference, forces)
        loss = self.stock(ref=masked, pred=pred, ddp=ddp)
        own = self._of_readout(ref, pred, forces, ddp)
        # Zero, with the readout's gradient; schedulers and the choice of checkpoints see the stock loss.
        return loss + torch.nan_to_num(own - own.detach()) if own.requires_grad else loss

    def __repr__(self) -> str:
        options = "".join(f", {name}={value}" for name, value in self.settings.options.items())
        return f"{self.__class__.__name__}({self.stock}, readout={self.settings.family}{options})"
