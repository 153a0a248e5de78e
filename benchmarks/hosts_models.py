"""What one measurement of `hosts.py` is about: settings, systems, and the functions that MACE and NequIP have alike."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ase.io
import numpy as np
import torch
from ase import Atoms

from e2ip_plugins.fitting.moments import number_of_regions
from e2ip_plugins.readout.readout import Readout

COMMITTEE_SIZE = 5
TASKS = ("inference", "training")
#: Mode -> tasks: traced training, ahead-of-time compiled and scripted inference. MACE has neither of the first two, and
#: NequIP refuses TorchScript on torch ≥ 2.10.
MODES = {
    "nequip": {"eager": TASKS, "compile": ("training",), "aoti": ("inference",)},
    "mace": {"eager": TASKS, "script": ("inference",)},
}
_NEQUIP = {"_target_": "nequip.model.NequIPGNNModel", "l_max": 2}
#: Architecture by size: `full` is what people train, `tiny` only shows that everything runs; and NequIP's backbones of
#: this project, in the sizes that they have by default.
ARCHITECTURES = {
    "nequip": {
        "full": {**_NEQUIP, "r_max": 5.0, "num_layers": 3, "num_features": 32, "parity": True},
        "tiny": {**_NEQUIP, "r_max": 3.0, "num_layers": 2, "num_features": 2, "parity": False, "radial_mlp_width": 8},
        "painn": {"_target_": "nequip_ext.PaiNNModel", "r_max": 5.0},
        "alphanet": {"_target_": "nequip_ext.AlphaNetModel", "r_max": 5.0},
    },
    "mace": {
        "full": {"r_max": 5.0, "hidden_irreps": "64x0e+64x1o", "num_interactions": 2},
        "tiny": {"r_max": 3.0, "hidden_irreps": "4x0e+4x1o", "correlation": 2, "max_ell": 2, "radial_MLP": "[8]"},
    },
}
#: Every model knows these, so that one model serves all systems.
SPECIES = ("H", "C", "O")
MOLECULE_ATOMS = 21
#: g/cm³ of water, converted to molecules per Å³.
DENSITY = 0.997 / 18.015 * 0.602214


@dataclass(frozen=True)
class Settings:
    """One system in one mode; travels to its process as JSON.

    Attributes
    ----------
    atoms : int
        Size asked for; the molecule for 21, else water.
    rounds, seconds
        In every round each variant runs once; after so many seconds no further round starts.
    committee : bool
        Whether the committee is built and measured, too: five sevenths of the time.
    size : str
        Key of `ARCHITECTURES`.
    cutoff : float
        In Å; 0 is the architecture's own.
    cache : str
        Folder in which compiled models are kept for the next system.
    """

    host: str
    mode: str
    atoms: int
    tasks: tuple[str, ...] = TASKS
    device: str = "cpu"
    size: str = "full"
    rounds: int = 15
    seconds: float = 300.0
    memory: bool = True
    committee: bool = True
    cutoff: float = 0.0
    cache: str = ""

    @property
    def frames(self) -> int:
        """Frames of a batch: NequIP's train-time compilation leaves single frames eager."""
        return 2 if self.mode == "compile" else 1

    @property
    def architecture(self) -> dict[str, Any]:
        chosen = ARCHITECTURES[self.host][self.size]
        return {**chosen, "r_max": self.cutoff} if self.cutoff else chosen


class Host:
    """Models, data and steps of one system. MACE and NequIP each have a subclass in a file of its own.

    Attributes
    ----------
    package : str
    edges : int
    """

    package: str
    edges: int

    def predictor(self, variant: str, seed: int) -> Callable[[], dict[str, torch.Tensor]]:
        """Return a function that predicts once: energies, forces, stress, and all uncertainty keys for e2ip."""
        raise NotImplementedError

    def calculator(self, variant: str, **options: Any) -> Any:
        """Return the calculator of ASE, eager; options are those of e²IP's."""
        raise NotImplementedError

    def stepper(self, variant: str, seed: int) -> Callable[[], None]:
        """Return a function that does one training step."""
        raise NotImplementedError

    def calls(self, task: str, committee: bool) -> dict[str, Callable[[], Any]]:
        """Return the functions that are compared, by variant; a committee is so many stock models, one by one."""
        make = self.predictor if task == "inference" else self.stepper
        calls = {variant: make(variant, 1) for variant in ("baseline", "e2ip")}
        if committee:
            members = [make("baseline", seed) for seed in range(1, COMMITTEE_SIZE + 1)]

            def run_members() -> None:
                results = [member() for member in members]
                if task == "inference":
                    torch.std_mean(torch.stack([result["forces"] for result in results]), dim=0)

            calls["committee"] = run_members
        return calls


def as_fitted(readout: Readout) -> None:
    """Give an untrained readout a leverage as large as 450 frames of aspirin make it, seven atoms a species each.

    Its energies have error bars.
    """
    leverage = readout.leverage
    kinds, features = leverage.centres.shape
    leverage.resize(kinds, number_of_regions(450 * 7, features, kinds))
    leverage.axes.copy_(torch.arange(kinds))
    # Far from all regions: near one κ is large, and NequIP compares what it compiles by absolute errors.
    leverage.whitening.copy_(torch.randn(leverage.whitening.shape, generator=torch.Generator().manual_seed(0)))
    leverage.region_stretch.fill_(1.0)
    leverage.region_offsets.zero_()
    leverage.fitted.fill_(True)
    leverage.energies.lengths.fill_(1.0)


def make_system(atoms: int) -> tuple[str, Atoms]:
    """Return name and frame with about so many atoms: 21 is the molecule, anything else a periodic box of water."""
    if atoms != MOLECULE_ATOMS:
        frame = water_box(max(1, round(atoms / 3)))
        return f"water, {len(frame)} atoms", frame
    source = Path(os.environ.get("E2IP_DATA", ""), "rmd17", "aspirin_split01_test.extxyz")
    if source.exists():
        return "aspirin (rMD17)", ase.io.read(source, index=0)
    frame = water_box(7)
    # Not what a droplet looks like, but as many neighbours: 21 atoms, all within the cutoff of each other.
    return "7 water molecules", Atoms(frame.symbols, frame.positions)


def water_box(molecules: int, seed: int = 0) -> Atoms:
    """Return rigid molecules in random orientation on a jittered simple cubic lattice, periodic, at 0.997 g/cm³."""
    rng = np.random.default_rng(seed)
    length = (molecules / DENSITY) ** (1.0 / 3.0)
    sites_per_edge = int(np.ceil(molecules ** (1.0 / 3.0) - 1e-9))
    spacing = length / sites_per_edge
    sites = np.stack(np.meshgrid(*[np.arange(sites_per_edge)] * 3, indexing="ij"), -1).reshape(-1, 3)
    oxygens = rng.permutation(sites)[:molecules] * spacing + rng.uniform(-0.1, 0.1, (molecules, 3)) * spacing
    x, y = 0.9572 * np.sin(np.radians(104.52 / 2)), 0.9572 * np.cos(np.radians(104.52 / 2))
    # The orthogonal factor of a Gaussian matrix is uniform over O(3), and this molecule is its own mirror image.
    rotations = np.linalg.qr(rng.normal(size=(molecules, 3, 3)))[0]
    hydrogens = oxygens[:, None] + np.array([[x, y, 0], [-x, y, 0]]) @ rotations
    positions = np.concatenate([oxygens[:, None], hydrogens], axis=1).reshape(-1, 3)
    return Atoms("OHH" * molecules, positions, cell=[length] * 3, pbc=True)


def with_labels(frame: Atoms, seed: int) -> Atoms:
    """Return the frame, shaken a little, with random reference energy and forces: the cost does not depend on them."""
    rng = np.random.default_rng(seed)
    labelled = frame.copy()
    labelled.positions += rng.normal(scale=0.02, size=frame.positions.shape)
    labelled.info["REF_energy"] = float(rng.normal())
    labelled.arrays["REF_forces"] = rng.normal(scale=0.5, size=frame.positions.shape)
    return labelled
