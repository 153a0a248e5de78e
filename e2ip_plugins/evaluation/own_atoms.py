"""The part of an energy's error vector that some of the atoms of a frame have."""

from typing import Any, Dict

import torch
from torch import Tensor

from e2ip_plugins.readout.readout import Readout


def own_vector(readout: Readout, call: Dict[str, Any], count: int) -> Tensor:
    """Return Σ_i ℓ s_i φ(z_i) over the first atoms of a frame (1, M) in eV.

    Where a frame is a cluster of a process's own atoms and copies of others around them, the sum of this over all
    processes is the error vector of the whole system.

    Parameters
    ----------
    readout : Readout
        Of a family that takes no forces.
    call : dict
        Of `e2ip_plugins.fitting.force_errors.last_call_of`, after a call with one frame.
    count : int
        Number of atoms, which come first.
    """
    support = call["support"]
    std = torch.linalg.vector_norm(call["outputs"]["forces_uncertainty"], dim=-1).to(support.whitened.dtype)
    others = (torch.arange(len(std), device=std.device) >= count).long()
    species = call["kinds"] % readout.leverage.species_per_head()
    grows = readout.family.takes_support
    return readout.leverage.energies(support, std, species, call["heads"], others, 2, grows)[:1]
