"""The training loss: MACE's own loss with its force term replaced by that of a predictive family."""

import copy
from typing import Any, Optional

import torch
from mace.tools import TensorDict
from mace.tools.torch_geometric import Batch
from torch import Tensor, nn

from e2ip_plugins.processes import distributed
from e2ip_plugins.readout.loss import add_gradient, force_loss
from e2ip_plugins.readout.settings import Settings
from mace_ext.training.labels import atom_weights, reference_forces


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
        """Return the scalar loss.

        The force term is as if frames without forces, and frames or forces of weight zero, had no atoms, and so are
        atoms with a NaN or infinite reference force. MACE's own force term counts them as zeros.
        """
        if self.settings.forces == "fixed":
            return self._force_term(ref, pred, ddp)
        # The stock force term of atoms whose forces are equal on both sides is exactly zero, whatever its form.
        others = copy.copy(ref)
        if self.settings.forces == "host":
            finite = torch.isfinite(ref["forces"]).all(dim=-1, keepdim=True)
            others["forces"] = torch.where(finite, ref["forces"], pred["forces"].detach())
            return add_gradient(self.stock(ref=others, pred=pred, ddp=ddp), self._force_term(ref, pred, ddp))
        others["forces"] = torch.zeros_like(ref["forces"])
        value = self.stock(ref=others, pred={**pred, "forces": others["forces"]}, ddp=ddp)
        return value + self._force_term(ref, pred, ddp)

    def _force_term(self, ref: Batch, pred: TensorDict, ddp: Optional[bool]) -> Tensor:
        forces = pred["forces"].detach() if self.settings.detached else pred["forces"]
        per_atom, counted = force_loss(self.family, reference_forces(ref), forces, pred)
        weight: Any = self.stock.forces_weight
        return weight * _mean(atom_weights(ref) * per_atom, counted, ddp)

    def __repr__(self) -> str:
        options = "".join(f", {name}={value}" for name, value in self.settings.options.items())
        return f"{self.__class__.__name__}({self.stock}, readout={self.settings.family}{options})"


def _mean(values: Tensor, counted: Tensor, ddp: Optional[bool]) -> Tensor:
    """Return the mean of values (N,) over the atoms that count (N,), 0 where none does.

    In a distributed training it is this process' share, as MACE's ``reduce_loss`` returns it: the mean over the
    processes, which their gradients are averaged to, is the mean over the atoms of all of them.
    """
    count, processes = counted.sum(), 1
    if ddp is not False and distributed():
        processes = torch.distributed.get_world_size()
        torch.distributed.all_reduce(count)
    return processes * values.sum() / count.clamp(min=1)
