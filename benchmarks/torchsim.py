"""Many structures at a time: torch-sim, the batches of `e2ip evaluate`, and ASE one by one, in alternation.

    python benchmarks/torchsim.py MODEL FRAMES.extxyz [--frames 64] [--rounds 10] [--device cpu]

Predictions of a MACE model with a readout, uncertainties included, for the first frames of a file, all of them periodic
or none. Printed are the median time per frame of each way, and its ratio to ASE's; files are not written.
"""

import statistics
from pathlib import Path

import ase.io
import torch
import torch_sim
from common import alternate, parser_of
from mace.calculators import MACECalculator

from mace_ext.inference.batches import open_model
from mace_ext.inference.torchsim import TorchSimModel


def main() -> None:
    parser = parser_of(__doc__)
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
    calls = {
        "ASE, one by one": lambda: [calculator.calculate(atoms) for atoms in frames],
        "torch-sim": lambda: batched(state),
        "e2ip evaluate": lambda: evaluated.evaluate([evaluated.graph(atoms)[0] for atoms in frames], stress=False),
    }
    medians = {name: statistics.median(times) for name, times in alternate(calls, options.rounds).items()}
    for name, median in medians.items():
        ratio = median / medians["ASE, one by one"]
        print(f"{name}: {1000.0 * median / len(frames):.2f} ms per frame, {ratio:.2f}")


if __name__ == "__main__":
    main()
