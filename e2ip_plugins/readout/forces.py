"""Forces that follow from coefficients which are energies, for families whose members are whole potentials."""

from typing import List, Optional

import torch
from torch import Tensor


def forces_of(energies: Tensor, positions: Tensor, create_graph: bool) -> Tensor:
    """Return minus the gradients of C energies in the positions (N, 3C): x, y and z of the first, of the second, ….

    The graph of the energies is kept: NequIP and MACE differentiate it for their forces. Each energy takes a backward
    pass: PyTorch's batched one goes neither through TorchScript nor through NequIP's tracer, and is no faster on a CPU.

    Parameters
    ----------
    energies : (N, C)
        Atoms' shares of each energy.
    positions : (N, 3)
        Positions that the energies were computed from.
    create_graph : bool
        Whether the forces can be differentiated.
    """
    gradients: List[Tensor] = []
    for k in range(energies.shape[1]):
        gradient: Optional[Tensor] = torch.autograd.grad(
            [energies[:, k].sum()], [positions], retain_graph=True, create_graph=create_graph
        )[0]
        assert gradient is not None
        gradients.append(gradient)
    return -torch.cat(gradients, dim=1)
