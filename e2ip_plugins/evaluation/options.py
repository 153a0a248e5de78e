"""What an evaluation takes and says: the interface of a model, options, and how far the work is."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, NamedTuple, Optional, Protocol, Sequence, Tuple, Type

import numpy as np
import torch
from ase import Atoms
from torch import Tensor

from e2ip_plugins.families.interface import Family
from e2ip_plugins.keys import ENERGY_ERROR_VECTOR, FRAME_OUTPUTS, OutputKey
from e2ip_plugins.scores.calibration import Calibration
from e2ip_plugins.unfinished import digest_of


class Cluster(NamedTuple):
    """What a cluster of atoms gives those in its middle, in eV and Å.

    Attributes
    ----------
    energy : float
        Sum of the energies of n atoms.
    forces : (n, 3)
        Minus the gradient of the energy of the cluster: right where it reaches far enough.
    virial : (3, 3)
        Minus the derivative in a strain of ``energy``.
    """

    energy: float
    forces: np.ndarray
    virial: np.ndarray

    @classmethod
    def of(cls, energies: Tensor, positions: Tensor, count: int) -> "Cluster":
        """Return it from energies of all atoms (N,) with their graph to positions (N, 3)."""
        mine = energies[:count].sum()
        (of_mine,) = torch.autograd.grad(mine, positions, retain_graph=True)
        (of_all,) = torch.autograd.grad(energies.sum(), positions)
        virial = -positions.detach().mT @ of_mine
        forces = -of_all[:count]
        return cls(float(mine), forces.cpu().double().numpy(), (0.5 * (virial + virial.mT)).cpu().double().numpy())


class BatchModel(Protocol):
    """A model that takes batches: what the adapters of MACE and NequIP open, entry points ``e2ip_plugins.evaluate``.

    Attributes
    ----------
    family : subclass of Family, or None
        None for a model without a readout.
    uq_model : str or None
        Name of the readout, where it is known.
    species : sequence of str
        Chemical symbols that the model knows.
    reads : sequence of str
        Keys of info and per-atom columns that the model reads from a frame beside the structure.
    dtype : str
        Name of the model's precision.
    warning : str
        Warning for the user, or an empty string.
    cutoff : float
        In Å.
    strictly_local : bool
        Whether an atom's leverage does not depend on its neighbours' features.
    vector_length : int
        Numbers of an error vector of energies; 0 where these have no error bars.
    """

    family: Optional[Type[Family]]
    uq_model: Optional[str]
    species: Sequence[str]
    reads: Sequence[str]
    dtype: str
    warning: str
    cutoff: float
    strictly_local: bool
    vector_length: int

    def graph(self, atoms: Atoms) -> Tuple[Any, int]:
        """Return a frame with its neighbours, and their number."""

    def evaluate(self, graphs: Sequence[Any], stress: bool) -> Dict[str, Tensor]:
        """Return the results of F frames with N atoms, as one batch, in eV and Å.

        ``energy`` (F,), ``forces`` (N, 3), with ``stress`` also ``stress`` (F, 3, 3); every output key of the family,
        and the leverage if the model has one, (N, …); `FRAME_OUTPUTS` (F, …), 0 where they were not fitted.
        """

    def uncertainties(self, graphs: Sequence[Any], own: Optional[int] = None) -> Dict[str, Tensor]:
        """Return the uncertainties among these results, without energies and forces, of which none are computed.

        With ``own``, the error vector is that of the first so many atoms of one frame, see
        `e2ip_plugins.evaluation.own_atoms.own_vector`. Not of families that take forces, nor of compiled files:
        `InputError`.
        """

    def cluster(self, graph: Any, count: int) -> Cluster:
        """Return energy, forces and virial of the first ``count`` atoms of a frame that is not periodic."""

    def feature_gradient(self, graph: Any) -> Tensor:
        """Return ∂(sum of the first atom's invariant features)/∂(positions) of a frame (N, 3), in 1/Å."""


@dataclass(frozen=True)
class EvaluateOptions:
    """Options of ``e2ip evaluate`` that decide the result.

    Attributes
    ----------
    batch_atoms, batch_edges : int or None
        Largest numbers in a batch; a larger frame is a batch by itself.
    calibration : Calibration, optional
        Calibration of the uncertainties.
    stress : bool
        Whether fully periodic frames get a stress.
    covariances : bool
        Whether columns of 3×3 tensors are written.
    energy_vectors : bool
        Whether the error vectors of energies are written.
    part : (int, int)
        i of n: the i-th of n equal pieces of the file, from 1.
    skip_bad : bool
        Whether bad frames are left out. Otherwise the first one ends the evaluation.
    overwrite : bool
        Whether an existing output is replaced.
    """

    batch_atoms: Optional[int] = 512
    batch_edges: Optional[int] = None
    calibration: Optional[Calibration] = None
    stress: bool = False
    covariances: bool = True
    energy_vectors: bool = True
    part: Tuple[int, int] = (1, 1)
    skip_bad: bool = False
    overwrite: bool = False

    @property
    def frame_outputs(self) -> Tuple[OutputKey, ...]:
        """Outputs of frames that are written."""
        return tuple(key for key in FRAME_OUTPUTS if self.energy_vectors or key != ENERGY_ERROR_VECTOR)

    def texts(self) -> Dict[str, str]:
        """Return the options that a continued evaluation must have again, as text by name."""
        calibration = self.calibration
        return {
            "--calibration": "none" if calibration is None else digest_of(Path(calibration.path)),
            "--stress": "given" if self.stress else "not given",
            "--no-covariances": "not given" if self.covariances else "given",
            "--no-energy-vectors": "not given" if self.energy_vectors else "given",
            "--part": "{}/{}".format(*self.part),
        }


#: Leverage beyond which error bars are a guess (docs/understand/limits.md).
FAR = 10.0


@dataclass(frozen=True)
class State:
    """How far an evaluation has come.

    Attributes
    ----------
    frame : int
        Number of the next frame of the input.
    bytes : int
        Length of the input's text that is done, from the first frame of this part on.
    sha256 : str
        Digest of that text.
    written : int
        Number of frames in the output.
    skipped : list of (int, str)
        Frames that were left out, and why.
    without_stress : int
        Number of frames in the output that have no stress, though it was asked for.
    far : int
        Number of frames in the output with an atom whose leverage is above `FAR`.
    """

    frame: int
    bytes: int = 0
    sha256: str = hashlib.sha256().hexdigest()
    written: int = 0
    skipped: Tuple[Tuple[int, str], ...] = ()
    without_stress: int = 0
    far: int = 0

    @classmethod
    def read(cls, content: Dict[str, Any]) -> "State":
        """Return the state that ``dataclasses.asdict`` and JSON have made ``content`` of."""
        return cls(**{**content, "skipped": tuple(map(tuple, content["skipped"]))})
