"""SchNetPack's PaiNN, of the standard size, and what it takes as input. To be installed beside this project and NequIP:

pip install --no-deps schnetpack==2.1.1 && pip install dirsync fasteners h5py torch-ema
"""

import typing

import numpy as np
import torch
import torch.utils.data.dataloader
from ase import Atoms
from ase.neighborlist import neighbor_list

# SchNetPack 2.1.1 imports a name that torch 2.13 has no more.
torch.utils.data.dataloader.T_co = typing.TypeVar("T_co", covariant=True)

import schnetpack  # noqa: E402
from schnetpack import properties as keys  # noqa: E402

CUTOFF = 5.0


def make_model() -> torch.nn.Module:
    """Return a network of 128 channels, three layers, 20 radial functions: 589 057 weights, of 100 elements."""
    torch.set_default_dtype(torch.float32)
    radial, smooth = schnetpack.nn.BesselRBF(n_rbf=20, cutoff=CUTOFF), schnetpack.nn.CosineCutoff(CUTOFF)
    energy = schnetpack.atomistic.Atomwise(n_in=128, output_key="energy")
    return schnetpack.model.NeuralNetworkPotential(
        representation=schnetpack.representation.PaiNN(
            n_atom_basis=128, n_interactions=3, radial_basis=radial, cutoff_fn=smooth
        ),
        input_modules=[schnetpack.atomistic.PairwiseDistances()],
        output_modules=[energy, schnetpack.atomistic.Forces()],
    )


def inputs_of(frame: Atoms) -> dict[str, torch.Tensor]:
    """Return one molecule, without periodic boundaries, as a model takes it."""
    i, j = neighbor_list("ij", frame, CUTOFF)
    return {
        keys.Z: torch.as_tensor(frame.numbers),
        keys.R: torch.as_tensor(frame.positions, dtype=torch.float32),
        keys.idx_i: torch.as_tensor(i),
        keys.idx_j: torch.as_tensor(j),
        keys.offsets: torch.zeros(len(i), 3),
        keys.n_atoms: torch.tensor([len(frame)]),
        keys.cell: torch.zeros(1, 3, 3),
        keys.pbc: torch.zeros(3, dtype=torch.bool),
    }


def batch_of(frames: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return several inputs as one."""
    batch = {key: torch.cat([frame[key] for frame in frames]) for key in frames[0]}
    first = np.cumsum([0, *(int(frame[keys.n_atoms]) for frame in frames[:-1])])
    for key in (keys.idx_i, keys.idx_j):
        batch[key] = torch.cat([frame[key] + n for frame, n in zip(frames, first, strict=True)])
    return batch | {keys.idx_m: torch.repeat_interleave(batch[keys.n_atoms])}
