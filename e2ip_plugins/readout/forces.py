"""Forces that follow from coefficients which are energies: what families of whole potentials are made of."""

from typing import List, Optional

import torch
from torch import Tensor


def forces_of(energies: Tensor, positions: Tensor, create_graph: bool) -> Tensor:
    """Minus the gradients of C energies in the positions (N, 3C): x, y and z of the first, then of the second, ….

    The graph of the energies is kept: hosts differentiate the same one for their forces. One backward pass each:
    PyTorch's batched one goes neither through TorchScript, of which MACE's models have much, nor through the tracer of
    NequIP, and is no faster on a CPU.

    Parameters
    ----------
    energies : (N, C)
        Atoms' shares of each energy.
    positions : (N, 3)
        What they were computed from.
    create_graph : bool
        Whether the forces can be differentiated.
    """
    found: List[Tensor] = []
    for k in range(energies.shape[1]):
        gradient: Optional[Tensor] = torch.autograd.grad(
            [energies[:, k].sum()], [positions], retain_graph=True, create_graph=create_graph
        )[0]
        assert gradient is not None
        found.append(gradient)
    return -torch.cat(found, dim=1)
