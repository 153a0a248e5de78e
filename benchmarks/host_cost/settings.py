"""What one measurement is asked to do; travels to the process of each system as JSON."""

import json
from dataclasses import asdict, dataclass

VARIANTS = ("baseline", "e2ip", "committee")
COMMITTEE_SIZE = 5
TASKS = ("inference", "training")

#: Mode -> what it serves: traced training, ahead-of-time compiled and scripted inference.
MODES = {"eager": TASKS, "compile": ("training",), "aoti": ("inference",), "script": ("inference",)}

UNAVAILABLE = {
    ("nequip", "script"): "NequIP refuses TorchScript on torch ≥ 2.10",
    ("mace", "compile"): "MACE trains eagerly, it has no train-time compilation",
    ("mace", "aoti"): "MACE has no export through AOTInductor",
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


@dataclass(frozen=True)
class Settings:
    """One system in one mode on one host.

    Attributes
    ----------
    atoms : int
        Size asked for; the molecule for 21, else water.
    rounds : int
        At most; in each, every variant runs once.
    seconds : float
        Time after which no further round starts, once there are five (three for steps of more than 10 s).
    frames : int
        In a batch, all of this one system, each shaken differently.
    committee : bool
        Whether the committee is built and measured, too: five sevenths of the time.
    size : str
        Of `ARCHITECTURES`.
    cutoff : float
        In Å; 0 is the architecture's own.
    cache : str
        Folder in which compiled models are kept for the next system.
    """

    host: str
    mode: str
    atoms: int
    tasks: tuple = TASKS
    device: str = "cpu"
    dtype: str = "float32"
    size: str = "full"
    rounds: int = 15
    seconds: float = 300.0
    threads: int = 1
    frames: int = 1
    memory: bool = True
    profile: bool = False
    committee: bool = True
    cutoff: float = 0.0
    cache: str = ""

    @property
    def member_seeds(self) -> range:
        """One for each member of the committee."""
        return range(1, COMMITTEE_SIZE + 1 if self.committee else 1)

    @property
    def architecture(self) -> dict:
        chosen = ARCHITECTURES[self.host][self.size]
        return {**chosen, "r_max": self.cutoff} if self.cutoff else chosen

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Settings":
        values = json.loads(text)
        return cls(**{**values, "tasks": tuple(values["tasks"])})
