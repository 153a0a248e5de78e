"""A model for `e2ip evaluate` without a host; as a program, it evaluates a file and kills itself on the way.

python toy_model.py IN OUT BATCHES
"""

import os
import signal
import sys
from pathlib import Path

import torch

from e2ip_plugins import families, unfinished
from e2ip_plugins.evaluation.evaluate import evaluate
from e2ip_plugins.evaluation.options import EvaluateOptions

E2IP = families.get("e2ip")
OPTIONS = EvaluateOptions(batch_atoms=8)


class ToyModel:
    """Distributions depend on the place of an atom, and ν on the batch, to tell batches apart."""

    family, species, reads, dtype = E2IP, ["H", "C", "O"], [], "float64"
    warning, uq_model = "", "readout-0123456789ab"

    def __init__(self, stop_after=None, stop=None):
        self.stop_after, self.stop, self.batches = stop_after, stop, []

    def graph(self, atoms):
        return atoms, len(atoms) ** 2

    def evaluate(self, graphs, stress):
        if len(self.batches) == self.stop_after:
            self.stop()
        self.batches.append([len(atoms) for atoms in graphs])
        positions = torch.cat([torch.tensor(atoms.positions) for atoms in graphs])
        parameters = {
            "e2ip_log_sigma0": torch.cat([positions, -positions], dim=1) - 5.0,
            "e2ip_nu": 6.0 + positions[:, 0] ** 2 + 0.01 * len(positions),
            "e2ip_kappa": 0.5 + positions[:, 1] ** 2,
        }
        outputs = {
            "energy": torch.tensor([atoms.positions.sum() for atoms in graphs]),
            "forces": -positions,
            "e2ip_leverage": 1.0 + positions[:, 2] ** 2,
            **parameters,
            **E2IP.derive(parameters),
        }
        # What the model knows of a frame is its structure alone.
        assert all(atoms.calc is None and not atoms.info and len(atoms.arrays) == 2 for atoms in graphs)
        return {**outputs, "stress": torch.eye(3).expand(len(graphs), 3, 3)} if stress else outputs


def journal_at_first(state):
    """At once, then not any more, as between two entries that are a second apart."""
    unfinished.INTERVAL = 0.0 if state.written < 2 else 1e9


if __name__ == "__main__":
    source, output = map(Path, sys.argv[1:])
    dying = ToyModel(4, lambda: os.kill(os.getpid(), signal.SIGKILL))
    unfinished.INTERVAL = 0.0
    evaluate(dying, source, output, OPTIONS, {"the model": "toy"}, journal_at_first)
