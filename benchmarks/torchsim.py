"""Many structures at a time: torch-sim, the batches of `e2ip evaluate`, and ASE one by one, in turn.

    python benchmarks/torchsim.py MODEL FRAMES.extxyz [--frames 64] [--rounds 10] [--device cpu]

Predictions of a MACE model with a readout, uncertainties included, for the first frames of a file, all of them periodic
or none. Printed are the median time per frame of each way, and its ratio to ASE's; files are not written.
"""

import argparse
import statistics
import time
from pathlib import Path

import ase.io
import torch
import torch_sim
from mace.calculators import MACECalculator

from mace_ext.inference.batches import open_model
from mace_ext.inference.torchsim import TorchSimModel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("source", type=Path)
    parser.add_argument("--frames", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    frames = ase.io.read(options.source, f":{options.frames}")
    device, dtype = torch.device(options.device), torch.float32
    calculator = MACECalculator(str(options.model), device=options.device, default_dtype="float32")
    batched = TorchSimModel(options.model, device=device, dtype=dtype, compute_stress=False)
    evaluated = open_model(options.model, device=options.device, dtype="float32", head=None)
    state = torch_sim.io.atoms_to_state(frames, device, dtype)

    def one_by_one():
        for atoms in frames:
            calculator.calculate(atoms)

    ways = {
        "ASE, one by one": one_by_one,
        "torch-sim": lambda: batched(state),
        "e2ip evaluate": lambda: evaluated.evaluate([evaluated.graph(atoms)[0] for atoms in frames], stress=False),
    }
    times = {name: [] for name in ways}
    for _ in range(options.rounds + 1):
        for name, run in ways.items():
            begin = time.perf_counter()
            run()
            times[name].append(1000.0 * (time.perf_counter() - begin) / len(frames))
    medians = {name: statistics.median(found[1:]) for name, found in times.items()}  # the first warms up
    for name, median in medians.items():
        print(f"{name}: {median:.2f} ms per frame, {median / medians['ASE, one by one']:.2f}")


if __name__ == "__main__":
    main()
